"""Each rule of the verifier, broken by reaching into what only the graph's own methods may change."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest

from attnc.ir import DType, Graph, Node, Output, State, TensorType, Use, VerifyError, parse, symbol, verify
from attnc.ir.graph import Value
from attnc.ir.verify import RULES

TEXT = """
graph @g(%x: float32[n, 4], %p: bool[]) {
  state k0: float32[past, 4]
  const %w: float32[4] = [1.0, 2.0, 3.0, 4.0]
  %a = mul(%x, %w): float32[n, 4]  # model.py:1
  %b = add(%a, %x): float32[n, 4]  # model.py:2
  %k = state_append(%b) {state = "k0", axis = 0}: float32[n + past, 4]  # model.py:3
  %c = cond(%p, %b): float32[n, 4]  # model.py:4
    region @then(%x: float32[m, 4]) {
      %y = exp(%x): float32[m, 4]  # model.py:5
      %z = neg(%y): float32[m, 4]  # model.py:6
      return z = %z
    }
    region @else(%x: float32[m, 4]) {
      return x = %x
    }
  %r = reshape(%c) {shape = [4*n]}: float32[4*n]  # model.py:7
  return r = %r, k = %k
}
"""
Break = Callable[[Graph], None]


def node(graph: Graph, name: str) -> Node:
    found = graph.value(name).producer
    assert found is not None
    return found


def attrs(graph: Graph, name: str, **values: object) -> None:
    n = node(graph, name)
    n.attrs = MappingProxyType({**n.attrs, **values})  # type: ignore[dict-item]


def swap(graph: Graph) -> None:
    """Puts the first node behind the second."""
    first, second = list(graph.nodes)[:2]
    third = second._next
    graph._first, second._previous, second._next = second, None, first
    first._previous, first._next = second, third
    if third is None:
        graph._last = first
    else:
        third._previous = first


def foreign(graph: Graph) -> None:
    other = Graph("other").add_input("y", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    target = node(graph, "b")
    target._inputs[1] = other


def lost_output(graph: Graph) -> None:
    graph.outputs.append(Output("lost", Value(graph, "lost", TensorType(DType.FLOAT32, ()))))


def same_name(graph: Graph) -> None:
    graph.value("b").name = "a"


def same_output(graph: Graph) -> None:
    graph.outputs.append(Output("r", graph.value("r")))


def lost_use(graph: Graph) -> None:
    value = graph.value("a")
    value._uses.pop(value.uses[0])


def stale_use(graph: Graph) -> None:
    graph.value("w")._uses[Use(node(graph, "b"), 1)] = None


def wrong_producer(graph: Graph) -> None:
    graph.value("b").producer = node(graph, "a")


def wrong_type(graph: Graph) -> None:
    graph.value("r").type = TensorType(DType.FLOAT16, graph.value("r").type.shape)


def wrong_size(graph: Graph) -> None:
    graph.value("b").type = TensorType(DType.FLOAT32, (symbol("n"), 5))


def missing_result(graph: Graph) -> None:
    (unread,) = graph.add("neg", graph.value("x"), source="model.py:8")
    assert unread.producer is not None
    unread.producer.outputs = ()


def no_state(graph: Graph) -> None:
    del graph.states["k0"]


def second_write(graph: Graph) -> None:
    graph.add("state_write", graph.value("b"), attrs={"state": "k0"}, source="model.py:8")


def wrong_initial(graph: Graph) -> None:
    del graph.states["k0"]
    graph.add_state(State("k0", TensorType(DType.FLOAT32, (symbol("past"), 4)), graph.value("w").constant))


def region_state(graph: Graph) -> None:
    node(graph, "c").regions[0].states["k1"] = State("k1", TensorType(DType.FLOAT32, ()))


def region_order(graph: Graph) -> None:
    swap(node(graph, "c").regions[0])


TYPES = "types are what the operators give"
CASES: dict[str, tuple[Break, str, str, str]] = {
    # what is broken: how, the rule, what is wrong, the line marked in the excerpt
    "order": (swap, "values are made before they are read", "operand %a is read before it is made", "%b = add"),
    "foreign": (foreign, "values are made before they are read", "operand %y belongs to another graph", "%b = add"),
    "lost output": (
        lost_output,
        "values are made before they are read",
        "output lost is %lost, which nothing makes",
        "",
    ),
    "name": (same_name, "names are unique", "the name a does not stand for one value", "%a = add"),
    "output": (same_output, "names are unique", "two outputs are called r", ""),
    "lost use": (lost_use, "use lists are right", "the list of uses of %a is not what the nodes read", "%a = mul"),
    "stale use": (stale_use, "use lists are right", "the list of uses of %w is not what the nodes read", ""),
    "producer": (wrong_producer, "use lists are right", "%b does not know its producer", "%b = add"),
    "dtype": (wrong_type, TYPES, "%r is said to be float16[4*n] but is float32[4*n]", "%r = reshape"),
    "size": (wrong_size, TYPES, "%b is said to be float32[n, 5] but is float32[n, 4]", "%b = add"),
    "results": (missing_result, TYPES, "it has 0 results, but neg gives 1", " = neg"),
    "operand": (
        lambda g: g.set_input(node(g, "a"), 0, None),
        TYPES,
        "mul at model.py:1: operand x is missing",
        "%a = mul(none, %w)",
    ),
    "attribute": (
        lambda g: attrs(g, "k", axis="first"),
        TYPES,
        "state_append: attribute axis must be of kind int",
        "%k = state_append",
    ),
    "unknown size": (
        lambda g: attrs(g, "r", shape=(4 * symbol("lost"),)),
        "sizes are known",
        "the attribute shape mentions lost, which no input gives",
        "%r = reshape",
    ),
    "no state": (
        no_state,
        "states are declared and written once",
        "the state k0 is not declared",
        "%k = state_append",
    ),
    "second write": (
        second_write,
        "states are declared and written once",
        "the state k0 is written a second time",
        "= state_write",
    ),
    "initial": (
        wrong_initial,
        "states are declared and written once",
        "the state k0 is float32[past, 4], but begins as float32[4]",
        "",
    ),
    "region state": (
        region_state,
        "states are declared and written once",
        "the region then declares states",
        "%c = cond",
    ),
    "region": (
        region_order,
        "regions keep the rules",
        "in region then: operand %y is read before it is made [rule: values are made before they are read]",
        "%c = cond",
    ),
}


def test_every_rule_is_broken_somewhere() -> None:
    assert {rule for _, rule, _, _ in CASES.values()} == {name for name, _ in RULES}


def test_the_graph_is_right_before() -> None:
    verify(parse(TEXT))


@pytest.mark.parametrize("case", CASES)
def test_a_broken_rule_is_named(case: str) -> None:
    spoil, rule, reason, marked = CASES[case]
    graph = parse(TEXT)
    spoil(graph)
    with pytest.raises(VerifyError) as caught:
        verify(graph, after="the pass of the day")
    message = str(caught.value)
    assert message.startswith("the graph g is broken after the pass of the day: ")
    assert reason in message
    assert f"[rule: {rule}]" in message
    lines = message.split("\n")
    if marked:
        (line,) = (line for line in lines if line.startswith("->"))
        assert marked in line
        shown = [line for line in lines if line[:3] in ("-> ", "   ")]
        assert len(shown) == len(list(graph.nodes))  # fewer than five on either side: all of them
        assert "# model.py" in line


def test_the_excerpt_is_short() -> None:
    graph = Graph("long")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (2,)))
    for k in range(40):
        (x,) = graph.add("exp", x, names=[f"e{k}"])
    graph.value("e20").type = TensorType(DType.FLOAT32, (3,))
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    shown = [line for line in str(caught.value).split("\n") if " = exp(" in line]
    assert [line.split()[-3] for line in shown] == [f"%e{k}" for k in range(15, 26)]
    assert "after" not in str(caught.value).split(":")[0]


def test_several_faults_are_listed() -> None:
    graph = parse(TEXT)
    no_state(graph)
    wrong_size(graph)
    with pytest.raises(VerifyError, match=r"(?s)but is float32\[n, 4\].*and: .*the state k0 is not declared"):
        verify(graph)


def test_a_symbol_is_no_fault_where_a_number_is_not_known() -> None:
    graph = parse(TEXT)
    graph.value("r").type = TensorType(DType.FLOAT32, (symbol("rows"),))
    verify(graph)
