"""Every operator of the table: its samples, its shape rule, its decomposition, and an independent opinion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import TensorProto, helper

from attnc.ir import (
    OPERATORS,
    Builder,
    DType,
    Graph,
    Operator,
    Sample,
    ShapeError,
    TensorType,
    evaluate,
    sample_graph,
    symbol,
    verify,
)

CASES = [pytest.param(op, s, id=f"{op.name}-{k}") for op in OPERATORS.values() for k, s in enumerate(op.samples())]
OF: Mapping[str, list[Sample]] = {op.name: list(op.samples()) for op in OPERATORS.values()}


@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_an_operator_is_described_and_has_samples(op: Operator) -> None:
    assert op.__doc__ is not None
    assert len(op.__doc__) > 10
    assert list(op.samples())
    for sample in op.samples():
        for array in (*sample.inputs, *(sample.expected or ())):
            assert array is None or isinstance(array, np.ndarray)


def check_results(graph: Graph, feeds: dict[str, Any]) -> dict[str, Any]:
    """Evaluates; the results are arrays of the types that the shape rule gives."""
    verify(graph)
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        for d, n in zip(value.shape, feeds[value.name].shape, strict=True):
            sizes[str(d)] = n
    results = evaluate(graph, feeds)
    for output in graph.outputs:
        array, wanted = results[output.name], output.value.type
        assert isinstance(array, np.ndarray)
        assert array.dtype == wanted.dtype.numpy
        assert array.ndim == wanted.rank
        for d, n in zip(wanted.shape, array.shape, strict=True):
            try:
                assert n == (d if isinstance(d, int) else eval(str(d), {"max": max, "min": min}, dict(sizes)))
            except NameError:  # a size that only the run knows
                assert not isinstance(d, int)
    return results


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_types_are_those_of_the_results(op: Operator, sample: Sample) -> None:
    results = check_results(*sample_graph(op, sample))
    if sample.expected is not None:
        for array, expected in zip(results.values(), sample.expected, strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


# These need numbers: a target of as many elements, a last axis that addresses, heads.
NEEDS_NUMBERS = {"reshape", "gather_nd", "attention", "rnn", "gru", "lstm"}


@pytest.mark.parametrize("name", OPERATORS)
def test_shape_rules_work_on_symbols(name: str) -> None:
    allowed = 0
    for sample in OF[name]:
        shapes = [n for array in sample.inputs if array is not None for n in array.shape if n > 1]
        for sizes in ({n: symbol(f"n{n}") for n in shapes}, {n: symbol(f"n{n}") for n in shapes[:1]}):
            try:
                graph, feeds = sample_graph(OPERATORS[name], sample, sizes)
            except ShapeError:
                continue
            allowed += bool(sizes)
            expected = evaluate(*sample_graph(OPERATORS[name], sample))
            for key, array in check_results(graph, feeds).items():
                np.testing.assert_array_equal(array, expected[key])
    needs_none = all(not array.shape for s in OF[name] for array in s.inputs if array is not None)
    assert allowed or needs_none or name in NEEDS_NUMBERS


def decomposed(op: Operator, sample: Sample) -> Graph | None:
    """The sample's graph with the decomposition in the operator's place."""
    graph, _ = sample_graph(op, sample)
    (node,) = graph.nodes
    results = op.decompose(Builder(graph, "sample"), node.inputs, node.attrs)
    if results is None:
        return None
    assert [v.type for v in results] == [v.type for v in node.outputs]
    for old, new in zip(node.outputs, results, strict=True):
        graph.replace_uses(old, new)
    graph.remove(node)
    assert op.name not in {n.op.name for n in graph.nodes}
    verify(graph, after=f"the decomposition of {op.name}")
    return graph


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_decomposition_means_the_same(op: Operator, sample: Sample) -> None:
    wide = [a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in sample.inputs]
    if sample.regions or sample.states:
        assert type(op).decompose is Operator.decompose  # these are primitives
        return
    sample = Sample(tuple(wide), sample.attrs)
    graph, feeds = sample_graph(op, sample)
    other = decomposed(op, sample)
    if other is None:
        return
    expected, found = evaluate(graph, feeds, DType.FLOAT64), evaluate(other, feeds, DType.FLOAT64)
    for name, array in expected.items():
        scale = max(1.0, float(np.max(np.abs(array), initial=0)))
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-12 * scale)


def test_the_composites_decompose() -> None:
    composites = {op.name for op in OPERATORS.values() if decomposed(op, OF[op.name][0]) is not None}
    assert {"gelu", "silu", "softmax", "layer_norm", "rope", "gru", "lstm", "rnn", "attention"} <= composites


@pytest.mark.parametrize("name", ["rope", "gru", "lstm", "rnn", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_half_precisions_are_rounded_once(name: str, dtype: DType) -> None:
    sample = OF[name][-1]
    halves = tuple(a if a is None else a.astype(dtype.numpy) for a in sample.inputs)
    half = Sample(halves, sample.attrs)
    wide = Sample(tuple(a if a is None else a.astype(np.float32) for a in halves), sample.attrs)
    expected = evaluate(*sample_graph(OPERATORS[name], wide))
    found = evaluate(*sample_graph(OPERATORS[name], half))
    other = decomposed(OPERATORS[name], half)
    assert other is not None
    spelled = evaluate(other, sample_graph(OPERATORS[name], half)[1])
    step = 2.0 ** (-10 if dtype is DType.FLOAT16 else -7)
    for key, array in expected.items():
        assert found[key].dtype == spelled[key].dtype == dtype.numpy
        tolerance = 2 * step  # LayerNorm rounds before its weight too
        np.testing.assert_allclose(found[key].astype(np.float64), array, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(spelled[key].astype(np.float64), array, rtol=tolerance, atol=tolerance)


# -- the independent opinion: Python's math for elementwise operators ------------------------------------------

UNARY: Mapping[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "reciprocal": lambda x: 1 / x,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "asinh": math.asinh,
    "acosh": math.acosh,
    "atanh": math.atanh,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "erf": math.erf,
    "relu": lambda x: x if x > 0 else 0,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "not": lambda x: not x,
    "bit_not": lambda x: -x - 1,
    "is_nan": math.isnan,
    "is_inf": math.isinf,
}


def truncated(x: Any, y: Any) -> Any:
    return math.trunc(x / y) if isinstance(x, int) else x / y


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": truncated,
    "mod": lambda x, y: x - y * math.floor(x / y),
    "fmod": math.fmod,
    "min": lambda x, y: x if x < y else y,
    "max": lambda x, y: x if x > y else y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "xor": lambda x, y: x is not y,
    "bit_and": lambda x, y: x & y,
    "bit_or": lambda x, y: x | y,
    "bit_xor": lambda x, y: x ^ y,
    "equal": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "pow": math.pow,
}


def first_result(name: str, sample: Sample) -> Any:
    return next(iter(evaluate(*sample_graph(OPERATORS[name], sample)).values()))


@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_are_pythons(name: str) -> None:
    for sample in OF[name]:
        (x,) = sample.inputs
        assert x is not None
        expected = np.array([UNARY[name](v) for v in x.reshape(-1).tolist()]).reshape(x.shape)
        np.testing.assert_allclose(first_result(name, sample), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators_are_pythons(name: str) -> None:
    for sample in OF[name]:
        x, y = (np.broadcast_to(a, (2, 3)) for a in sample.inputs if a is not None)
        pairs = zip(x.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True)
        expected = np.array([BINARY[name](a, b) for a, b in pairs]).reshape(2, 3)
        np.testing.assert_allclose(first_result(name, sample), expected, rtol=2e-6, atol=1e-6)


def test_every_elementwise_operator_has_an_opinion() -> None:
    from attnc.ir.ops import elementwise, reduce, shape

    others = {*REFERENCE, *UNARY, *BINARY, "where", "iota", "size", "reshape", "slice"}
    assert {op.name for family in (elementwise, reduce, shape) for op in family.OPS} <= others


def run_one(op: str, *inputs: Any, **attrs: Any) -> Any:
    return first_result(op, Sample(tuple(np.asarray(x) for x in inputs), attrs))


def test_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    x = np.array([inf, -inf, nan, 1e4, -1e4], np.float32)
    assert run_one("sigmoid", x)[[0, 1, 3, 4]].tolist() == [1, 0, 1, 0]
    assert run_one("softplus", x)[[0, 1, 3, 4]].tolist() == [inf, 0, 1e4, 0]
    assert run_one("is_nan", x).tolist() == [False, False, True, False, False]
    assert run_one("is_inf", x).tolist() == [True, True, False, False, False]
    assert run_one("round", np.array([0.5, 1.5, -0.5, 2.5], np.float32)).tolist() == [0, 2, 0, 2]
    assert run_one("where", np.array([True, False]), np.float32(1), x[:1]).tolist() == [1, inf]
    low = np.iinfo(np.int64).min
    assert run_one("div", np.array([low, -7, 7, -7]), np.array([2, 2, -2, -2])).tolist() == [low // 2, -3, -3, 3]
    assert run_one("mod", np.array([-7, 7, -7]), np.array([2, -2, -2])).tolist() == [1, -1, -1]
    assert run_one("cumsum", np.array([1, 1e30, 1], np.float32), exclusive=True)[1] == 1
    assert run_one("cumsum", np.zeros((2, 0, 3), np.float32), axis=1, exclusive=True).shape == (2, 0, 3)
    assert run_one("cumsum", np.zeros((2, 0, 3), np.float32), axis=0, exclusive=True).shape == (2, 0, 3)
    big = np.array([[2**24 + 1]], np.int64)
    assert run_one("matmul", big, np.array([[1]])).tolist() == big.tolist()
    odd = np.array([[3001]], np.int16)
    assert run_one("matmul", odd, np.array([[9]], np.int16)).tolist() == [[27009]]
    assert np.isnan(run_one("softmax", np.full((1, 2), -inf, np.float32))).all()


# -- the independent opinion: ONNX's reference evaluator for the others ----------------------------------------


def onnx_model(op: str, inputs: Sequence[Any], outputs: int = 1, opset: int = 22, **attrs: Any) -> onnx.ModelProto:
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    while not names[-1]:
        names.pop()  # the runtime does not survive an empty last name
    results = [f"o{k}" for k in range(outputs)]
    infos = [helper.make_tensor_value_info(r, TensorProto.UNDEFINED, None) for r in results]
    node = helper.make_node(op, names, results, **{k: v for k, v in attrs.items() if v is not None})
    graph = helper.make_graph([node], "one", given, infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def reference(op: str, *inputs: Any, outputs: int = 1, **attrs: Any) -> list[Any]:
    model = onnx_model(op, inputs, outputs, **attrs)
    feeds = {f"i{k}": x for k, x in enumerate(inputs) if x is not None}
    return list(onnx.reference.ReferenceEvaluator(model).run(None, feeds))


def runtime(op: str, *inputs: Any, outputs: int = 1, **attrs: Any) -> list[Any]:
    model = onnx_model(op, inputs, outputs, **attrs)
    for output in model.graph.output:
        output.type.tensor_type.elem_type = TensorProto.FLOAT
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {f"i{k}": x for k, x in enumerate(inputs) if x is not None}))


def _axes(attrs: Mapping[str, Any]) -> Any:
    return None if attrs.get("axes") is None else np.array(attrs["axes"], np.int64)


def _reduced(op: str) -> Callable[..., Any]:
    return lambda x, **a: reference(op, x, _axes(a), keepdims=int(a.get("keepdims", False)))[0]


def _arg(op: str) -> Callable[..., Any]:
    return lambda x, **a: reference(
        op,
        x,
        axis=a.get("axis", -1),
        keepdims=int(a.get("keepdims", False)),
        select_last_index=int(a.get("last", False)),
    )[0]


def _logical(op: str, x: Any, a: Mapping[str, Any]) -> Any:
    return _reduced(op)(x.astype(np.float32), **a) > 0


def _scatter_free(x: Any, indices: Any, **a: Any) -> Any:
    return reference("GatherND", x, indices, batch_dims=a.get("batch_dims", 0))[0]


def _conv(x: Any, w: Any, bias: Any = None, **a: Any) -> Any:
    zeros = (0,) * (x.ndim - 2)
    pads = [*a.get("before", zeros), *a.get("after", zeros)]
    attrs = {"strides": a.get("strides"), "dilations": a.get("dilations"), "group": a.get("groups", 1)}
    return runtime("Conv", x, w, bias, pads=pads, **attrs)[0]


def _gelu(x: Any, approximate: str = "none", scale: float | None = None, cubic: float | None = None) -> Any:
    if scale is None:
        return reference("Gelu", x, approximate=approximate)[0]
    if cubic is None:
        return np.array([v / 2 * (1 + math.erf(scale * v)) for v in x.reshape(-1).tolist()]).reshape(x.shape)
    y = x.astype(np.float64)
    return y / 2 * (1 + np.tanh(scale * (y + cubic * y**3)))


REFERENCE: Mapping[str, Callable[..., Any]] = {
    "reduce_sum": _reduced("ReduceSum"),
    "reduce_mean": _reduced("ReduceMean"),
    "reduce_max": _reduced("ReduceMax"),
    "reduce_min": _reduced("ReduceMin"),
    "reduce_prod": _reduced("ReduceProd"),
    "reduce_all": lambda x, **a: _logical("ReduceMin", x, a),
    "reduce_any": lambda x, **a: _logical("ReduceMax", x, a),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "cumsum": lambda x, **a: reference(
        "CumSum", x, np.array(a.get("axis", -1)), exclusive=int(a["exclusive"]), reverse=int(a["reverse"])
    )[0],
    "cumprod": lambda x, **a: reference(
        "CumProd", x, np.array(a.get("axis", -1)), exclusive=int(a["exclusive"]), reverse=int(a["reverse"])
    )[0],
    "softmax": lambda x, **a: reference("Softmax", x, axis=a.get("axis", -1))[0],
    "log_softmax": lambda x, **a: reference("LogSoftmax", x, axis=a.get("axis", -1))[0],
    "gelu": _gelu,
    "silu": lambda x, **a: x / (1 + np.exp(-a.get("alpha", 1.0) * x.astype(np.float64))),
    "cast": lambda x, **a: reference("Cast", x, to=helper.np_dtype_to_tensor_dtype(a["dtype"].numpy))[0],
    "matmul": lambda x, y: runtime("MatMul", x, y)[0],
    "transpose": lambda x, **a: reference("Transpose", x, perm=list(a["order"]))[0],
    "expand": lambda x, **a: reference("Expand", x, np.array(a["shape"]))[0],
    "concat": lambda *xs, **a: reference("Concat", *xs, axis=a["axis"])[0],
    "pad": lambda x, value, **a: reference("Pad", x, np.array([*a["before"], *a["after"]]), value)[0],
    "gather": lambda x, i, **a: reference("Gather", x, i, axis=a.get("axis", 0))[0],
    "gather_elements": lambda x, i, **a: runtime("GatherElements", x, i, axis=a["axis"])[0],
    "gather_nd": _scatter_free,
    "scatter_nd": lambda *xs, **a: runtime("ScatterND", *xs, reduction=a.get("reduction", "none"))[0],
    "scatter_elements": lambda *xs, **a: runtime(
        "ScatterElements", *xs, axis=a.get("axis", 0), reduction=a.get("reduction", "none")
    )[0],
    "top_k": lambda x, **a: reference(
        "TopK", x, np.array([a["k"]]), outputs=2, axis=a.get("axis", -1), largest=int(a.get("largest", True))
    )[0],
    "conv": _conv,
    "nonzero": lambda x, **a: reference("NonZero", x)[0],
    "dynamic_reshape": lambda x, target, **a: reference(
        "Reshape", x, target, allowzero=int(a.get("allow_zero", False))
    )[0],
    "dft": lambda x, **a: reference(
        "DFT", x, None, np.array(a["axis"]), inverse=int(a.get("inverse", False))
    )[0],
    "layer_norm": lambda x, w=None, b=None, **a: runtime(
        "LayerNormalization", x, np.ones(x.shape[a.get("axis", -1) :], np.float32) if w is None else w, b,
        axis=a.get("axis", -1), epsilon=a.get("eps", 1e-5),
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCE)
def test_operators_are_those_of_onnx(name: str) -> None:
    for sample in OF[name]:
        expected = REFERENCE[name](*sample.inputs, **sample.attrs)
        found = first_result(name, sample)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_reshape_slice_where_iota_and_size_by_hand() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert first_result("reshape", OF["reshape"][0]).tolist() == [[6 * i + j for j in range(6)] for i in range(4)]
    cut = first_result("slice", OF["slice"][0])
    assert cut.tolist() == [[[12 * i + 4 * j + k for k in (3, 0)] for j in (1, 2)] for i in (0, 1)]
    assert first_result("slice", OF["slice"][2]).shape == (0, 3, 4)
    assert run_one("slice", x[0, 0], axes=(0,), starts=(3,), sizes=(4,), steps=(-1,)).tolist() == [3, 2, 1, 0]
    assert [first_result("iota", s).tolist() for s in OF["iota"]] == [[2, 3, 4, 5, 6], [[0, -2, -4], [0, -2, -4]]]
    assert first_result("size", OF["size"][0]) == 7
    found = first_result("where", OF["where"][0])
    assert found[0].tolist() == [-math.inf] * 3
    np.testing.assert_allclose(found[1], [-math.inf, 0.7, 3.25], rtol=1e-6)


def test_rms_norm_by_hand() -> None:
    x = np.array([[3.0, 4.0]], np.float32)
    found = run_one("rms_norm", x, np.array([2.0, 1.0], np.float32), eps=0.0)
    np.testing.assert_allclose(found, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]], rtol=1e-6)


# -- recurrent layers ------------------------------------------------------------------------------------------

RECURRENT = [pytest.param(n, s, id=f"{n}-{k}") for n in ("rnn", "gru", "lstm") for k, s in enumerate(OF[n])]


def recurrent_onnx(run: Callable[..., list[Any]], name: str, sample: Sample) -> list[Any]:
    x, w, r, *rest = sample.inputs
    bias, *initial = rest or [None]
    attrs: dict[str, Any] = {"hidden_size": sample.attrs["hidden"], "direction": sample.attrs["direction"]}
    if name == "gru":
        attrs["linear_before_reset"] = int(sample.attrs.get("linear_before_reset", False))
    if name == "rnn":
        attrs["activations"] = ["Tanh"] * (w.shape[0] if w is not None else 1)
    return run(name.upper(), x, w, r, bias, None, *initial, outputs=3 if name == "lstm" else 2, **attrs)


@pytest.mark.parametrize(("name", "sample"), RECURRENT)
def test_recurrent_layers_are_those_of_onnxruntime(name: str, sample: Sample) -> None:
    found = list(evaluate(*sample_graph(OPERATORS[name], sample)).values())
    for array, expected in zip(found, recurrent_onnx(runtime, name, sample), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "sample"), RECURRENT)
def test_recurrent_layers_are_those_of_the_reference(name: str, sample: Sample) -> None:
    found = list(evaluate(*sample_graph(OPERATORS[name], sample)).values())
    for array, expected in zip(found, recurrent_onnx(reference, name, sample), strict=False):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def test_narrow_loads_do_not_wrap_when_attention_is_lowered() -> None:
    """A quantised table in a score: (table - 200) * 0.5 with a uint8 table."""
    graph = Graph("narrow")
    q, k, v = (graph.add_input(name, TensorType(DType.FLOAT64, (1, 1, 3, 2))) for name in "qkv")
    table = graph.add_constant(np.array([7, 250, 130], np.uint8), "table")
    attrs = {"score": "s + (table[j] - 200) * 0.5", "loads": ("table",)}
    whole = graph.add("attention", q, k, v, table, attrs=attrs)[0]
    node = whole.producer
    assert node is not None
    parts = node.op.decompose(Builder(graph), node.inputs, node.attrs)
    assert parts is not None
    graph.add_output(whole, "whole")
    graph.add_output(parts[0], "parts")
    rng = np.random.default_rng(0)
    found = evaluate(graph, {name: rng.normal(size=(1, 1, 3, 2)) for name in "qkv"})
    np.testing.assert_allclose(found["parts"], found["whole"], rtol=1e-12)
