"""The graph's own methods: edges, names, order, copies and the networkx view."""

from __future__ import annotations

import networkx
import numpy as np
import pytest

from attnc.ir import (
    Builder,
    DType,
    Graph,
    ModelError,
    Node,
    ShapeError,
    State,
    TensorType,
    UnsupportedError,
    Use,
    Value,
    VerifyError,
    evaluate,
    parse,
    symbol,
    verify,
)
from attnc.ir.copies import append_value

F = DType.FLOAT32
N = symbol("n")
TEXT = """
graph @g(%x: float32[n, 4], %y: float32[n, 4]) {
  const %w: float32[4] = [1.0, 2.0, 3.0, 4.0]
  %a = mul(%x, %w): float32[n, 4]  # model.py:3
  %b = add(%a, %y): float32[n, 4]
  %c = mul(%b, %b): float32[n, 4]
  return c = %c, a = %a
}
"""


@pytest.fixture
def graph() -> Graph:
    return parse(TEXT)


def only(value: Value) -> Node:
    assert value.producer is not None
    return value.producer


def test_the_builder_makes_what_the_text_says() -> None:
    g = Graph("g")
    x, y = (g.add_input(name, TensorType(F, (N, 4))) for name in "xy")
    b = Builder(g)
    with b.at("model.py:3"):
        a = b("mul", x, b.constant(np.array([1, 2, 3, 4], np.float32), "w"), name="a")
    c = b("add", a, y, name="b")
    c = b("mul", c, c, name="c")
    g.add_output(c)
    g.add_output(a)
    assert g == parse(TEXT)
    assert str(g) == TEXT.lstrip()
    assert g != parse(TEXT.replace("2.0", "2.5"))
    assert g != parse(TEXT.replace("model.py:3", "model.py:4"))


def test_numbers_take_the_dtype_of_the_other_operand() -> None:
    g = Graph()
    b = Builder(g)
    for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.INT32):
        x = g.add_input(str(dtype), TensorType(dtype, (2,)))
        assert b.mul(x, 2).dtype is dtype
        assert b.sub(1, x).dtype is dtype
    assert b.constant(0.5).dtype is F
    assert b.constant(5).dtype is DType.INT64


def test_builder_shortcuts_do_nothing_where_nothing_is_to_do() -> None:
    g = Graph()
    x = g.add_input("x", TensorType(F, (2, 3)))
    b = Builder(g)
    assert b.cast(x, F) is x
    assert b.reshape(x, (2, 3)) is x
    assert b.expand(x, (2, 3)) is x
    assert b.unsqueeze(x, 0, -1).shape == (1, 2, 3, 1)
    assert len(g) == 1


def test_use_lists(graph: Graph) -> None:
    a, b = graph.value("a"), graph.value("b")
    mul = only(graph.value("c"))
    assert b.uses == (Use(mul, 0), Use(mul, 1))
    assert b.users == (mul,)
    graph.set_input(mul, 1, a)
    assert list(b.uses) == [Use(mul, 0)]
    assert a.uses == (Use(only(b), 0), Use(mul, 1))
    assert a.is_output
    assert not b.is_output
    verify(graph)


def test_replace_uses_reaches_nodes_and_outputs(graph: Graph) -> None:
    x, a = graph.value("x"), graph.value("a")
    graph.replace_uses(a, x)
    assert a.uses == ()
    assert [o.value.name for o in graph.outputs] == ["c", "x"]
    assert [o.name for o in graph.outputs] == ["c", "a"]
    graph.remove(only(a))
    verify(graph)
    assert [n.op.name for n in graph.nodes] == ["add", "mul"]
    assert "a" not in graph.values
    assert graph.value("w").uses == ()
    assert graph.remove_unused() == 0
    assert graph.constants == ()


def test_a_node_that_is_read_is_not_removed(graph: Graph) -> None:
    with pytest.raises(VerifyError, match=r"cannot remove %b = add\(%a, %y\): %b is still read"):
        graph.remove(only(graph.value("b")))
    with pytest.raises(VerifyError, match="%c is still read"):
        graph.remove(only(graph.value("c")))


def test_remove_unused_takes_chains_and_keeps_effects() -> None:
    g = Graph()
    x = g.add_input("x", TensorType(F, (1, 2)))
    g.add_state(State("k", TensorType(F, (symbol("past"), 2))))
    b = Builder(g)
    dead = b.mul(b.add(x, b.constant(np.ones((1, 2), np.float32), "ones")), 2.0)
    b("exp", dead)
    b("state_read", state="k")
    b("state_append", x, state="k", axis=0)
    g.add_output(b("tanh", x))
    assert g.remove_unused() == 4
    assert [n.op.name for n in g.nodes] == ["state_append", "tanh"]
    assert g.constants == ()
    verify(g)


def test_insert_before(graph: Graph) -> None:
    b = Builder(graph)
    add = only(graph.value("b"))
    with graph.insert_before(add):
        first = b("neg", graph.value("a"))
        second = b("exp", first)
    graph.set_input(add, 0, second)
    b("abs", graph.value("c"))
    assert [n.op.name for n in graph.nodes] == ["mul", "neg", "exp", "add", "mul", "abs"]
    verify(graph)


def test_insert_before_a_node_that_goes_away(graph: Graph) -> None:
    add = only(graph.value("b"))
    with graph.insert_before(add):
        graph.replace_uses(graph.value("b"), graph.value("a"))
        graph.remove(add)
        value = Builder(graph)("neg", graph.value("x"))
    assert [n.op.name for n in graph.nodes] == ["mul", "neg", "mul"]
    assert value.producer is list(graph.nodes)[1]
    verify(graph)


def test_removing_the_node_at_hand_while_iterating() -> None:
    g = Graph()
    x = g.add_input("x", TensorType(F, (2,)))
    for _ in range(6):
        Builder(g)("exp", x)
    seen = 0
    for node in g.nodes:
        seen += 1
        g.remove(node)
    assert (seen, len(g), list(g.nodes)) == (6, 0, [])


def test_names_are_unique_and_found(graph: Graph) -> None:
    assert graph.unique_name("a") == "a_0"
    assert graph.unique_name("new") == "new"
    graph.rename(graph.value("a"), "c")
    assert graph.value("c_0").type == TensorType(F, (N, 4))
    graph.rename(graph.value("c_0"), "a")
    verify(graph)
    with pytest.raises(ModelError, match="graph g has no value called nothing"):
        graph.value("nothing")
    with pytest.raises(ModelError, match="two values called x"):
        graph.add_input("x", TensorType(F, ()))
    with pytest.raises(ModelError, match="two outputs called c"):
        graph.add_output(graph.value("x"), "c")


def test_a_scalar_shown_inline_can_be_given_a_name() -> None:
    g = Graph()
    value = g.add_constant(np.float32(2))
    assert (str(value), value.is_inline, g.constants) == ("float32(2.0)", True, ())
    g.rename(value, "two")
    assert (str(value), value.is_inline, g.constants) == ("%two", False, (value,))


def test_many_values_of_one_name() -> None:
    g = Graph()
    x = g.add_input("x", TensorType(F, (2,)))
    b = Builder(g)
    for _ in range(10_000):
        x = b("exp", x, name="x")
    probes = 0

    class Counting(dict[str, Value]):
        def __contains__(self, key: object) -> bool:
            nonlocal probes
            probes += 1
            return super().__contains__(key)

    g._values = Counting(g._values)
    for _ in range(1_000):
        x = b("exp", x, name="x")
    assert len(g.values) == 11_001
    assert probes < 5_000  # a few look-ups a name, not one for every name there is


def test_copies_are_equal_and_apart(graph: Graph) -> None:
    copied = graph.copy()
    assert copied == graph
    verify(copied)
    assert copied.value("w").constant is graph.value("w").constant
    copied.replace_uses(copied.value("a"), copied.value("x"))
    copied.remove_unused()
    assert str(graph) == TEXT.lstrip()
    assert copied != graph
    feeds = {"x": np.ones((1, 4), np.float32), "y": np.zeros((1, 4), np.float32)}
    np.testing.assert_array_equal(evaluate(graph, feeds)["c"], [[1, 4, 9, 16]])


def test_append_nodes_inlines_another_graph(graph: Graph) -> None:
    outer = Graph("outer")
    x = outer.add_input("x", TensorType(F, (3, 4)))
    inner = parse(TEXT.replace("[n, 4]", "[3, 4]"))
    mapping = {inner.value("x"): x, inner.value("y"): x}
    outer.append_nodes(inner, mapping)
    outer.add_output(mapping[inner.value("c")])
    verify(outer)
    np.testing.assert_array_equal(evaluate(outer, {"x": np.ones((3, 4), np.float32)})["c"][0], [4, 9, 16, 25])


def test_walk_and_counts_reach_into_regions() -> None:
    g = parse("""
        graph @g(%p: bool[], %x: float32[2]) {
          %y = cond(%p, %x): float32[2]
            region @then(%x: float32[2]) {
              %y = exp(%x): float32[2]
              return y = %y
            }
            region @else(%x: float32[2]) {
              %y = exp(%x): float32[2]
              %z = neg(%y): float32[2]
              return z = %z
            }
          return y = %y
        }""")
    assert [n.op.name for n in g.walk()] == ["cond", "exp", "exp", "neg"]
    assert g.operator_counts() == {"exp": 2, "cond": 1, "neg": 1}


def test_the_networkx_view(graph: Graph) -> None:
    view = graph.to_networkx()
    nodes = list(graph.nodes)
    mul, add, square = nodes
    assert view.number_of_nodes() == 2 + 3 + 2
    assert networkx.is_directed_acyclic_graph(view)
    order = list(networkx.topological_sort(view))
    assert [n for n in order if isinstance(n, Node)] == nodes
    assert view.edges[add, square]["values"] == [graph.value("b"), graph.value("b")]
    assert graph.value("w") not in view
    assert networkx.descendants(view, graph.value("y")) == {add, square, graph.outputs[0]}
    assert networkx.ancestors(view, graph.outputs[1]) == {graph.value("x"), mul}
    graph.set_input(mul, 0, graph.value("c"))
    assert not networkx.is_directed_acyclic_graph(graph.to_networkx())


def test_wrong_shapes_name_the_place() -> None:
    g = Graph()
    x, y = g.add_input("x", TensorType(F, (N, 4))), g.add_input("y", TensorType(F, (3, N)))
    b = Builder(g, source="model.py:12")
    with pytest.raises(ShapeError) as caught:
        b.matmul(x, y)
    assert str(caught.value) == (
        "matmul at model.py:12: the inner dimensions must agree: 4 and 3 differ (x: float32[n, 4], y: float32[3, n])"
    )
    assert caught.value.conflict == (4, 3)
    with pytest.raises(ShapeError, match=r"add at model.py:12: n and 3 do not broadcast on axis -2"):
        b.add(x, y)
    with pytest.raises(ShapeError, match=r"softmax at model.py:12: axis 2 is out of range for rank 2"):
        b("softmax", x, axis=2)
    with pytest.raises(ShapeError, match=r"softmax at model.py:12: unknown attribute axes; this operator has: axis"):
        b("softmax", x, axes=2)
    with pytest.raises(ShapeError, match=r"transpose at model.py:12: the attribute order \(int\*\) must be given"):
        b("transpose", x)
    with pytest.raises(ShapeError, match=r"softmax at model.py:12: attribute axis must be of kind int: 'last'"):
        b("softmax", x, axis="last")
    with pytest.raises(ShapeError, match=r"exp at model.py:12: takes x, not 2 operands"):
        b("exp", x, x)
    with pytest.raises(ShapeError, match=r"add at model.py:12: operand y is missing"):
        b("add", x, None)
    with pytest.raises(ShapeError, match=r"cond at model.py:12: takes 2 regions, not 0"):
        b("cond", x)
    with pytest.raises(UnsupportedError, match="no operator called sofmax; did you mean softmax"):
        b("sofmax", x)
    assert len(g) == 0


def test_results_may_be_given_their_types() -> None:
    g = Graph()
    x = g.add_input("x", TensorType(F, (4,)))
    (y,) = g.add("exp", x, types=[TensorType(F, (symbol("m"),))])
    assert y.shape == (symbol("m"),)
    with pytest.raises(ShapeError, match=r"the result is float32\[4\], not float32\[4, 1\]"):
        g.add("exp", x, types=[TensorType(F, (4, 1))])
    with pytest.raises(ShapeError, match=r"gives 1 results, not 2"):
        g.add("exp", x, types=[x.type, x.type])


def test_operands_of_another_graph_are_refused() -> None:
    x = Graph("one").add_input("x", TensorType(F, ()))
    with pytest.raises(VerifyError, match=r"exp: operand %x belongs to another graph \(one\)"):
        Graph("two").add("exp", x)


def test_append_value_brings_what_it_is_computed_from() -> None:
    """A chain deeper than Python's stack, of which one end is wanted; what the mapping has is not copied again."""
    inner = Graph("inner")
    x = inner.add_input("x", TensorType(DType.FLOAT32, (2,)))
    y = x
    for _ in range(3000):
        y = inner.add("neg", y)[0]
    inner.add("exp", y)
    outer = Graph("outer")
    given = outer.add_input("given", x.type)
    mapping = {x: given}
    outer.add_output(append_value(outer, y, mapping), "y")
    assert outer.operator_counts() == {"neg": 3000}
    assert append_value(outer, y, mapping) is mapping[y]
    np.testing.assert_array_equal(evaluate(outer, {"given": np.array([1, 2], np.float32)})["y"], [1, 2])
    with pytest.raises(VerifyError, match="read before it is made"):
        append_value(Graph("empty"), y, {})
