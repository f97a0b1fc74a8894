"""Canonicalisation changes no bit, reaches its end in one run, and does what it says."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnc.ir import Builder, DType, Graph, State, Tensor, TensorType, Value, evaluate, symbol, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fold import ALWAYS, LIMIT
from attnc.passes.identities import _widens

# Both zeros, both infinities, NaN, a denormal, numbers that round.
HARD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 0.1, -2.5], np.float32)


def start(dtype: DType = DType.FLOAT32, shape: tuple[int, ...] = (8,)) -> tuple[Graph, Builder, Value]:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(dtype, shape))
    return graph, Builder(graph), x


def bits(array: NDArray[np.generic]) -> bytes:
    return bytes(array.dtype.str, "ascii") + np.ascontiguousarray(array).tobytes()


def simplified(graph: Graph, **feeds: NDArray[np.generic]) -> list[str]:
    """Canonicalises; checks the verifier, the results bit by bit and that a second run changes nothing. The names of
    the operators that are left."""
    before = evaluate(graph, feeds)
    result = canonicalise(graph)
    verify(graph, after="canonicalise")
    after = evaluate(graph, feeds)
    assert list(before) == list(after)
    for name in before:
        assert before[name].shape == after[name].shape
        assert bits(before[name]) == bits(after[name]), name
    text = str(graph)
    again = canonicalise(graph)
    assert not again.changed
    assert not again.notes
    assert str(graph) == text
    assert result.graph is graph
    return [node.op.name for node in graph.nodes]


@pytest.mark.parametrize(
    ("op", "number", "side", "gone"),
    [
        ("mul", 1.0, 1, True),
        ("mul", 1.0, 0, True),
        ("mul", 2.0, 1, False),
        ("div", 1.0, 1, True),
        ("div", 1.0, 0, False),
        ("add", -0.0, 1, True),
        ("add", -0.0, 0, True),
        ("add", 0.0, 1, False),
        ("sub", 0.0, 1, True),
        ("sub", -0.0, 1, False),
        ("sub", 0.0, 0, False),
        ("pow", 1.0, 1, True),
        ("pow", 2.0, 1, False),
    ],
)
def test_neutral_numbers(op: str, number: float, side: int, gone: bool) -> None:
    graph, b, x = start()
    operands = (x, number) if side == 1 else (number, x)
    graph.add_output(b(op, *operands), "y")
    assert simplified(graph, x=HARD) == ([] if gone else [op])


def test_neutral_integers_and_flags() -> None:
    graph, b, x = start(DType.INT64)
    y = b.sub(b.add(b.div(b.mul(x, 1), 1), 0), 0)
    graph.add_output(b("bit_xor", b("bit_or", y, 0), 0), "y")
    assert simplified(graph, x=np.arange(-4, 4)) == []
    graph, b, x = start(DType.BOOL)
    y = b("xor", b("or", b("and", x, True), False), False)
    graph.add_output(b("and", y, y), "y")
    assert simplified(graph, x=np.arange(8) > 3) == []


def test_a_neutral_operand_that_broadcasts_stays() -> None:
    graph, b, x = start(shape=(1, 8))
    graph.add_output(b.mul(x, np.ones((3, 8), np.float32)), "y")
    assert simplified(graph, x=HARD[None]) == ["mul"]


def test_transpositions() -> None:
    graph, b, x = start(shape=(2, 3, 4))
    once = b.transpose(x, (1, 2, 0))
    graph.add_output(b.transpose(once, (2, 0, 1)), "same")
    graph.add_output(b.transpose(b.transpose(x, (1, 0, 2)), (2, 1, 0)), "one")
    graph.add_output(b.transpose(x, (0, 1, 2)), "none")
    assert simplified(graph, x=np.arange(24, dtype=np.float32).reshape(2, 3, 4)) == ["transpose"]
    assert graph.outputs[0].value is graph.inputs[0]
    assert graph.outputs[2].value is graph.inputs[0]


def test_shapes() -> None:
    n = symbol("n")
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (n, 4)))
    b = Builder(graph)
    graph.add_output(b("reshape", b("reshape", x, shape=(n, 2, 2)), shape=(n, 4)), "same")
    graph.add_output(b("reshape", b("reshape", x, shape=(n, 2, 2)), shape=(2 * n, 2)), "one")
    graph.add_output(b("expand", b("expand", x, shape=(1, n, 4)), shape=(3, n, 4)), "wide")
    graph.add_output(b("expand", x, shape=(n, 4)), "own")
    assert simplified(graph, x=np.ones((3, 4), np.float32)) == ["reshape", "expand"]


def test_slices_concats_pads() -> None:
    n = symbol("n")
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (n, 4)))
    b = Builder(graph)
    whole = b("slice", x, axes=(0, 1), starts=(0, 0), sizes=(n, 4))
    part = b("slice", x, axes=(0, 1), starts=(0, 1), sizes=(n, 2))
    back = b("slice", x, axes=(1,), starts=(3,), sizes=(4,), steps=(-1,))
    none = b("slice", x, axes=(1,), starts=(0,), sizes=(0,))
    graph.add_output(whole, "whole")
    graph.add_output(part, "part")
    graph.add_output(back, "back")
    graph.add_output(b("concat", x, axis=0), "alone")
    graph.add_output(b("concat", none, x, none, axis=1), "filled")
    graph.add_output(b("pad", x, 0.0, before=(0, 0), after=(0, 0)), "unpadded")
    assert simplified(graph, x=np.arange(8, dtype=np.float32).reshape(2, 4)) == ["slice", "slice"]
    assert next(graph.nodes).attr("axes") == (1,)


def test_inverses_and_repetitions() -> None:
    graph, b, x = start()
    graph.add_output(b("neg", b("neg", x)), "neg")
    graph.add_output(b("floor", b("floor", x)), "floor")
    graph.add_output(b("relu", b("abs", b("abs", x))), "abs")
    graph.add_output(b("not", b("not", b("less", x, 0.5))), "not")
    graph.add_output(b("min", x, x), "min")
    assert simplified(graph, x=HARD) == ["floor", "abs", "relu", "less"]


def test_where() -> None:
    graph, b, x = start()
    c = b("less", x, 0.0)
    graph.add_output(b("where", np.array(True), x, b.constant(1.0)), "true")
    graph.add_output(b("where", np.array(False), x, b.constant(2.0)), "false")
    graph.add_output(b("where", c, x, x), "same")
    graph.add_output(b("where", b("not", c), x, b.constant(1.0)), "not")
    assert simplified(graph, x=HARD) == ["less", "where"]


def test_broadcasts_by_hand() -> None:
    graph, b, x = start(shape=(2, 3, 4))
    row = graph.add_input("row", TensorType(DType.FLOAT32, (4,)))
    wide = b.expand(row, (2, 3, 4))
    graph.add_output(b.add(x, wide), "needless")
    graph.add_output(b.mul(wide, b.expand(row, (3, 4))), "needed")
    names = simplified(graph, x=np.ones((2, 3, 4), np.float32), row=HARD[:4])
    assert names == ["expand", "add", "mul"]
    assert next(n for n in graph.nodes if n.op.name == "add").inputs == (x, row)


# The largest number, the step above 1 and the smallest number (IEEE 754-2019, table 3.5; bfloat16 has 8 digits).
FLOATS = {
    DType.FLOAT16: (65504.0, 2.0**-10, 2.0**-24),
    DType.BFLOAT16: ((2 - 2.0**-7) * 2.0**127, 2.0**-7, 2.0**-133),
    DType.FLOAT32: ((2 - 2.0**-23) * 2.0**127, 2.0**-23, 2.0**-149),
    DType.FLOAT64: ((2 - 2.0**-52) * 2.0**1023, 2.0**-52, 2.0**-1074),
}


@pytest.mark.parametrize("target", list(DType), ids=str)
@pytest.mark.parametrize("source", list(DType), ids=str)
def test_widening_casts_lose_nothing(source: DType, target: DType) -> None:
    """Compared with the extreme numbers of the dtypes, in exact arithmetic."""
    if source is DType.BOOL:
        assert _widens(source, target)
        return
    if target is DType.BOOL:
        assert not _widens(source, target)
        return
    if source.is_float:
        largest, eps, tiny = FLOATS[source]
        samples = [largest, 1 + eps, tiny, -0.5]
    else:
        whole = np.iinfo(source.numpy)
        samples = [int(whole.min), int(whole.max), int(whole.max) - 1]
    exact = True
    for number in samples:
        given = np.asarray(number).astype(source.numpy)
        with np.errstate(all="ignore"):
            there = given.astype(target.numpy)
        if source.is_float and not target.is_float:
            exact = False
        elif source.is_float:
            exact &= float(there) == float(given)
        else:  # Python compares a float with an int exactly
            exact &= (float(there) if target.is_float else int(there)) == int(given)
    assert _widens(source, target) == exact


def test_casts() -> None:
    graph, b, x = start(DType.FLOAT16)
    up = b("cast", x, dtype=DType.FLOAT32)
    graph.add_output(b("cast", up, dtype=DType.FLOAT16), "back")
    graph.add_output(b("cast", up, dtype=DType.FLOAT64), "up")
    graph.add_output(b("cast", up, dtype=DType.FLOAT32), "same")
    graph.add_output(b("cast", b("cast", x, dtype=DType.INT32), dtype=DType.FLOAT16), "whole")
    x16 = np.nan_to_num(HARD, posinf=9.0, neginf=-9.0).astype(np.float16)
    assert simplified(graph, x=x16) == ["cast", "cast", "cast", "cast"]
    assert graph.outputs[0].value is x


def test_folding() -> None:
    graph, b, x = start(shape=(3,))
    a = b.constant(np.array([1.5, 2.5, 3.5], np.float32), "a")
    y = b("exp", b.add(a, b("cast", b("size", value=4), dtype=DType.FLOAT32)))
    graph.add_output(b.add(x, y), "sum")
    graph.add_output(b("reduce_sum", a), "total")
    assert simplified(graph, x=HARD[:3]) == ["add"]
    assert np.array_equal(graph.constants[0].constant.array, np.exp(np.array([5.5, 6.5, 7.5], np.float32)))  # type: ignore[union-attr]
    assert str(graph).endswith("return sum = %v4, total = float32(7.5)\n}\n")


def test_folding_is_bounded() -> None:
    def expanded(size: int, shape: tuple[int, ...]) -> list[str]:
        graph, b, x = start(shape=())
        c = b.constant(np.arange(size, dtype=np.float32), "c")
        graph.add_output(b("reduce_sum", b.mul(b("expand", c, shape=shape), x)), "y")
        canonicalise(graph)
        return [node.op.name for node in graph.nodes]

    assert "expand" not in expanded(4, (ALWAYS // 16, 4))
    assert "expand" in expanded(4, (ALWAYS // 16 + 1, 4))
    assert "expand" not in expanded(1 << 18, (4, 1 << 18))
    assert "expand" in expanded(1 << 18, (5, 1 << 18))
    assert "expand" in expanded(LIMIT // 4 + 4, (1, LIMIT // 4 + 4))


def test_what_is_not_folded() -> None:
    n = symbol("n")
    graph = Graph("g")
    graph.add_input("x", TensorType(DType.FLOAT32, (n,)))
    b = Builder(graph)
    graph.add_output(b("iota", shape=(4,)), "iota")
    graph.add_output(b("size", value=n), "n")
    graph.add_output(b("expand", b.constant(1.0), shape=(n,)), "ones")
    graph.add_output(b("slice", np.arange(4.0), axes=(0,), starts=(n - 1,), sizes=(1,)), "last")
    lost = graph.add_constant(Tensor.missing(TensorType(DType.FLOAT32, (20,)), "0" * 32), "lost")
    graph.add_output(b("neg", lost), "neg")
    assert not canonicalise(graph).changed


def test_states_are_read_in_the_run() -> None:
    graph = Graph("g")
    graph.add_state(State("total", TensorType(DType.FLOAT32, (3,)), Tensor(np.arange(3, dtype=np.float32))))
    b = Builder(graph)
    first, second = b("state_read", state="total"), b("state_read", state="total")
    b("state_write", b.add(first, second), state="total")
    assert canonicalise(graph).notes == ["merged 1 node with an equal one"]
    assert [node.op.name for node in graph.nodes] == ["state_read", "add", "state_write"]
    states = {"total": np.ones(3, np.float32)}
    evaluate(graph, {}, states=states)
    assert states["total"].tolist() == [2, 2, 2]


def test_what_fails_is_left_for_the_run() -> None:
    graph = Graph("g")
    b = Builder(graph)
    graph.add_output(b("gather", np.arange(4.0), np.array([9])), "y")
    assert not canonicalise(graph).changed


def test_common_subexpressions() -> None:
    graph, b, x = start()
    y = graph.add_input("y", TensorType(DType.FLOAT32, (8,)))
    graph.add_output(b.add(b("exp", b.add(x, y)), b("exp", b.add(y, x))), "sum")
    graph.add_output(b.sub(b.sub(x, y), b.sub(y, x)), "difference")
    graph.add_output(b("max", b("max", x, y), b("max", y, x)), "max")
    graph.add_output(b.add(b("softmax", x, axis=0), b("softmax", x, axis=-1)), "axes")
    names = simplified(graph, x=HARD, y=HARD[::-1].copy())
    assert names == ["add", "exp", "add", "sub", "sub", "sub", "max", "max", "max", "softmax", "softmax", "add"]


def test_equal_constants_are_one() -> None:
    graph, b, x = start(shape=(100,))
    same = np.arange(100, dtype=np.float32)
    other = same.copy()
    other[3] = 7  # not among the sampled elements
    y = b.add(b.mul(x, same), b.mul(x, same.copy()))
    graph.add_output(b.add(y, b.mul(x, other)), "y")
    names = simplified(graph, x=same)
    assert names == ["mul", "add", "mul", "add"]
    assert len(graph.constants) == 2


def test_minus_zero_is_not_zero_for_merging() -> None:
    graph, b, x = start()
    graph.add_output(b.sub(x, -0.0), "minus")
    graph.add_output(b.mul(x, 0.0), "zero")
    graph.add_output(b.mul(x, -0.0), "negative")
    assert simplified(graph, x=HARD) == ["sub", "mul", "mul"]


def test_dead_code_and_notes() -> None:
    graph, b, x = start()
    b("exp", b("tanh", x))
    b.constant(np.ones(100, np.float32), "unused")
    graph.add_output(b.mul(b("neg", b("neg", x)), 1.0), "y")
    result = canonicalise(graph)
    assert result.changed
    assert result.notes == ["simplified 2 nodes", "removed 3 nodes that nothing reads"]
    assert len(graph) == 0
    assert graph.constants == ()


def test_names_and_sources_stay() -> None:
    graph, b, x = start(shape=(2, 3, 4))
    with b.at("layer 3"):
        y = b("transpose", b.transpose(x, (1, 0, 2)), name="kept", order=(2, 1, 0))
    graph.add_output(b("tanh", y), "y")
    canonicalise(graph)
    node = next(graph.nodes)
    assert (node.output.name, node.source) == ("kept", "layer 3")


_UNARY = ("neg", "abs", "relu", "floor", "round", "exp", "sign")
_BINARY = ("add", "sub", "mul", "div", "min", "max", "pow")
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 2.0, float("inf"))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=25))
def test_random_programs_keep_every_bit(steps: list[tuple[int, int, int]]) -> None:
    graph, b, x = start(shape=(2, 4))
    values = [x, b.constant(np.ones((2, 4), np.float32)), b.constant(HARD.reshape(2, 4).copy(), "hard")]
    for kind, first, second in steps:
        a, c = values[first % len(values)], values[second % len(values)]
        match kind:
            case 0 | 1:
                values.append(b(_UNARY[second % len(_UNARY)], a))
            case 2 | 3:
                values.append(b(_BINARY[(first + second) % len(_BINARY)], a, c))
            case 4 | 5:
                number = _NUMBERS[second % len(_NUMBERS)]
                values.append(b(_BINARY[first % len(_BINARY)], a, number))
            case 6:
                values.append(b("reshape", b.transpose(a, (1, 0)), shape=(2, 4)))
            case 7:
                values.append(b("where", b("not", b("less", a, c)), a, c))
            case 8:
                values.append(b("cast", b("cast", a, dtype=DType.FLOAT64), dtype=DType.FLOAT32))
            case _:
                values.append(b("concat", b("slice", a, axes=(0,), starts=(0,), sizes=(1,)),
                                b("slice", c, axes=(0, 1), starts=(1, 0), sizes=(1, 4)), axis=0))  # fmt: skip
    for number, value in enumerate(values[3:][-5:]):
        graph.add_output(value, f"y{number}")
    simplified(graph, x=HARD.reshape(2, 4))


def test_a_large_graph_takes_no_time() -> None:
    graph, b, x = start(shape=(4, 4))
    y = x
    for layer in range(500):
        w = b.constant(np.full((4, 4), layer % 7, np.float32), f"w{layer}")
        y = b("tanh", b.add(b.mul(b.transpose(b.transpose(b.matmul(y, w), (1, 0)), (1, 0)), 1.0), x))
    graph.add_output(y, "y")
    assert len(graph) == 3000
    begin = time.perf_counter()
    canonicalise(graph)
    assert time.perf_counter() - begin < 2
    assert len(graph) == 1500
    assert len(graph.constants) == 7
