"""Graphs as text: print, parse, print is the identity, and broken texts say where they are broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnc.ir import (
    OPERATORS,
    DType,
    Graph,
    ParseError,
    Sample,
    ShapeError,
    State,
    Tensor,
    TensorType,
    Value,
    evaluate,
    parse,
    print_node,
    sample_graph,
    symbol,
    verify,
)

SAMPLES: list[tuple[str, Sample]] = [(op.name, sample) for op in OPERATORS.values() for sample in op.samples()]

NAMES = st.one_of(
    st.sampled_from(
        ['a "b"', "x, y", "a:", ":", "none", "return", "%p", "# no", "  # x", "model.layers.0/mul:0", "ß", "\\"]
    ),
    st.text(min_size=1, max_size=6),
)
SOURCES = st.one_of(
    st.just(""), st.sampled_from(['f("a", 3)  # why', "# top", ": x", '"', "{a = (1"]), st.text(max_size=8)
)

EXTREMES: Mapping[str, tuple[Any, ...]] = {
    "float": (0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e-40, 0.1, 65504.0, -3.389e38),
    "bool": (True, False),
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DType)))
    shape = draw(st.sampled_from([(), (0,), (1,), (3,), (2, 2), (0, 3), (4, 4), (3, 7)]))
    if dtype.is_float or dtype is DType.BOOL:
        elements = st.sampled_from(EXTREMES["float" if dtype.is_float else "bool"])
    else:
        info = np.iinfo(dtype.numpy)
        elements = st.sampled_from([int(info.min), int(info.max), 0, 1])
    count = int(np.prod(shape, dtype=int))
    values = draw(st.lists(elements, min_size=count, max_size=count))
    with np.errstate(all="ignore"):
        return Tensor(np.array(values, dtype.numpy).reshape(shape))


def symbolic(op: str, sample: Sample, start: int) -> tuple[Graph, dict[str, Any]]:
    """The sample's graph with symbols for sizes, where the operator allows it."""
    shapes = [d for array in sample.inputs if array is not None for d in array.shape]
    sizes = {n: symbol(f"n{n + start}") for n in shapes if n > 1}
    try:
        return sample_graph(OPERATORS[op], sample, sizes)
    except ShapeError:
        return sample_graph(OPERATORS[op], sample)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, dict[str, Any]]:
    """Several samples' nodes side by side, with weird names, sources, constants and outputs."""
    graph = Graph(draw(NAMES))
    feeds: dict[str, Any] = {}
    outputs: list[Value] = []
    for part in range(draw(st.integers(1, 4))):
        op, sample = draw(st.sampled_from(SAMPLES))
        inner, inner_feeds = symbolic(op, sample, 100 * part)
        mapping: dict[Value, Value] = {}
        for value in inner.inputs:
            kind = draw(st.sampled_from(["input", "constant"]))
            if kind == "constant" and all(isinstance(d, int) for d in value.shape):
                data = inner_feeds[value.name]
                mapping[value] = graph.add_constant(data, draw(st.one_of(st.just(""), NAMES)))
            else:
                mapping[value] = graph.add_input(graph.unique_name(draw(NAMES)), value.type)
                feeds[mapping[value].name] = inner_feeds[value.name]
        for state in inner.states.values():
            name = draw(NAMES)
            if name in graph.states:
                return graph, feeds
            past = symbol(f"past{part}")
            note = draw(SOURCES)
            graph.add_state(State(name, TensorType(state.type.dtype, (1, past, 4)), state.initial, note))
        (node,) = inner.nodes
        attrs = dict(node.attrs)
        if "state" in attrs:
            attrs["state"] = list(graph.states)[-1]
        if op == "loop":  # sizes that only a run knows need names of their own
            attrs["length"] = symbol(f"steps{part}") if attrs["length"] is not None else None
            attrs["sizes"] = (symbol(f"grown{part}"),) if attrs["sizes"] else ()
        results = graph.add(
            node.op,
            *(None if v is None else mapping[v] for v in node.inputs),
            attrs=attrs,
            regions=[r.copy() for r in node.regions],
            names=[draw(NAMES) for _ in node.outputs],
            source=draw(SOURCES),
        )
        outputs += results
    for _ in range(draw(st.integers(0, 3))):
        outputs.append(graph.add_constant(draw(tensors()), draw(NAMES)))
    taken: set[str] = set()
    for value in outputs:
        name = draw(st.one_of(st.just(value.name), NAMES))
        if name not in taken:
            graph.add_output(value, name)
            taken.add(name)
    return graph, feeds


def data_of(graph: Graph) -> dict[str, Tensor]:
    regions = [region for node in graph.walk() for region in node.regions]
    tensors = [v.constant for g in (graph, *regions) for v in g.constants]
    states = [s.initial for s in graph.states.values()]
    return {t.digest: t for t in (*tensors, *states) if t is not None}


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs())
def test_parse_reads_what_print_writes(made: tuple[Graph, dict[str, Any]]) -> None:
    graph, feeds = made
    verify(graph)
    text = str(graph)
    again = parse(text, data_of(graph))
    assert str(again) == text
    assert again == graph
    verify(again)
    assert str(graph.copy()) == text
    assert str(parse(str(parse(text)))) == text  # large constants by digest alone
    assert list(again.states.values()) == list(graph.states.values())
    for old, new in zip(graph.constants, again.constants, strict=True):
        assert old.constant is not None
        assert new.constant is not None
        if not np.any(np.isnan(old.constant.array.astype(np.float64))):
            assert old.constant == new.constant  # NaN has more bits than its text
    expected, found = evaluate(graph, feeds), evaluate(again, feeds)
    assert list(expected) == list(found)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        wide = np.float64 if array.dtype == DType.BFLOAT16.numpy else array.dtype
        np.testing.assert_array_equal(found[name].astype(wide), array.astype(wide))


@given(tensors())
def test_constants_keep_every_bit(tensor: Tensor) -> None:
    graph = Graph()
    graph.add_output(graph.add_constant(tensor, "c"))
    (value,) = parse(str(graph), {tensor.digest: tensor}).constants
    assert value.constant is not None
    assert value.constant.type == tensor.type
    old, new = tensor.array.astype(np.float64), value.constant.array.astype(np.float64)
    np.testing.assert_array_equal(new, old)
    np.testing.assert_array_equal(np.signbit(new)[~np.isnan(new)], np.signbit(old)[~np.isnan(old)])
    if tensor.dtype.is_integer:
        np.testing.assert_array_equal(value.constant.array, tensor.array)


def test_the_form_people_read() -> None:
    text = """\
graph @"a graph"(%x: float32[batch, seq, 4], %"in 1": bool[]) {
  state k0: float32[batch, past, 4]  # keys of "layer 0" # 1
  state sum: float32[2] = [0.5, nan]
  state ring: float32[past] = float32[2] [1.0, 2.0]
  const %w: float32[4, 4] = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
  %y = matmul(%x, %w): float32[batch, seq, 4]  # model.py:7
  %k = state_append(%y) {state = "k0", axis = 1}: float32[batch, past + seq, 4]
  %z = cond(%"in 1", %y): float32[batch, seq, 4]
    region @then(%a: float32[b, s, 4]) {
      %p = reduce_any(%q) {axes = []}: bool[]
      return b = %b
    }
  return out = %z, "w, w" = %w
}
"""
    inner = """\
      const %p: bool[] = true
      %b = cond(%p, %a): float32[b, s, 4]
        region @then(%a: float32[m, n, 4]) {
          %b = mul(%a, float32(-inf)): float32[m, n, 4]  # "deep" #
          return b = %b
        }
        region @else(%a: float32[m, n, 4]) {
          return a = %a
        }
"""
    text = text.replace("      %p = reduce_any(%q) {axes = []}: bool[]\n", inner)
    other = "    region @else(%a: float32[k, l, 4]) {\n      return b = %a\n    }\n"
    text = text.replace('  return out = %z, "w', other + '  return out = %z, "w')
    graph = parse(text)
    assert str(graph) == text
    assert str(graph.copy()) == text
    verify(graph)
    assert graph.states["k0"].description == 'keys of "layer 0" # 1'
    assert graph.states["ring"].initial == Tensor(np.array([1, 2], np.float32))
    outer = list(graph.nodes)[-1]
    (middle,) = outer.regions[0].nodes
    (deep,) = middle.regions[0].nodes
    assert print_node(deep) == '%b = mul(%a, float32(-inf)): float32[m, n, 4]  # "deep" #'


def test_line_breaks_of_unicode_do_not_break_lines() -> None:
    graph = Graph("a\u2028b\x85c\nd")
    x = graph.add_input("\x0bx\u2029", TensorType(DType.FLOAT32, (2,)))
    (y,) = graph.add("exp", x, source="one\n two\u2028three")
    graph.add_output(y, "\x1c")
    assert len(str(graph).split("\n")) == 5
    assert "# one two three" in str(graph)
    assert parse(str(graph)) == graph


def test_state_descriptions_are_one_line() -> None:
    state = State("k", TensorType(DType.FLOAT32, (2,)), description="  two\n lines  # and more ")
    graph = Graph()
    graph.add_state(state)
    assert parse(str(graph)).states["k"] == state
    assert state.description == "two lines # and more"


def test_large_constants_come_from_outside() -> None:
    tensor = Tensor(np.arange(20, dtype=np.float32))
    graph = Graph()
    graph.add_output(graph.add_constant(tensor, "w"))
    text = str(graph)
    assert f"= data:{tensor.digest}" in text
    asked: list[str] = []

    def fetch(digest: str, type: TensorType) -> Tensor:
        asked.append(digest)
        return tensor

    np.testing.assert_array_equal(evaluate(parse(text, fetch), {})["w"], tensor.array)
    assert asked == [tensor.digest]
    assert parse(text) == graph
    with pytest.raises(ParseError, match=r"line 2: a constant float32\[20\] cannot be int64\[1\]"):
        parse(text, lambda digest, type: Tensor(np.zeros(1, np.int64)))


HEAD = "graph @g(%x: float32[2]) {\n"
BROKEN = {
    "": "the text ends before the graph does",
    "graph @g(%x: float32[2]) {": "a } is missing",
    "graf @g() {": "line 1: expected 'graph @' before 'graf @g() {'",
    "graph @g(%x: float32[2] {": "line 1: a ) is missing",
    "graph @g(x: float32[2]) {": "line 1: expected '%' before 'x: float32",
    "graph @g(%x: float[2]) {": "line 1: unknown dtype 'float'",
    "graph @g(%x: float32[2], %x: int64[]) {": "line 1: graph g has two values called x",
    HEAD + "  %y = exp(%x): float32[2]\n}": "line 3: a return line is missing: }",
    HEAD + "  return y = %x": "a } is missing",
    HEAD + "  return y = %y\n}": "line 2: graph g has no value called y: return y = %y",
    HEAD + "  return y = none\n}": "line 2: the output y is none",
    HEAD + "  return y = %x, y = %x\n}": "line 2: graph g has two outputs called y",
    HEAD + "  return y = %x\n} more": "line 3: expected } behind return",
    HEAD + "  return y = %x\n}\nmore": "there is text behind the graph",
    HEAD + "  %y = expp(%x): float32[2]": "line 2: there is no operator called expp; did you mean exp",
    HEAD + "  %y = exp(%x %x): float32[2]": "line 2: unexpected '%x' behind %x",
    HEAD + "  %y = exp(x): float32[2]": "line 2: not an operand: 'x'",
    HEAD + "  %y = exp(%x: float32[2]": "line 2: a ) is missing",
    HEAD + "  %y = exp(%x)": "line 2: 1 results but 0 types",
    HEAD + "  %y = exp(%x): float32[2, 2]": "line 2: exp: the result is float32[2], not float32[2, 2]",
    HEAD + "  %y, %z = exp(%x): float32[2], float32[2]": "line 2: exp: gives 1 results, not 2",
    HEAD + "  %y = exp(%x, %x): float32[2]": "line 2: exp: takes x, not 2 operands",
    HEAD + "  %y = softmax(%x) {axes = 1}: float32[2]": "line 2: softmax has no attribute 'axes'; it has: axis",
    HEAD + "  %y = softmax(%x) {axis = one}: float32[2]": "line 2: not a value of kind int: one",
    HEAD + "  %y = reshape(%x) {shape = 2}: float32[2]": "line 2: expected a list in brackets, not 2",
    HEAD + "  %y = softmax(%x) {axis = 3}: float32[2]": "line 2: softmax: axis 3 is out of range for rank 1",
    HEAD + "  const %c: float32[2] = [1.0]": "line 2: ValueError: cannot reshape",
    HEAD + "  const %c: float32[2] = [1.0, two]": "line 2: ValueError: could not convert string to float: 'two'",
    HEAD + "  const %c: float32[2] = [1.0, 2.0": "line 2: ValueError: could not convert",
    HEAD + "  const %c: float32[2] = 1.0": "line 2: a constant float32[2] cannot be float32[]",
    HEAD + "  const %c: float32[n] = [1.0]": "line 2: a constant must have a shape of numbers, not float32[n]",
    HEAD + "  const %c: uint8[] = 256": "line 2: OverflowError",
    HEAD + "  const %c: bool[] = 1": "line 2: KeyError: '1'",
    HEAD + "  const %c: int64[] = true": "line 2: ValueError: invalid literal for int()",
    HEAD + '  const %"c: int64[] = 1': "line 2: JSONDecodeError",
    HEAD + "  state k: float32[2]\n  state k: float32[2]": "line 3: graph g has two states called k",
    HEAD + '  %k = state_read() {state = "k"}: float32[2]': "line 2: state_read: the state k is not declared",
    HEAD + "  %y = exp(%x): float32[2]\n    region @r() {\n      return\n    }": "line 5: exp: takes 0 regions, not 1",
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_texts(text: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert BROKEN[text] in str(caught.value)
