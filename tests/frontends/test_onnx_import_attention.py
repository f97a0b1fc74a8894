"""The standard's Attention and RotaryEmbedding with symbolic sizes, against onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, evaluate, verify

Q, K, V = "float[batch, 4, n1, 8] q", "float[batch, 2, m1, 8] k", "float[batch, 2, m1, 6] v"


def model(inputs: str, body: str, opset: int = 23) -> onnx.ModelProto:
    outputs = body.partition("=")[0]
    declared = ", ".join(f"float {name.strip()}" for name in outputs.split(",") if name.strip() != '""')
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]>\ng ({inputs}) => ({declared}) {{ {body} }}'
    )


def floats(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def check(proto: onnx.ModelProto, *feeds: dict[str, Any]) -> Graph:
    graph = load_onnx(proto)
    verify(graph)
    for feed in feeds:
        given = dict(feed)
        if "mask" in feed:
            # The evaluator takes the number of queries from the mask when it is causal, too: give it all rows.
            full = (feed["q"].shape[0], 4, feed["q"].shape[2], feed["k"].shape[2])
            given["mask"] = np.broadcast_to(feed["mask"], full)
        wanted = ReferenceEvaluator(proto).run(None, given)
        for found, right in zip(evaluate(graph, feed).values(), wanted, strict=True):
            assert found.dtype == right.dtype
            np.testing.assert_allclose(found, right, 1e-5, 1e-6)
    return graph


def qkv(batch: int, n: int, m: int) -> dict[str, Any]:
    return {"q": floats(batch, 4, n, 8), "k": floats(batch, 2, m, 8), "v": floats(batch, 2, m, 6)}


def test_plain_with_fewer_key_heads() -> None:
    graph = check(model(f"{Q}, {K}, {V}", "y = Attention(q, k, v)"), qkv(2, 3, 5), qkv(1, 1, 1), qkv(2, 7, 64))
    assert graph.operator_counts() == {"attention": 1}


def test_causal_softcap_and_scale() -> None:
    proto = model(f"{Q}, {K}, {V}", "y = Attention<is_causal = 1, softcap = 2.0, scale = 0.25>(q, k, v)")
    graph = check(proto, qkv(2, 5, 5), qkv(1, 3, 7))
    node = next(graph.nodes)
    assert (node.attr("scale"), str(node.attr("score"))) == (0.25, "2.0 * tanh(s / 2.0)")


MASKS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "[n1, m1]": lambda b, n, m: (n, m),
    "[batch, 1, n1, m1]": lambda b, n, m: (b, 1, n, m),
    "[batch, 4, n1, m1]": lambda b, n, m: (b, 4, n, m),
    "[4, n1, m1]": lambda b, n, m: (4, n, m),
    "[1, 1, 1, m1]": lambda b, n, m: (1, 1, 1, m),
    "[batch, 1, 1, m1]": lambda b, n, m: (b, 1, 1, m),
    "[other, 1, n2, m2]": lambda b, n, m: (b, 1, n, m),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_of_every_shape(shape: str, kind: str) -> None:
    feeds = []
    for batch, n, m in ((2, 3, 5), (3, 7, 7), (1, 1, 4)):
        mask = floats(*MASKS[shape](batch, n, m))
        if kind == "bool":
            mask = mask > -0.5
            mask[..., 0] = True
        feeds.append(qkv(batch, n, m) | {"mask": mask})
    for causal in (0, 1):
        body = f"y = Attention<is_causal = {causal}>(q, k, v, mask)"
        graph = check(model(f"{Q}, {K}, {V}, {kind}{shape} mask", body), *feeds)
        assert graph.operator_counts() == {"attention": 1}


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    mask = np.array([[True, False], [False, False]])
    proto = model(f"{Q}, {K}, {V}, bool[n1, m1] mask", "y = Attention(q, k, v, mask)")
    check(proto, qkv(1, 2, 2) | {"mask": mask})


def test_a_cache_inside() -> None:
    past = "float[batch, 2, past, 8] pk, float[batch, 2, past, 6] pv"
    new = "float[batch, 4, n1, 8] q, float[batch, 2, n1, 8] k, float[batch, 2, n1, 6] v"
    proto = model(f"{new}, {past}", 'y, nk, nv = Attention<is_causal = 1>(q, k, v, "", pk, pv)')
    feeds = [qkv(2, n, n) | {"pk": floats(2, 2, p, 8), "pv": floats(2, 2, p, 6)} for n, p in ((1, 4), (3, 2), (5, 1))]
    graph = check(proto, *feeds)
    assert "past + n1" in str(graph.outputs[1].value.type).replace("n1 + past", "past + n1")


def test_a_cache_outside_with_lengths() -> None:
    proto = model(
        f"{Q}, {K}, {V}, int64[batch] length", 'y = Attention<is_causal = 1>(q, k, v, "", "", "", length)', 24
    )
    check(proto, qkv(2, 3, 6) | {"length": np.array([3, 5])}, qkv(2, 1, 6) | {"length": np.array([1, 6])})


def test_heads_side_by_side() -> None:
    inputs = "float[batch, n1, 32] q, float[batch, m1, 16] k, float[batch, m1, 12] v"
    proto = model(inputs, "y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v)")
    check(proto, {"q": floats(2, 3, 32), "k": floats(2, 5, 16), "v": floats(2, 5, 12)})


@pytest.mark.parametrize("mode", range(4))
def test_scores_and_weights_as_a_result(mode: int) -> None:
    body = f'y, "", "", w = Attention<qk_matmul_output_mode = {mode}>(q, k, v)'
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 23]>\ng ({Q}, {K}, {V}) => (float y, float w) {{ {body} }}'
    )
    check(proto, qkv(2, 3, 5))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 4])
def test_rotary_by_position(interleaved: int, width: int) -> None:
    half = (width or 8) // 2
    tables = f"float[12, {half}] c, float[12, {half}] s, int64[batch, n1] p"
    attributes = f"interleaved = {interleaved}, rotary_embedding_dim = {width}, num_heads = 3"
    feed = {"c": floats(12, half), "s": floats(12, half), "p": np.array([[0, 1, 2], [5, 6, 11]])}
    proto = model(f"float[batch, 3, n1, 8] x, {tables}", f"y = RotaryEmbedding<{attributes}>(x, c, s, p)")
    graph = check(proto, feed | {"x": floats(2, 3, 3, 8)})
    assert graph.operator_counts() == {"gather": 2, "rope": 1}
    flat = model(f"float[batch, n1, 24] x, {tables}", f"y = RotaryEmbedding<{attributes}>(x, c, s, p)")
    check(flat, feed | {"x": floats(2, 3, 24)})


def test_rotary_by_tables_of_the_batch() -> None:
    proto = model(
        "float[batch, 3, n1, 8] x, float[batch, n1, 4] c, float[batch, n1, 4] s", "y = RotaryEmbedding(x, c, s)"
    )
    for n in (1, 7):
        check(proto, {"x": floats(2, 3, n, 8), "c": floats(2, n, 4), "s": floats(2, n, 4)})
