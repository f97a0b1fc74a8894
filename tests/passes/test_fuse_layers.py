"""Norms, rotations and activations in their spellings, each equal to what it was in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.frontends.onnx import load_onnx
from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol, verify
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fold_views import fold_views
from attnc.passes.fuse_attention import fuse_attention
from attnc.passes.fuse_ffn import fuse_ffn
from attnc.passes.fuse_norm import fuse_norm
from attnc.passes.fuse_rope import fuse_rope

ZOO = Path(__file__).parent.parent / "data" / "zoo"
B, N, H, D = symbol("batch"), symbol("seq"), 4, 8
RNG = np.random.default_rng(11)
WEIGHT, BIAS = RNG.normal(size=D), RNG.normal(size=D)


def build(shape: tuple[Any, ...], make: Callable[[Builder, Value], Value], dtype: DType = DType.FLOAT64) -> Graph:
    graph = Graph()
    b = Builder(graph, "spelling")
    graph.add_output(make(b, graph.add_input("x", TensorType(dtype, shape))), "y")
    canonicalise(graph)
    return graph


def fused(graph: Graph, run: Callable[[Graph], PassResult], tolerance: float = 1e-12) -> tuple[Graph, PassResult]:
    """The graph after a pass, compared with the one before."""
    before = graph.copy()
    result = run(graph)
    verify(graph)
    for n in (1, 2, 7):
        x = graph.inputs[0].type
        shape = x.concrete({"batch": 2, "seq": n})
        given = {"x": np.random.default_rng(n).normal(size=shape).astype(x.dtype.numpy)}
        want = evaluate(before, given, precision=DType.FLOAT64)["y"]
        found = evaluate(graph, given, precision=DType.FLOAT64)["y"]
        assert np.abs(found - want).max() <= tolerance * np.abs(want).max()
    canonicalise(graph)
    return graph, result


def norm(b: Builder, x: Value, centre: bool, square: str, root: str, mean: str, weight: str, bias: bool) -> Value:
    def average(v: Value) -> Value:
        if mean == "mean":
            return b("reduce_mean", v, axes=(-1,), keepdims=True)
        if mean == "unsqueezed":
            return b.unsqueeze(b("reduce_mean", v, axes=(2,)), -1)
        return b.div(b("reduce_sum", v, axes=(-1,), keepdims=True), float(D))

    z = b.sub(x, average(x)) if centre else x
    squared = b.mul(z, z) if square == "mul" else b("pow", z, 2.0)
    shifted = b.add(average(squared), 1e-5)
    w = b.add(b.constant(WEIGHT), 1.0) if weight == "one_plus" else b.constant(WEIGHT)
    if root == "div":
        y = b.div(z, b("sqrt", shifted))
    elif root == "pow":
        y = b.div(z, b("pow", shifted, 0.5))
    else:
        inverse = {
            "rsqrt": lambda: b("reciprocal", b("sqrt", shifted)),
            "one_over": lambda: b.div(1.0, b("sqrt", shifted)),
            "power": lambda: b("pow", shifted, -0.5),
            "weighted": lambda: b("reciprocal", b("sqrt", shifted)),
        }[root]()
        if root == "weighted":
            return b.mul(z, b.mul(inverse, w))
        y = b.mul(inverse, z)
    y = y if weight == "none" else b.mul(w, y)
    return b.add(y, b.constant(BIAS)) if bias else y


ROOTS = ("div", "pow", "rsqrt", "one_over", "power", "weighted")


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("square", ["mul", "pow"])
@pytest.mark.parametrize("mean", ["mean", "unsqueezed", "sum"])
@pytest.mark.parametrize("centre", [False, True])
def test_norms(centre: bool, mean: str, square: str, root: str) -> None:
    for weight, bias in product(("none", "plain", "one_plus"), (False, True)):
        graph = build((B, N, D), lambda b, x: norm(b, x, centre, square, root, mean, weight, bias))  # noqa: B023
        graph, _ = fused(graph, fuse_norm)
        name = "layer_norm" if centre else "rms_norm"
        is_left = bias and not centre and root != "weighted"
        expected = {name: 1, "add": 1} if is_left else {name: 1}
        assert graph.operator_counts() == expected


def test_a_norm_in_float32_of_halves() -> None:
    def make(b: Builder, x: Value) -> Value:
        y = norm(b, b.cast(x, DType.FLOAT32), False, "pow", "rsqrt", "mean", "none", False)
        return b.mul(b.constant(WEIGHT.astype(np.float16)), b.cast(y, DType.FLOAT16))

    graph, _ = fused(build((B, N, D), make, DType.FLOAT16), fuse_norm)
    assert graph.operator_counts() == {"rms_norm": 1}
    assert len(next(graph.nodes).operands) == 2


def test_no_norm() -> None:
    def other(b: Builder, x: Value) -> Value:
        root = b("sqrt", b.add(b("reduce_mean", b.mul(x, x), axes=(-1,), keepdims=True), 1e-5))
        return b.div(b("tanh", x), root)

    def first_axis(b: Builder, x: Value) -> Value:
        root = b("sqrt", b.add(b("reduce_mean", b.mul(x, x), axes=(1,), keepdims=True), 1e-5))
        return b.div(x, root)

    def length(b: Builder, x: Value) -> Value:
        return b.div(x, b("sqrt", b.add(b("reduce_sum", b.mul(x, x), axes=(-1,), keepdims=True), 1e-5)))

    for make, reason in ((other, "is divided by the root"), (first_axis, "which are not the last"), (length, "")):
        graph, result = fused(build((B, N, D), make), fuse_norm)
        assert not result.changed
        assert not {"rms_norm", "layer_norm"} & set(graph.operator_counts())
        assert reason in "".join(r.reason for r in result.refusals)


def angles(b: Builder, width: int, doubled: str) -> tuple[Value, Value]:
    steps = b.unsqueeze(b("iota", shape=(N,), dtype=DType.FLOAT64), 1)
    f = b.mul(steps, b.constant(10.0 ** -np.arange(width // 2)))
    if doubled == "halves":
        f = b("concat", f, f, axis=-1)
    elif doubled == "pairs":
        f = b.reshape(b.expand(b.unsqueeze(f, -1), (N, width // 2, 2)), (N, width))
    elif doubled == "wrong":
        f = b("concat", f, b.mul(f, 2.0), axis=-1)
    return b("cos", f), b("sin", f)


def cut(b: Builder, x: Value, start: int, size: int, step: int = 1) -> Value:
    return b("slice", x, axes=(x.type.rank - 1,), starts=(start,), sizes=(size,), steps=(step,))


def rotate(b: Builder, x: Value, form: str, partial: bool, middle: bool) -> Value:
    """x [b, h, n, d], or [b, n, h, d] with the heads in the ``middle``."""
    width = D // 2 if partial else D
    head = cut(b, x, 0, width) if partial else x
    doubled = {"halves": "halves", "wrong": "wrong", "side_by_side": "pairs"}.get(form, "")
    cos, sin = (b.unsqueeze(t, 1) if middle else t for t in angles(b, width, doubled))
    if form.startswith("side_by_side"):
        p, q = cut(b, head, 0, width // 2, 2), cut(b, head, 1, width // 2, 2)
    else:
        p, q = cut(b, head, 0, width // 2), cut(b, head, width // 2, width // 2)
    if form in ("halves", "wrong"):
        turned = b("concat", b("neg", q), p, axis=-1)
    elif form == "side_by_side":
        turned = b.reshape(b("concat", b.unsqueeze(b("neg", q), -1), b.unsqueeze(p, -1), axis=-1), head.shape)
    if form in ("halves", "wrong", "side_by_side"):
        y = b.add(b.mul(head, cos), b.mul(turned, sin))
    else:
        a = b.sub(b.mul(p, cos), b.mul(q, sin))
        c = b.add(b.mul(p, sin), b.mul(q, cos))
        pair = [a, c] if form == "split" else [b.unsqueeze(v, -1) for v in (a, c)]
        y = b.reshape(b("concat", *pair, axis=-1), head.shape)
    return b("concat", y, cut(b, x, width, D - width), axis=-1) if partial else y


@pytest.mark.parametrize("form", ["halves", "side_by_side", "split", "side_by_side_split"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("middle", [False, True])
def test_rotations(form: str, partial: bool, middle: bool) -> None:
    shape = (B, N, H, D) if middle else (B, H, N, D)
    graph, result = fused(build(shape, lambda b, x: rotate(b, x, form, partial, middle)), fuse_rope)
    assert not result.refusals
    counts = graph.operator_counts()
    assert counts["rope"] == 1
    assert not {"neg", "sub", "add"} & set(counts)
    (node,) = [n for n in graph.nodes if n.op.name == "rope"]
    assert node.attr("interleaved") == form.startswith("side_by_side")
    assert node.operands[1].shape[-1] == (D // 4 if partial else D // 2)


def test_a_table_whose_halves_differ_is_no_rotation() -> None:
    _, result = fused(build((B, H, N, D), lambda b, x: rotate(b, x, "wrong", False, False)), fuse_rope)
    assert not result.changed
    assert "does not provably hold each angle twice" in result.refusals[0].reason


ACTIVATIONS: dict[str, tuple[str, Callable[[Builder, Value], Value]]] = {
    "silu": ("silu", lambda b, x: b.mul(b("sigmoid", x), x)),
    "silu with a factor": ("silu", lambda b, x: b.mul(x, b("sigmoid", b.mul(x, 1.702)))),
    "silu with a divisor": ("silu", lambda b, x: b.mul(b("sigmoid", b.div(x, 0.25)), x)),
    "silu over one": ("silu", lambda b, x: b.mul(x, b.div(1.0, b.add(1.0, b("exp", b.mul(x, -1.5)))))),
    "silu reciprocal": ("silu", lambda b, x: b.mul(b("reciprocal", b.add(b("exp", b("neg", x)), 1.0)), x)),
    "silu written out": ("silu", lambda b, x: b.div(x, b.add(b("exp", b("neg", x)), 1.0))),
    "erf": ("gelu", lambda b, x: b.mul(b.mul(x, 0.5), b.add(b("erf", b.div(x, math.sqrt(2))), 1.0))),
    "erf last": ("gelu", lambda b, x: b.mul(x, b.mul(b.add(1.0, b("erf", b.mul(x, math.sqrt(0.5)))), 0.5))),
    "erf halved": ("gelu", lambda b, x: b.div(b.mul(x, b.add(1.0, b("erf", b.mul(x, math.sqrt(0.5))))), 2.0)),
    "tanh": ("gelu", lambda b, x: b.mul(b.mul(x, 0.5), b.add(1.0, b("tanh", b.mul(
        b.add(x, b.mul(b("pow", x, 3.0), 0.044715)), math.sqrt(2 / math.pi)))))),
    "tanh factored": ("gelu", lambda b, x: b.mul(b.mul(x, 0.5), b.add(1.0, b("tanh", b.mul(
        b.mul(x, math.sqrt(2 / math.pi)), b.add(1.0, b.mul(b.mul(x, 0.044715), x))))))),
    "tanh expanded": ("gelu", lambda b, x: b.mul(b.mul(x, 0.5), b.add(1.0, b("tanh", b.add(
        b.mul(x, math.sqrt(2 / math.pi)), b.mul(b("pow", x, 3.0), 0.044715 * math.sqrt(2 / math.pi))))))),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    op, make = ACTIVATIONS[name]
    graph, _ = fused(build((B, N, D), make), fuse_ffn)
    assert graph.operator_counts() == {op: 1}
    (node,) = graph.nodes
    assert {"scale", "cubic"} & {k for k, v in node.attrs.items() if v is not None} == set()
    factors = {"silu with a factor": 1.702, "silu with a divisor": 4.0, "silu over one": 1.5}
    assert node.attrs.get("alpha", 1.0) == factors.get(name, 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", ["mul", "div", "tanh"])
def test_gelu_has_the_numbers_that_the_model_has(form: str, dtype: Any) -> None:
    """A model that holds sqrt(2) as 1.4142135 does not compute gelu to 1e-12, nor must the fused operator."""

    def rounded(number: float) -> float:
        return float(dtype(number))

    def make(b: Builder, x: Value) -> Value:
        if form == "tanh":
            cubic = b.add(x, b.mul(b("pow", x, 3.0), rounded(0.044715)))
            inner = b("tanh", b.mul(cubic, rounded(math.sqrt(2 / math.pi))))
        else:
            number = math.sqrt(0.5 if form == "mul" else 2)
            inner = b("erf", getattr(b, form)(x, rounded(number)))
        return b.mul(b.mul(x, 0.5), b.add(inner, 1.0))

    graph, _ = fused(build((B, N, D), make, DType(np.dtype(dtype).name)), fuse_ffn)
    assert graph.operator_counts() == {"gelu": 1}
    (node,) = graph.nodes
    exact = rounded(math.sqrt(2 / math.pi) if form == "tanh" else math.sqrt(0.5))
    want = 1 / rounded(math.sqrt(2)) if form == "div" else exact
    assert node.attr("scale") == pytest.approx(want, rel=1e-15)
    assert node.attr("cubic") == (rounded(0.044715) if form == "tanh" else None)


def test_no_activation() -> None:
    def wrong_constant(b: Builder, x: Value) -> Value:
        return b.mul(b.mul(x, 0.5), b.add(b("erf", b.div(x, 1.4)), 1.0))

    def rough_constant(b: Builder, x: Value) -> Value:  # a float32's rounding, but the model is in float64
        return b.mul(b.mul(x, 0.5), b.add(b("erf", b.div(x, float(np.float32(math.sqrt(2))))), 1.0))

    def other_gate(b: Builder, x: Value) -> Value:
        return b.mul(x, b("sigmoid", b.add(x, 1.0)))

    def two_plus(b: Builder, x: Value) -> Value:
        return b.div(x, b.add(b("exp", b("neg", x)), 2.0))

    def fourth_power(b: Builder, x: Value) -> Value:
        cubic = b.add(x, b.mul(b.mul(b("pow", x, 2.0), b("pow", x, 2.0)), 0.044715))
        return b.mul(b.mul(x, 0.5), b.add(1.0, b("tanh", b.mul(cubic, math.sqrt(2 / math.pi)))))

    for make in (wrong_constant, rough_constant, other_gate, two_plus, fourth_power):
        graph, result = fused(build((B, N, D), make), fuse_ffn)
        assert not result.changed
        assert not {"gelu", "silu"} & set(graph.operator_counts())


def test_a_clamped_swiglu_with_a_factor_is_a_gated_layer() -> None:
    """gate sigmoid(1.702 gate) (up + 1), gate at most 7 and up in [-7, 7], as in gpt-oss."""
    weights = RNG.normal(size=(D, 12)), RNG.normal(size=(6, D))

    def make(b: Builder, x: Value) -> Value:
        y = b.matmul(x, b.constant(weights[0]))
        gate = b("min", b("slice", y, axes=(2,), starts=(0,), sizes=(6,), steps=(2,)), 7.0)
        up = b("max", b("min", b("slice", y, axes=(2,), starts=(1,), sizes=(6,), steps=(2,)), 7.0), -7.0)
        gated = b.mul(b.add(up, 1.0), b.mul(gate, b("sigmoid", b.mul(gate, 1.702))))
        return b.matmul(gated, b.constant(weights[1]))

    graph, result = fused(build((B, N, D), make), fuse_ffn)
    assert graph.operator_counts() == {"matmul": 2, "slice": 2, "min": 2, "max": 1, "add": 1, "silu": 1, "mul": 1}
    assert "gated feed-forward layers: 1" in result.notes


LAYERS = {
    **dict.fromkeys(("llama", "llama3_rope", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gemma2"), (2, 4)),
    **dict.fromkeys(("modernbert", "gpt_oss"), (2, 4)),
    **dict.fromkeys(("gptj", "gpt_neox", "phi", "falcon"), (0, 2)),
    **dict.fromkeys(("bart", "whisper", "t5"), (0, 10)),
    "gemma3": (3, 6),
    "deepseek_v3": (3, 4),
    "cohere2": (2, 2),
    "fnet": (0, 2),
}
"""Gated layers and residual connections of each model, from its architecture: two layers with two connections each
unless named; parallel blocks have one, decoder layers with cross-attention three, Fourier mixing has no product."""


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.onnx")), ids=lambda p: p.stem)
def test_exported_models(path: Path) -> None:
    """Attention, norms, rotations, activations and views, each to 1e-12 of what was before."""
    graph = load_onnx(path)
    canonicalise(graph)
    before = graph.copy()
    data = np.load(path.with_suffix(".npz"))
    given = {key[3:]: data[key] for key in data.files if key.startswith("in_")}
    want = evaluate(before, given, precision=DType.FLOAT64)["out"]
    scale = np.abs(want).max()
    notes: dict[str, list[str]] = {}
    for run in (fuse_attention, canonicalise, fuse_norm, fuse_rope, fuse_ffn, fold_views):
        notes[run.__name__] = run(graph).notes
        verify(graph)
        assert np.abs(evaluate(graph, given, precision=DType.FLOAT64)["out"] - want).max() <= 1e-12 * scale
    gated, residual = LAYERS.get(path.stem.split(".")[0], (0, 4))
    found = {words: int(number) for words, number in (note.split(": ") for note in notes["fuse_ffn"])}
    assert (found.get("gated feed-forward layers", 0), found.get("residual connections", 0)) == (gated, residual)
    if path.stem.startswith("llama"):
        counts = graph.operator_counts()
        assert (counts["rms_norm"], counts["rope"], counts["silu"]) == (5, 4, 2)
        assert not {"sigmoid", "sqrt", "neg"} & set(counts)
    if path.stem.startswith("deepseek"):
        counts = graph.operator_counts()
        assert (counts["rope"], counts.get("sub", 0), counts.get("scatter_nd", 0)) == (4, 0, 0)
    if path.stem.startswith("gptj"):
        assert [node.attr("rotary_dim") for node in graph.nodes if node.op.name == "rope"] == [4] * 4
    if path.stem.startswith("gpt_oss"):
        alphas = [node.attr("alpha") for node in graph.nodes if node.op.name == "silu"]
        assert alphas == [float(np.float32(1.702))] * 2
