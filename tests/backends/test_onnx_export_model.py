"""What an exported model looks like: sizes, attention, names, states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx import OnnxBackend, export
from attnc.backends.onnx.kernels import Dialect
from attnc.backends.onnx.reference import ReferenceExecutable
from attnc.backends.onnx.writer import embed, write
from attnc.backends.ort import OrtCpuBackend
from attnc.ir import (
    Array,
    Builder,
    Dim,
    DType,
    Graph,
    State,
    Tensor,
    TensorType,
    UnsupportedError,
    Value,
    evaluate,
    evaluate_dim,
    parse_dim,
    symbol,
)

F = DType.FLOAT32
BATCH, SEQ, PAST = symbol("batch"), symbol("seq"), symbol("past")


def op_types(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def ort(graph: Graph, feeds: dict[str, Array], opset: int | None = None) -> dict[str, Array]:
    return OrtCpuBackend().load(graph, None, Options(opset, threads=1)).run(feeds, {})


def transformer() -> Graph:
    """Token ids → logits: one layer with norms, rotary embedding, grouped causal attention and a gated FFN."""
    rng = np.random.default_rng(5)
    graph = Graph("small")
    b = Builder(graph)
    vocab, width, heads, groups, head = 19, 16, 4, 2, 4

    def weight(name: str, *shape: int) -> Value:
        return b.constant(rng.normal(size=shape).astype(np.float32) / 4, name)

    ids = graph.add_input("input_ids", TensorType(DType.INT64, (BATCH, SEQ)))
    table = weight("embed.weight", vocab, width)
    with b.at("embed"):
        x = b("gather", table, ids)
    with b.at("layers.0.norm"):
        h = b("rms_norm", x, weight("layers.0.norm.weight", width))
    with b.at("layers.0.attention"):
        positions = b("iota", shape=(SEQ, head // 2), axis=0, dtype=F)
        angles = b.mul(positions, b.constant(np.array([1.0, 0.1], np.float32)))
        cos, sin = b("cos", angles), b("sin", angles)

        def project(name: str, count: int) -> Value:
            y = b.matmul(h, weight(f"layers.0.{name}.weight", width, count * head))
            return b.transpose(b.reshape(y, (BATCH, SEQ, count, head)), (0, 2, 1, 3))

        q, k = (b("rope", project(name, count), cos, sin) for name, count in (("q", heads), ("k", groups)))
        o = b("attention", q, k, project("v", groups), scale=0.5, mask="j <= i")
        o = b.reshape(b.transpose(o, (0, 2, 1, 3)), (BATCH, SEQ, heads * head))
        x = b.add(x, b.matmul(o, weight("layers.0.o.weight", width, width)))
    with b.at("layers.0.ffn"):
        h = b("layer_norm", x, weight("layers.0.ffn.norm", width))
        gate = b("silu", b.matmul(h, weight("layers.0.ffn.gate", width, 24)))
        up = b("gelu", b.matmul(h, weight("layers.0.ffn.up", width, 24)))
        x = b.add(x, b.matmul(b.mul(gate, up), weight("layers.0.ffn.down", 24, width)))
    with b.at("head"):
        graph.add_output(b.matmul(x, b.transpose(table, (1, 0))), "logits")
    return graph


@pytest.mark.parametrize("opset", [13, 17, 22, 23, 25])
def test_transformer_at_two_lengths(opset: int) -> None:
    graph = transformer()
    model = export(graph, opset)
    onnx.checker.check_model(model, full_check=True)
    executable = OrtCpuBackend().load(graph, None, Options(opset, threads=1))
    for shape in ((2, 7), (1, 3)):
        feeds = {"input_ids": np.arange(np.prod(shape)).reshape(shape) % 19}
        want = evaluate(graph, feeds, precision=DType.FLOAT64)["logits"]
        np.testing.assert_allclose(executable.run(feeds, {})["logits"], want, rtol=1e-5, atol=1e-5)
        reference = ReferenceExecutable(graph, None, Dialect(opset)).run(feeds, {})["logits"]
        np.testing.assert_allclose(reference, want, rtol=1e-5, atol=1e-5)
    composites = {"Attention", "RotaryEmbedding", "RMSNormalization"} & set(op_types(model))
    assert len(composites) == (3 if opset >= 23 else 0)
    assert ("LayerNormalization" in op_types(model)) == (opset >= 17)
    assert ("Gelu" in op_types(model)) == (opset >= 20)


@pytest.mark.parametrize("rounded", [np.float32, np.float16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_with_rounded_numbers(approximate: str, rounded: Any) -> None:
    """A model holds sqrt(1/2) rounded. To ONNX's Gelu in float32 that of a float32 is the number; that of a half is
    not, and the activation is written out."""
    graph = Graph("small")
    x = graph.add_input("x", TensorType(F, (9,)))
    attrs: dict[str, Any] = {"approximate": approximate, "scale": float(rounded(math.sqrt(0.5)))}
    if approximate == "tanh":
        attrs |= {"scale": float(rounded(math.sqrt(2 / math.pi))), "cubic": float(rounded(0.044715))}
    graph.add_output(graph.add("gelu", x, attrs=attrs)[0], "y")
    assert ("Gelu" in op_types(export(graph, 20))) == (rounded is np.float32)
    v = np.linspace(-3, 3, 9)
    inner = attrs["scale"] * (v + attrs.get("cubic", 0.0) * v**3)
    want = v / 2 * (1 + (np.tanh(inner) if approximate == "tanh" else np.array([math.erf(u) for u in inner])))
    np.testing.assert_allclose(ort(graph, {"x": v.astype(np.float32)}, 20)["y"], want, rtol=1e-6, atol=1e-6)


def test_the_model_is_readable() -> None:
    model = export(transformer(), 17)
    assert model.producer_name == "attnc"
    assert model.producer_version
    assert model.doc_string == "small, written by attnc"
    assert model.graph.name == "small"
    dims = [d.dim_param or d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
    assert dims == ["batch", "seq", 19]
    assert {"embed.weight", "layers.0.q.weight"} <= {t.name for t in model.graph.initializer}
    names = [n.name for n in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"embed/Gather", "head/MatMul"} <= set(names)
    assert all(name.startswith(("embed/", "layers.0.", "head/", "size/")) for name in names)
    assert [o.name for o in model.graph.output] == ["logits"]


def test_each_size_is_read_once() -> None:
    assert op_types(export(transformer(), 23)).count("Shape") <= 2


def sizes_graph(dims: list[Dim]) -> Graph:
    graph = Graph()
    graph.add_input("x", TensorType(F, (symbol("a"), 2, symbol("b"))))
    for number, d in enumerate(dims):
        graph.add_output(graph.add("size", attrs={"value": d})[0], f"d{number}")
    return graph


@pytest.mark.parametrize("opset", [13, 23])
def test_arithmetic_of_sizes(opset: int) -> None:
    texts = ["a", "a + b", "2*a*b - 3", "a*a*b", "a // 3", "(a - b) // 2", "(a - b) % 4", "min(a, b)", "7"]
    texts += ["max(2*a, b + 1)", "-a", "5 - a", "a // b", "(a + 1) // 2 * 3", "a - b"]
    dims = [parse_dim(t) for t in texts]
    graph = sizes_graph(dims)
    onnx.checker.check_model(export(graph, opset), full_check=True)
    for a, b in ((5, 3), (1, 8), (4, 4)):
        got = ort(graph, {"x": np.zeros((a, 2, b), np.float32)}, opset)
        assert [int(got[f"d{k}"]) for k in range(len(dims))] == [evaluate_dim(d, {"a": a, "b": b}) for d in dims]


def test_a_size_that_nothing_shows() -> None:
    graph = Graph()
    graph.add_input("x", TensorType(F, (parse_dim("2*a"),)))
    graph.add_output(graph.add("size", attrs={"value": symbol("a")})[0], "a")
    with pytest.raises(UnsupportedError, match="the size a cannot be computed"):
        export(graph)


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ("a, b, 8", "a, b, 2, 4"),
        ("a, b, 2, 4", "a, b, 8"),
        ("a, 2, b, 4", "2*a, b, 4"),
        ("a, b", "a*b"),
        ("a, b, 4", "1, a, b, 4"),
    ],
)
def test_reshape_and_expand_without_sizes(shape: str, target: str) -> None:
    graph = Graph()
    read = [tuple(parse_dim(d) for d in text.split(",")) for text in (shape, target)]
    x = graph.add_input("x", TensorType(F, read[0]))
    graph.add_output(graph.add("reshape", x, attrs={"shape": read[1]})[0], "y")
    known = len([d for d in read[1] if not isinstance(d, int)]) <= 2 and target != "1, a, b, 4" and target[0] != "2"
    assert ("Shape" not in op_types(export(graph, 17))) == known
    feeds = {"x": np.random.default_rng(0).normal(size=[evaluate_dim(d, {"a": 3, "b": 5}) for d in read[0]])}
    feeds["x"] = feeds["x"].astype(np.float32)
    np.testing.assert_array_equal(ort(graph, feeds)["y"], evaluate(graph, feeds)["y"])


def test_expand_reads_only_what_it_repeats() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (BATCH, 1, SEQ)))
    graph.add_output(graph.add("expand", x, attrs={"shape": (BATCH, 3, SEQ)})[0], "y")
    assert op_types(export(graph)) == ["Expand"]


@pytest.mark.parametrize("opset", [13, 23])
def test_slices_with_symbolic_ends(opset: int) -> None:
    graph = Graph()
    n = symbol("n")
    x = graph.add_input("x", TensorType(F, (n, n)))
    attrs: list[dict[str, Any]] = [
        {"axes": (0,), "starts": (1,), "sizes": (n - 1,)},
        {"axes": (1,), "starts": (n - 1,), "sizes": (n,), "steps": (-1,)},
        {"axes": (0, 1), "starts": (n - 2, n - 1), "sizes": (2, n // 2), "steps": (1, -2)},
        {"axes": (0,), "starts": (n // 2,), "sizes": (n - n // 2,)},
    ]
    for number, given in enumerate(attrs):
        graph.add_output(graph.add("slice", x, attrs=given)[0], f"y{number}")
    onnx.checker.check_model(export(graph, opset), full_check=True)
    for size in (2, 5, 8):
        feeds = {"x": np.arange(size * size, dtype=np.float32).reshape(size, size)}
        want = evaluate(graph, feeds)
        for name, array in ort(graph, feeds, opset).items():
            np.testing.assert_array_equal(array, want[name])


# -- attention -------------------------------------------------------------------------------------------------------


def attention(n: Dim = SEQ, m: Dim = SEQ, dtype: DType = F, loads: dict[str, Any] | None = None, **attrs: Any) -> Graph:
    graph = Graph()
    b = Builder(graph)
    q = graph.add_input("q", TensorType(dtype, (BATCH, 4, n, 8)))
    k, v = (graph.add_input(name, TensorType(dtype, (BATCH, 2, m, 8))) for name in "kv")
    given = [
        b.constant(x) if isinstance(x, np.ndarray) else graph.add_input(name, x) for name, x in (loads or {}).items()
    ]
    graph.add_output(b("attention", q, k, v, *given, loads=tuple(loads or {}), scale=0.3, **attrs), "o")
    return graph


def attention_feeds(n: int = 5, m: int = 5) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 4, n, 8), "k": (2, 2, m, 8), "v": (2, 2, m, 8)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


@pytest.mark.parametrize(
    ("graph", "attributes"),
    [
        (attention(), {"scale"}),
        (attention(mask="j <= i"), {"scale", "is_causal"}),
        (attention(mask="j <= i and i - j < 3"), {"scale"}),
        (attention(score="20 * tanh(s / 20)"), {"scale", "softcap"}),
        (attention(loads={"slopes": SLOPES}, score="s + slopes[h] * (j - i)"), {"scale"}),
        (attention(loads={"slopes": SLOPES}, score="s - slopes[h] * i + 1", mask="j <= i"), {"scale"}),
        (attention(SEQ, PAST + SEQ, mask="j <= i + m - n"), {"scale"}),
    ],
    ids=["full", "causal", "window", "softcap", "alibi", "causal-alibi", "cached"],
)
def test_attention_is_used_where_it_says_the_same(graph: Graph, attributes: set[str]) -> None:
    m = 5
    if graph.inputs[1].shape[2] != SEQ:
        graph.add_input("past", TensorType(F, (PAST,)))
        m = 8
    model = export(graph, 23)
    onnx.checker.check_model(model, full_check=True)
    (node,) = [n for n in model.graph.node if n.op_type == "Attention"]
    assert {a.name for a in node.attribute} == attributes
    feeds = attention_feeds(5, m) | ({"past": np.zeros(3, np.float32)} if m == 8 else {})
    want = evaluate(graph, feeds)["o"]
    np.testing.assert_allclose(ort(graph, feeds)["o"], want, rtol=1e-5, atol=1e-6)
    reference = ReferenceExecutable(graph, None, Dialect(23)).run(feeds, {})["o"]
    np.testing.assert_allclose(reference, want, rtol=1e-5, atol=1e-6)
    assert "Attention" not in op_types(export(graph, 22))


@pytest.mark.parametrize(
    "graph",
    [
        attention(mask="j < i"),
        attention(mask="j <= i and j >= 2"),
        attention(where="j <= i"),
        attention(score="2 * s"),
        attention(score="s + s"),
        attention(score="20 * tanh(s / 20)", mask="j <= i"),
        attention(inner="-abs(q - k)"),
        attention(sink="0.5"),
        attention(normalise="none"),
        attention(weights=True),
        attention(loads={"bias": TensorType(F, (SEQ, SEQ))}, score="s + bias[i, j]"),
        attention(loads={"bias": np.array([0, -np.inf], np.float32)}, score="s + bias[j % 2]"),
        attention(loads={"x": SLOPES}, score="s + log(x[h] - 1)"),
        attention(dtype=DType.FLOAT16),
    ],
)
def test_attention_is_not_used_where_it_may_differ(graph: Graph) -> None:
    model = export(graph, 23)
    onnx.checker.check_model(model, full_check=True)
    assert "Attention" not in op_types(model)


def test_queries_without_keys_give_zeros() -> None:
    graph = attention(mask="j < i")
    got = ort(graph, attention_feeds())["o"]
    assert not got[:, :, 0].any()
    np.testing.assert_allclose(got, evaluate(graph, attention_feeds())["o"], rtol=1e-5, atol=1e-6)


def test_attention_over_a_state_that_may_be_empty() -> None:
    graph = Graph()
    graph.add_state(State("keys", TensorType(F, (BATCH, 2, PAST, 8))))
    q = graph.add_input("q", TensorType(F, (BATCH, 2, SEQ, 8)))
    k = graph.add("state_read", attrs={"state": "keys"})[0]
    graph.add_output(graph.add("attention", q, k, k)[0], "o")
    assert "Attention" not in op_types(export(graph, 23))
    executable = OrtCpuBackend().load(graph, None, Options(threads=1))
    q_now = attention_feeds()["q"][:, :2]
    for length in (0, 4):
        states = {"keys": attention_feeds()["k"][:, :, :length]}
        want = evaluate(graph, {"q": q_now}, states=dict(states))["o"]
        np.testing.assert_allclose(executable.run({"q": q_now}, states)["o"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_agrees_with_two_other_runtimes(interleaved: bool, rank: int) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (BATCH, 3, SEQ, 8)))
    table = (BATCH, SEQ, 2)[3 - rank :]
    cos, sin = (graph.add_input(name, TensorType(F, table)) for name in ("cos", "sin"))
    attrs = {"interleaved": interleaved, "rotary_dim": 4}
    graph.add_output(graph.add("rope", x, cos, sin, attrs=attrs)[0], "y")
    assert "RotaryEmbedding" in op_types(export(graph, 23))
    rng = np.random.default_rng(2)
    sizes = {"batch": 2, "seq": 5}
    feeds = {v.name: rng.normal(size=v.type.concrete(sizes)).astype(np.float32) for v in graph.inputs}
    want = evaluate(graph, feeds)["y"]
    np.testing.assert_allclose(ort(graph, feeds)["y"], want, rtol=1e-5, atol=1e-6)
    reference = ReferenceExecutable(graph, None, Dialect(23)).run(feeds, {})["y"]
    np.testing.assert_allclose(reference, want, rtol=1e-5, atol=1e-6)


# -- outputs and states ----------------------------------------------------------------------------------------------


def test_outputs_that_no_node_makes() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (2,)))
    y = graph.add("neg", x, names=["x_neg"])[0]
    graph.add_output(x, "x")
    graph.add_output(x, "same")
    graph.add_output(y, "first")
    graph.add_output(y, "second")
    graph.add_output(graph.add_constant(np.array([1, 2])), "constant")
    onnx.checker.check_model(export(graph), full_check=True)
    feeds = {"x": np.array([1, -2], np.float32)}
    got = ort(graph, feeds)
    assert list(got) == ["x", "same", "first", "second", "constant"]
    for name, array in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(got[name], array)


def test_an_output_with_the_name_of_another_value() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (2,)))
    y = graph.add("neg", x, names=["y"])[0]
    z = graph.add("exp", y, names=["z"])[0]
    graph.add_output(z, "y")
    graph.add_output(y, "x")
    onnx.checker.check_model(export(graph), full_check=True)
    feeds = {"x": np.array([1, -2], np.float32)}
    for name, array in evaluate(graph, feeds).items():
        np.testing.assert_allclose(ort(graph, feeds)[name], array, rtol=1e-6)


def cached() -> Graph:
    graph = Graph("decoder")
    b = Builder(graph, "layer")
    for name in ("k0", "v0"):
        graph.add_state(State(name, TensorType(F, (BATCH, 2, PAST, 4)), description="a cache"))
    x = graph.add_input("x", TensorType(F, (BATCH, SEQ, 8)))
    q = b.transpose(b.reshape(x, (BATCH, SEQ, 2, 4)), (0, 2, 1, 3))
    before = b("state_read", state="k0")
    k, v = b("state_append", q, state="k0", axis=2), b("state_append", b("exp", q), state="v0", axis=2)
    o = b("attention", q, k, v, mask="j <= i + m - n")
    graph.add_output(b.reshape(b.transpose(o, (0, 2, 1, 3)), (BATCH, SEQ, 8)), "y")
    graph.add_output(b.reshape(b.transpose(before, (0, 2, 1, 3)), (BATCH * PAST, 8)), "flat")
    graph.add_output(b.reshape(before, (2, BATCH, PAST, 4)), "turned")
    return graph


@pytest.mark.parametrize("opset", [14, 17, 23])
@pytest.mark.parametrize("backend", [OnnxBackend, OrtCpuBackend])
def test_states_go_in_and_come_out(backend: type[OnnxBackend], opset: int) -> None:
    graph = cached()
    exported = write(graph, Dialect(opset))
    embed(exported)
    model = exported.model
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["x", "past_k0", "past_v0"]
    assert [o.name for o in model.graph.output] == ["y", "flat", "turned", "present_k0", "present_v0"]
    executable = backend().load(graph, None, Options(opset, threads=1))
    states, expected = ({name: np.zeros((2, 2, 0, 4), np.float32) for name in ("k0", "v0")} for _ in range(2))
    rng = np.random.default_rng(4)
    for length in (3, 1, 2):
        feeds = {"x": rng.normal(size=(2, length, 8)).astype(np.float32)}
        got, want = executable.run(feeds, states), evaluate(graph, feeds, states=expected)
        for name in want:
            assert got[name].shape == want[name].shape
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
        for name, array in expected.items():
            np.testing.assert_allclose(states[name], array, rtol=1e-6)
    assert states["k0"].shape == (2, 2, 6, 4)


def test_constants_are_shared() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (4096,)))
    weight = Tensor(np.arange(4096, dtype=np.float32))
    for number in range(2):
        w = graph.add_constant(weight, f"w{number}")
        graph.add_output(
            graph.add("mul", graph.add("add", x, w)[0], graph.add_constant(np.float32(2)))[0], f"y{number}"
        )
    assert len(export(graph).graph.initializer) == 2
