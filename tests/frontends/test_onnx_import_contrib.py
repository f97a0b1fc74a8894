"""The fused operators of com.microsoft without the attentions, against ONNX Runtime on models of one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import UnsupportedError, evaluate
from attnc.tests.frontends.runtime import agree, draw, integers, node_model, runtime_results

X = draw(2, 5, 8)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("Gelu", [X], {}),
        ("BiasGelu", [X, draw(8)], {}),
        ("FastGelu", [X], {}),
        ("FastGelu", [X, draw(8)], {}),
        ("QuickGelu", [X], {}),
        ("QuickGelu", [X], {"alpha": 1.0}),
        ("QuickGelu", [X], {"alpha": -0.7}),
    ],
)
def test_activations(op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    agree(op_type, inputs, dims={0: ["batch", "seq", 8]}, **attributes)


@pytest.mark.parametrize("epsilon", [1e-12, 0.3])
@pytest.mark.parametrize("skip", [(2, 5, 8), (1, 5, 8), (5, 8)])
@pytest.mark.parametrize(("beta", "bias"), [(True, False), (False, True), (True, True), (False, False)])
def test_skip_layer_normalization(skip: tuple[int, ...], beta: bool, bias: bool, epsilon: float) -> None:
    inputs = [X, draw(*skip, seed=1), draw(8), draw(8, seed=2) if beta else None, draw(8, seed=3) if bias else None]
    agree("SkipLayerNormalization", inputs, [True, False, False, True], epsilon=epsilon)
    agree("SkipLayerNormalization", inputs)
    simplified = [*inputs[:3], inputs[4]]
    agree("SkipSimplifiedLayerNormalization", simplified, [True, False, False, True], epsilon=epsilon)


def test_statistics_of_skip_layer_normalization_are_refused() -> None:
    """ONNX Runtime does not compute them on a CPU."""
    model, _ = node_model("SkipLayerNormalization", [X, X, draw(8)], 2)
    with pytest.raises(UnsupportedError, match=r"the_node .*output y1"):
        load_onnx(model)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (8,)), (2, (8,)), (1, (5, 8))])
def test_simplified_layer_normalization(axis: int, scale: tuple[int, ...]) -> None:
    agree("SimplifiedLayerNormalization", [X, draw(*scale)], domain="", axis=axis, epsilon=0.01)
    agree("SimplifiedLayerNormalization", [X, draw(*scale)], domain="", axis=axis, epsilon=0.01, stash_type=1)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_embed_layer_normalization(segments: bool, mask: bool, positions: bool) -> None:
    inputs = [
        integers(0, 10, 2, 5, dtype="int32"),
        integers(0, 1, 2, 5, dtype="int32") if segments else None,
        draw(11, 8), draw(7, 8), draw(2, 8) if segments else None, draw(8), draw(8, seed=1),
        np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32) if mask else None,
        integers(0, 6, 2, 5, dtype="int32") if positions else None,
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    dims = {0: ["batch", "seq"]} | ({1: ["batch", "seq"]} if segments else {})
    agree("EmbedLayerNormalization", inputs, 3 if positions or not mask else 2, dims=dims)


A, B = draw(2, 3, 4, 5), draw(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [
        (A, B, {}),
        (A, B, {"alpha": 0.125}),
        (A, draw(2, 3, 6, 5), {"transB": 1}),
        (draw(2, 3, 5, 4), B, {"transA": 1, "alpha": -2.0}),
        (draw(2, 3, 5, 4), draw(2, 3, 6, 5), {"transA": 1, "transB": 1}),
        (draw(4, 2, 3, 5), B, {"transBatchA": 1}),
        (A, draw(5, 2, 3, 4), {"transBatchB": 1}),
        (draw(4, 2, 3, 5), draw(6, 2, 3, 5), {"transBatchA": 1, "transBatchB": 1, "transB": 1}),
        (draw(3, 4), draw(4, 2), {"alpha": 3.0}),
    ],
)
def test_fused_matmul(a: Any, b: Any, attributes: dict[str, Any]) -> None:
    agree("FusedMatMul", [a, b], **attributes)


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu"])
def test_fused_gemm(activation: str) -> None:
    inputs = [draw(3, 4), draw(5, 4), draw(5)]
    attributes: dict[str, Any] = {"activation_alpha": 0.3} if activation == "LeakyRelu" else {}
    agree("FusedGemm", inputs, activation=activation, transB=1, alpha=0.5, beta=2.0, **attributes)
    agree("FusedGemm", [draw(4, 3), draw(4, 5)], activation=activation, transA=1, **attributes)


def test_an_unknown_activation_is_refused() -> None:
    model, _ = node_model("FusedGemm", [draw(3, 4), draw(4, 5)], activation="HardSigmoid")
    with pytest.raises(UnsupportedError, match=r"the_node .*activation.*HardSigmoid"):
        load_onnx(model)


def nbits(bits: int, block: int, n: int, k: int, zero: str, group: bool, bias: bool) -> list[Any]:
    blocks = -(-k // block)
    inputs: list[Any] = [
        draw(2, 3, k), integers(0, 255, n, blocks, block * bits // 8, dtype="uint8"), draw(n, blocks, scale=0.1),
        None, None, draw(n) if bias else None,
    ]  # fmt: skip
    if zero == "packed":
        inputs[3] = integers(0, 255, n, -(-blocks * bits // 8), dtype="uint8", seed=1)
    elif zero == "float":
        inputs[3] = draw(n, blocks, seed=2) + 8
    if group:
        inputs[4] = integers(0, blocks - 1, blocks * block, dtype="int32")
    while inputs[-1] is None:
        inputs.pop()
    return inputs


@pytest.mark.parametrize(
    ("bits", "zero"), [(4, ""), (4, "packed"), (4, "float"), (8, ""), (8, "packed"), (2, "packed")]
)
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("k", [128, 80])
def test_matmul_nbits(bits: int, block: int, zero: str, k: int) -> None:
    for bias in (False, True):
        inputs = nbits(bits, block, 12, k, zero, False, bias)
        constants = range(1, len(inputs))
        agree(
            "MatMulNBits", inputs, bits=bits, block_size=block, N=12, K=k, constants=constants,
            dims={0: ["batch", "seq", k]},
        )  # fmt: skip


def test_matmul_nbits_with_weights_as_inputs_and_groups() -> None:
    inputs = nbits(4, 16, 12, 64, "packed", False, False)
    agree("MatMulNBits", inputs, bits=4, block_size=16, N=12, K=64)
    inputs = nbits(4, 16, 12, 64, "", True, False)
    agree("MatMulNBits", inputs, bits=4, block_size=16, N=12, K=64, constants=range(1, 5))


def test_matmul_nbits_by_hand() -> None:
    """0x21 holds 1 and 2, less the middle 8, times the scale."""
    packed = np.full((1, 1, 8), 0x21, np.uint8)
    x = np.zeros((1, 16), np.float32)
    x[0, :2] = [1, 10]
    model, feeds = node_model(
        "MatMulNBits", [x, packed, np.array([[0.5]], np.float32)], bits=4, block_size=16, N=1, K=16
    )
    assert evaluate(load_onnx(model), feeds)["y0"].tolist() == [[0.5 * (-7 - 60)]]


@pytest.mark.parametrize(("bits", "extra", "what"), [(3, {}, "bits"), (4, {"weight_prepacked": 1}, "weight_prepacked")])
def test_matmul_nbits_refusals(bits: int, extra: dict[str, Any], what: str) -> None:
    inputs = [draw(3, 16), integers(0, 255, 2, 1, 2 * bits, dtype="uint8"), draw(2, 1)]
    model, _ = node_model("MatMulNBits", inputs, bits=bits, block_size=16, N=2, K=16, **extra)
    with pytest.raises(UnsupportedError, match=rf"the_node .*{what}"):
        load_onnx(model)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("shape", ["flat", "heads", "partial"])
def test_rotary_embedding(interleaved: int, offset: bool, shape: str) -> None:
    x = draw(2, 5, 48) if shape == "flat" else draw(2, 3, 5, 16)
    attributes: dict[str, Any] = {"interleaved": interleaved}
    half = 8
    if shape == "partial":
        half, attributes["rotary_embedding_dim"], attributes["num_heads"] = 4, 8, 3
    angle = draw(20, half)
    positions = np.array([4]) if offset else integers(0, 19, 2, 5)
    dims: dict[int, list[str | int]] = {0: ["batch", "seq", 48] if shape == "flat" else ["batch", 3, "seq", 16]}
    graph = agree("RotaryEmbedding", [x, positions, np.cos(angle), np.sin(angle)], dims=dims, **attributes)
    assert graph.operator_counts()["rope"] == 1


def test_an_attribute_that_is_not_known_is_refused_by_name() -> None:
    model, _ = node_model("QuickGelu", [X])
    model.graph.node[0].attribute.append(helper.make_attribute("beta", 2.0))
    with pytest.raises(UnsupportedError, match=r"the_node .*beta"):
        load_onnx(model)
    angle = draw(20, 4)
    inputs = [draw(2, 5, 8), np.array([0]), np.cos(angle), np.sin(angle)]
    for attribute, value in (("scale", 2.0), ("is_packed_batching", 1)):
        more: dict[str, Any] = {attribute: value}
        model, _ = node_model("RotaryEmbedding", inputs, **more)
        with pytest.raises(UnsupportedError, match=rf"the_node .*{attribute}"):
            load_onnx(model)


def test_the_harness_runs_the_runtime() -> None:
    model, feeds = node_model("Gelu", [np.zeros((1, 1), np.float32)])
    assert runtime_results(model, feeds)[0].tolist() == [[0.0]]
