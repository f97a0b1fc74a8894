"""Sizes that are computed from data: one import serves whatever the data say, also sizes of 0."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.frontends.onnx import load_onnx
from attnc.ir import AttncError, UnsupportedError, evaluate, verify
from attnc.tests.frontends.judges import Array, agree, draw, model, reference


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def test_nonzero_and_what_is_picked_by_it() -> None:
    proto = model("""g (float[n, m] x) => (float[k] y, int64[2, k] places, int64[1] count) {
        zero = Constant<value = float {0}>()
        seen = Greater(x, zero)
        places = NonZero(seen)
        index = Transpose(places)
        y = GatherND(x, index)
        count = Shape<start = 1>(places)
    }""")
    graph = agree(proto, {"x": draw(3, 4)}, {"x": -np.ones((2, 2), np.float32)}, {"x": draw(7, 1)})
    assert [str(d) for d in graph.outputs[1].value.shape] == ["2", "seen_count - 1"]


def test_a_count_of_which_only_the_number_is_used() -> None:
    """The tensor that the number is learnt from must not be taken out."""
    proto = model("""g (float[n] x) => (int64[k] y) {
        places = NonZero(x)
        count = Shape<start = 1>(places)
        zero = Constant<value = int64 {0}>()
        one = Constant<value = int64 {1}>()
        c = Squeeze(count)
        y = Range(zero, c, one)
    }""")
    sizes = [{"x": np.array(x, np.float32)} for x in ([1, 0, 2], [0, 0], [1])]
    graph = agree(proto, *sizes)
    assert graph.operator_counts()["nonzero"] == 1


def test_two_questions_about_one_mask_have_one_size() -> None:
    proto = model("""g (float[n, 3] x, bool[n] keep) => (float[a, 3] y) {
        first = Compress<axis = 0>(x, keep)
        second = Compress<axis = 0>(x, keep)
        y = Mul(first, second)
    }""")
    agree(
        proto,
        {"x": draw(4, 3), "keep": np.array([True, False, True, True])},
        {"x": draw(2, 3), "keep": np.array([False, False])},
    )


def test_compress_of_all_elements() -> None:
    proto = model("g (float[n, 3] x, bool[m] keep) => (float[a] y) { y = Compress(x, keep) }")
    agree(proto, {"x": draw(2, 3), "keep": np.array([True, False, True, True, False, True])})


def test_reshape() -> None:
    proto = model("g (float[n, 6] x, int64[3] s) => (float[a, b, c] y) { y = Reshape(x, s) }")
    targets = ((2, 3, 4), (0, 2, 3), (-1, 1, 2), (4, 0, 1))
    agree(proto, *({"x": draw(4, 6), "s": ints(*t)} for t in targets))
    agree(proto, {"x": draw(0, 6), "s": ints(0, 2, 3)})


def test_reshape_to_sizes_of_zero() -> None:
    proto = model("g (float[n, 6] x, int64[2] s) => (float[a, b] y) { y = Reshape<allowzero = 1>(x, s) }")
    agree(proto, {"x": draw(0, 6), "s": ints(0, 7)}, {"x": draw(2, 6), "s": ints(3, 4)})


def test_a_lone_size_in_a_reshape_is_what_the_others_leave() -> None:
    proto = model("""g (float[n, 6] x, int64[1] s) => (float[a, b] y) {
        n = Shape<end = 1>(x)
        t = Concat<axis = 0>(n, s)
        y = Reshape(x, t)
    }""")
    graph = agree(proto, {"x": draw(4, 6), "s": ints(6)}, {"x": draw(3, 6), "s": ints(-1)})
    assert not graph.nodes or set(graph.operator_counts()) <= {"reshape"}


def test_expand() -> None:
    proto = model("g (float[n, 1, 3] x, int64[4] s) => (float[a, b, c, d] y) { y = Expand(x, s) }")
    agree(
        proto,
        {"x": draw(2, 1, 3), "s": ints(5, 2, 4, 3)},
        {"x": draw(2, 1, 3), "s": ints(1, 1, 1, 1)},
        {"x": draw(1, 1, 3), "s": ints(2, 6, 1, 3)},
    )


def test_slices_of_any_bounds() -> None:
    proto = model("""g (float[n, 5] x, int64[1] low, int64[1] high) => (float[a, 5] y, float[b, 5] z) {
        axis = Constant<value = int64[1] {0}>()
        two = Constant<value = int64[1] {2}>()
        back = Constant<value = int64[1] {-1}>()
        y = Slice(x, low, high, axis, two)
        z = Slice(x, high, low, axis, back)
    }""")
    bounds = ((0, 4), (1, 9), (-3, -1), (3, 1), (-9, 2), (2, -9), (0, 2**63 - 1), (6, 6), (-1, -7))
    agree(proto, *({"x": draw(6, 5), "low": ints(a), "high": ints(b)} for a, b in bounds))


def test_ranges() -> None:
    proto = model("""g (int64 low, int64 high, int64 step, float from, float to) => (int64[a] y, float[b] z) {
        y = Range(low, high, step)
        half = Constant<value = float {0.5}>()
        z = Range(from, to, half)
    }""")
    one, two = np.array(-1, np.float32), np.array(1.25, np.float32)
    cases = ((0, 5, 1), (-3, 4, 2), (4, -3, -2), (3, 3, 1), (5, 0, 1))
    agree(
        proto,
        *({"low": np.array(a), "high": np.array(b), "step": np.array(s), "from": one, "to": two} for a, b, s in cases),
    )


def test_tile_constant_of_shape_and_top_k() -> None:
    proto = model("""g (float[n, 3] x, int64[2] r, int64[1] k)
        => (float[a, b] y, int64[c, d] z, float[n, e] t, int64[n, e] u) {
        y = Tile(x, r)
        z = ConstantOfShape<value = int64[1] {7}>(r)
        t, u = TopK(x, k)
    }""")
    agree(
        proto,
        {"x": draw(2, 3), "r": ints(2, 3), "k": ints(2)},
        {"x": draw(1, 3), "r": ints(1, 1), "k": ints(3)},
        {"x": draw(4, 3), "r": ints(3, 0), "k": ints(1)},
    )


def test_split_and_one_hot() -> None:
    proto = model("""g (float[6, n] x, int64[2] parts, int64[m] i, int64 depth)
        => (float[a, n] y, float[b, n] z, float[m, d] o) {
        y, z = Split<axis = 0>(x, parts)
        values = Constant<value = float[2] {0, 1}>()
        o = OneHot(i, depth, values)
    }""")
    given = {"x": draw(6, 2), "i": ints(0, 2, -1)}
    agree(
        proto,
        given | {"parts": ints(2, 4), "depth": np.array(3)},
        given | {"parts": ints(6, 0), "depth": np.array(5)},
        judge=reference,
    )


def test_a_length_read_from_a_mask() -> None:
    """As exporters write ``x[:, : mask.sum(1).max()]``: the number is a size from there on."""
    proto = model("""g (float[n, m, 2] x, int64[n, m] mask) => (float[n, k, 2] y) {
        axis = Constant<value = int64[1] {1}>()
        lengths = ReduceSum<keepdims = 0>(mask, axis)
        longest = ReduceMax<keepdims = 0>(lengths)
        end = Reshape(longest, axis)
        zero = Constant<value = int64[1] {0}>()
        cut = Slice(x, zero, end, axis)
        row = Softmax<axis = 1>(cut)
        y = Add(row, cut)
    }""")
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0]])
    agree(proto, {"x": draw(2, 4, 2), "mask": mask}, {"x": draw(2, 4, 2), "mask": np.eye(2, 4, dtype=np.int64)})


def test_a_negative_size_fails_in_the_run() -> None:
    proto = model("g (int64[1] s) => (float[a] y) { y = ConstantOfShape(s) }")
    graph = load_onnx(proto)
    with pytest.raises(AttncError, match="the size is -2, but must be at least 0"):
        evaluate(graph, {"s": ints(-2)})
    with pytest.raises(AttncError):
        attnc.compile(graph, target="ort-cpu").session().run({"s": ints(-2)})


def test_a_size_from_data_is_not_taken_to_be_another() -> None:
    """With a count of 1, the file would broadcast: nothing in a run would tell the two cases apart."""
    proto = model("""g (float[n] x, int64 count) => (float[a] y) {
        zero = Constant<value = int64 {0}>()
        one = Constant<value = int64 {1}>()
        line = Range(zero, count, one)
        numbers = Cast<to = 1>(line)
        y = Add(x, numbers)
    }""")
    with pytest.raises(UnsupportedError, match=r"n_size and .*count - 1 do not broadcast.*computed from data"):
        load_onnx(proto)


def test_unused_sizes_are_taken_out() -> None:
    graph = load_onnx(
        model("""g (float[n] x, int64[1] s) => (float[n] y) {
            unused = ConstantOfShape(s)
            twice = Add(unused, unused)
            y = Add(x, x)
        }""")
    )
    verify(graph)
    assert graph.operator_counts() == {"add": 1}
