"""Symbolic sizes at import: shape arithmetic, equalities, clamping, names; against onnx's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from attnc.frontends.onnx import load_onnx
from attnc.frontends.onnx.sizes import Sizes
from attnc.ir import AttncError, Graph, InputError, evaluate, symbol, verify


def model(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def check(proto: onnx.ModelProto, *feeds: dict[str, Any]) -> Graph:
    """Imports once and compares every feed with the reference evaluator."""
    graph = load_onnx(proto)
    verify(graph)
    reference = ReferenceEvaluator(proto)
    for feed in feeds:
        for found, wanted in zip(evaluate(graph, feed).values(), reference.run(None, feed), strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
    return graph


def data(*shape: int) -> Any:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def lengths(*axes: int) -> list[dict[str, Any]]:
    """Feeds x with the sizes given, and 1, 2, 7 and 64 for each 0 among them."""
    return [{"x": data(*(n if a == 0 else a for a in axes))} for n in (1, 2, 7, 64)]


def test_shape_gather_concat_reshape_is_one_reshape() -> None:
    graph = check(
        model("""g (float[batch, seq, 12] x) => (float[a, b, c, d] y) {
            s = Shape(x)
            zero = Constant<value = int64 {0}>()
            one = Constant<value = int64 {1}>()
            n = Gather<axis = 0>(s, zero)
            m = Gather<axis = 0>(s, one)
            axis = Constant<value = int64[1] {0}>()
            n1 = Unsqueeze(n, axis)
            m1 = Unsqueeze(m, axis)
            rest = Constant<value = int64[2] {-1, 4}>()
            target = Concat<axis = 0>(n1, m1, rest)
            y = Reshape(x, target)
        }"""),
        *lengths(2, 0, 12),
    )
    assert graph.operator_counts() == {"reshape": 1}
    assert str(graph.outputs[0].value.type) == "float32[batch, seq, 3, 4]"


ARITHMETIC = {
    "division": "a = Mul(n, four)\n h = Div(a, two)",
    "remainder": "a = Mul(n, four)\n r = Mod(a, two)\n d = Sub(a, r)\n h = Div(d, two)",
    "a choice that sizes decide": "c = Equal(n, minus)\n a = Add(n, n)\n h = Where(c, four, a)",
    "casts": "a = Add(n, n)\n f = Cast<to = 6>(a)\n h = Cast<to = 7>(f)",
    "a product": "a = Concat<axis = 0>(n, two)\n h = ReduceProd<keepdims = 1>(a)",
    "the largest": "a = Max(n, minus)\n h = Mul(a, two)",
    "expand and tile": "a = Expand(n, two)\n h = ReduceSum<keepdims = 1>(a)",
    "negation": "a = Neg(n)\n b = Mul(a, minus)\n h = Mul(b, two)",
}
"""Ways to compute 2 · seq."""


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_sizes_needs_no_nodes(name: str) -> None:
    graph = check(
        model(f"""g (float[seq, 6] x) => (float[a, b] y) {{
            two = Constant<value = int64[1] {{2}}>()
            three = Constant<value = int64[1] {{3}}>()
            four = Constant<value = int64[1] {{4}}>()
            minus = Constant<value = int64[1] {{-1}}>()
            n = Shape<start = 0, end = 1>(x)
            {ARITHMETIC[name]}
            t = Concat<axis = 0>(h, three)
            y = Reshape(x, t)
        }}"""),
        *lengths(0, 6),
    )
    assert graph.operator_counts() == {"reshape": 1}


def test_what_dimensions_cannot_say_stays_a_tensor() -> None:
    """Whether seq is larger than 4 depends on seq: nodes compute it at run time."""
    graph = check(
        model("""g (float[seq] x) => (int64 n, bool b, int64[2] both) {
            s = Shape(x)
            zero = Constant<value = int64 {0}>()
            four = Constant<value = int64[1] {4}>()
            n = Gather<axis = 0>(s, zero)
            limit = Constant<value = int64 {4}>()
            b = Greater(n, limit)
            both = Concat<axis = 0>(s, four)
        }"""),
        *lengths(0),
    )
    assert graph.operator_counts()["size"] >= 1


MAKERS = {
    "range": "y = Range(zero, n, one)",
    "range by three": "y = Range(one, n, three)",
    "range downwards": "y = Range(n, zero, minus)",
    "fill": "y = ConstantOfShape<value = int64[1] {5}>(s)",
    "expand": "a = Unsqueeze(one, axis)\n y = Expand(a, s)",
    "tile": "a = Unsqueeze(three, axis)\n y = Tile(a, s)",
}


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_made_from_sizes(name: str) -> None:
    check(
        model(f"""g (float[seq] x) => (int64[out] y) {{
            zero = Constant<value = int64 {{0}}>()
            one = Constant<value = int64 {{1}}>()
            three = Constant<value = int64 {{3}}>()
            minus = Constant<value = int64 {{-1}}>()
            axis = Constant<value = int64[1] {{0}}>()
            s = Shape(x)
            n = Squeeze(s, axis)
            {MAKERS[name]}
        }}"""),
        *lengths(0),
    )


bounds = st.one_of(st.integers(-9, 9), st.sampled_from([2**63 - 1, -(2**63), 2**31 - 1]))


@given(bounds, bounds, st.integers(-3, 3).filter(bool), st.integers(1, 8))
def test_slices_of_a_symbolic_axis(start: int, end: int, step: int, size: int) -> None:
    """Bounds are clamped as the standard says: as Python's, but for a start before the first element and a step back,
    where ONNX Runtime gives that element, too."""
    proto = model(f"""g (float[seq, 2] x) => (float[out, 2] y) {{
        start = Constant<value = int64[1] {{{start}}}>()
        end = Constant<value = int64[1] {{{end}}}>()
        axes = Constant<value = int64[1] {{0}}>()
        steps = Constant<value = int64[1] {{{step}}}>()
        y = Slice(x, start, end, axes, steps)
    }}""")
    x = data(size, 2)
    found = evaluate(load_onnx(proto), {"x": x})["y"]
    first = -size if step < 0 and start < -size else start
    np.testing.assert_array_equal(found, x[slice(first, end, step)])


@given(st.integers(-8, 8), st.integers(-8, 8), st.sampled_from(["start", "end"]), st.integers(1, 12))
def test_slices_up_to_a_size(offset: int, other: int, moving: str, size: int) -> None:
    """x[seq + offset : other] and x[other : seq + offset], also where the sign of the bound is open."""
    proto = model(f"""g (float[seq] x) => (float[out] y) {{
        n = Shape(x)
        offset = Constant<value = int64[1] {{{offset}}}>()
        moving = Add(n, offset)
        other = Constant<value = int64[1] {{{other}}}>()
        y = Slice(x, {"moving, other" if moving == "start" else "other, moving"})
    }}""")
    x = data(size)
    wanted = x[size + offset : other] if moving == "start" else x[other : size + offset]
    np.testing.assert_array_equal(evaluate(load_onnx(proto), {"x": x})["y"], wanted)


def test_split_of_a_symbolic_axis_with_a_smaller_last_part() -> None:
    proto = model("g (float[seq] x) => (float[a] p, float[b] q, float[c] r) { p, q, r = Split<num_outputs = 3>(x) }")
    check(proto, {"x": data(7)}, {"x": data(9)}, {"x": data(3)})


def test_two_names_of_one_size() -> None:
    graph = load_onnx(model("g (float[a, 4] x, float[c, 4] y) => (float[a, 4] z) { z = Add(x, y) }"))
    assert [str(v.type) for v in graph.inputs] == ["float32[a, 4]", "float32[a, 4]"]
    with pytest.raises(InputError):
        evaluate(graph, {"x": data(2, 4), "y": data(3, 4)})


def test_a_size_that_must_be_a_number() -> None:
    graph = load_onnx(
        model("g (float[a, 4] x) => (float[a, 4] z) <float[3, 4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { z = Add(x, w) }")
    )
    assert str(graph.inputs[0].type) == "float32[3, 4]"


def test_a_size_that_must_be_a_sum() -> None:
    graph = load_onnx(
        model("""g (float[past] x, float[seq] y, float[total] m) => (float[total] z) {
            both = Concat<axis = 0>(x, y)
            z = Add(both, m)
        }""")
    )
    assert str(graph.inputs[2].type) == "float32[past + seq]"


def test_a_cut_that_must_not_cut() -> None:
    """table[:seq] has min(5, seq) rows; added to seq rows, that is seq, and longer inputs are refused."""
    proto = model("""g (float[seq, 2] x) => (float[seq, 2] y) <float[5, 2] table = {1,2,3,4,5,6,7,8,9,10}> {
        zero = Constant<value = int64[1] {0}>()
        n = Shape<start = 0, end = 1>(x)
        rows = Slice(table, zero, n)
        y = Add(x, rows)
    }""")
    graph = check(proto, {"x": data(3, 2)}, {"x": data(5, 2)})
    with pytest.raises(AttncError):
        evaluate(graph, {"x": data(6, 2)})


def test_sizes_that_contradict_each_other() -> None:
    with pytest.raises(AttncError, match=r"node z \(Add\).*3.*4"):
        load_onnx(model("g (float[3] x, float[4] y) => (float[3] z) { z = Add(x, y) }"))


def test_names_of_sizes() -> None:
    sizes = Sizes()
    plain = frozenset({"past", "seq"})
    assert sizes.declare("past", "", (0, 0), plain) == symbol("past")
    assert sizes.declare("past + 1", "", (1, 0), plain) == symbol("past") + 1
    assert str(sizes.declare("batch-size", "", (2, 0), plain)) == "batch_size"
    assert str(sizes.declare("batch_size", "", (2, 1), plain)) == "batch_size_2"
    assert str(sizes.declare("", "x_0", (3, 0), plain)) == "x_0"
    assert str(sizes.declare("?", "x_1", (3, 1), plain)) == "size"
    assert str(sizes.declare("in", "", (4, 0), plain)) == "in_size"
    # n is the number of queries inside an attention's expressions
    assert str(sizes.declare("n", "", (4, 1), plain)) == "n_size"


def test_an_input_of_unnamed_sizes() -> None:
    proto = model("g (float[?, 3] x) => (float[?, 3] y) { y = Relu(x) }")
    assert str(load_onnx(proto).inputs[0].type) == "float32[x_0, 3]"


def test_a_branch_on_sizes_is_taken_at_import() -> None:
    text = """g (float[seq, COLS] x) => (float[a, b] y) {
        n = Shape<start = 1, end = 2>(x)
        one = Constant<value = int64[1] {1}>()
        c = Equal(n, one)
        y = If (c) <
            then_branch = then_graph () => (float[a, b] p) { p = Neg(x) },
            else_branch = else_graph () => (float[a, b] q) { q = Abs(x) }
        >
    }"""
    assert check(model(text.replace("COLS", "1")), {"x": data(3, 1)}).operator_counts() == {"neg": 1}
    assert check(model(text.replace("COLS", "2")), {"x": data(3, 2)}).operator_counts() == {"abs": 1}


def test_local_functions_with_attributes_and_absent_operands() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        g (float[seq, 4] x) => (float[seq, 4] y, float[seq, 4] z) {
            y = own.scaled<by = 3.0>(x)
            z = own.scaled<by = 0.5>(x, x)
        }
        <domain: "own", opset_import: ["" : 18]>
        scaled<by>(v, shift) => (w) {
            k = Constant<value_float: float = @by>()
            t = Mul(v, k)
            w = Sum(t, t)
        }""")
    graph = load_onnx(proto)
    found = evaluate(graph, {"x": data(2, 4)})
    np.testing.assert_array_equal(found["y"], 6 * data(2, 4))
    np.testing.assert_array_equal(found["z"], data(2, 4))
    assert [output.name for output in graph.outputs] == ["y", "z"]
    assert any("y/" in node.source for node in graph.nodes)


def test_nodes_out_of_order() -> None:
    proto = model("g (float[seq] x) => (float[seq] y) { t = Neg(x)\n y = Exp(t) }")
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    assert [n.op.name for n in load_onnx(proto).nodes] == ["neg", "exp"]


def test_names_and_constants() -> None:
    """Outputs keep name and order, values the names of ONNX, and an initialiser that is an input too is a constant."""
    proto = model("""g (float[seq] x, float[1] w = {2.0}) => (float[seq] b, float[seq] a, float[1] w) {
        a = Mul(x, w)
        b = Identity(a)
    }""")
    graph = load_onnx(proto)
    assert [v.name for v in graph.inputs] == ["x"]
    assert [o.name for o in graph.outputs] == ["b", "a", "w"]
    assert "%a = mul(%x, %w): float32[seq]  # a (Mul)" in str(graph)
    assert evaluate(graph, {"x": data(3)})["b"].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("opset", [9, 12, 13])
def test_softmax_over_all_trailing_axes_before_opset_13(opset: int) -> None:
    proto = model("g (float[2, seq, 4] x) => (float[2, seq, 4] y) { y = Softmax<axis = 1>(x) }", opset)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    axes = (1,) if opset >= 13 else (1, 2)
    e = np.exp(x)
    np.testing.assert_allclose(evaluate(load_onnx(proto), {"x": x})["y"], e / e.sum(axes, keepdims=True), 1e-6)


def test_operands_that_were_attributes_in_older_operator_sets() -> None:
    proto = model(
        """g (float[seq, 1, 6] x) => (float[a, 6] s, float[a, 1, 3] c, float[a, 1, 6] k, float[a, 1, 1] r) {
            s = Squeeze<axes = [1]>(x)
            c = Slice<axes = [2], starts = [1], ends = [4]>(x)
            k = Clip<min = 2.0, max = 5.0>(x)
            r = ReduceSum<axes = [2]>(x)
        }""",
        9,
    )
    x = data(2, 1, 6)
    found = evaluate(load_onnx(proto), {"x": x})
    np.testing.assert_array_equal(found["s"], x[:, 0])
    np.testing.assert_array_equal(found["c"], x[..., 1:4])
    np.testing.assert_array_equal(found["k"], np.clip(x, 2, 5))
    np.testing.assert_array_equal(found["r"], x.sum(-1, keepdims=True))
