"""Experts that compute the rows selected for them, one after the other, as one grouped layer.

Exports of the loop over experts find for each expert e the tokens that use it (``nonzero`` of "the s-th choice of token
t is e"), gather their rows, run the expert's layer on them, and add the results back to the tokens' rows. How many rows
there are depends on data, so that nothing is known about them along time. But what is added to token t is
sum_s layer_{choice[t, s]}(row t, share of (t, s)): with the choices as the groups of ``grouped_matmul`` the same is
computed for all (t, s), each from token t alone.

This holds, and is only done, where

- the selections are the entries of one ``top_k`` that are 0, 1, …, n - 1, all n of them, each once;
- the experts are the same operators with matrices and vectors of their own;
- every operator between works row by row along the selected rows (``Operator.locality``), and what it reads of others
  is read at the row's token and choice (index expressions);
- the results are summed, and nothing else reads them on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir import Array, Dim, Graph, Node, Tensor, Value
from ..ir.affine import Domain
from ..ir.attributes import substitute_attr
from ..ir.dims import product, symbol_and_offset, symbols
from ..ir.elements import IndexAnalysis
from ..ir.expr import Call, Const, Expr, Load, Var, call, rebuild, substitute, walk
from ..ir.simplify import Simplifier
from .base import Refusal
from .patterns import made_by, reshaped, swap

__all__ = ["fuse_selected"]

WHAT = "grouped experts"
TOKEN, CHOICE = Var("x0"), Var("x1")
"""The place of a selected row: its token, and which of the token's choices it is."""


class _NoMatch(Exception):
    """Why selections do not become a grouped layer."""


@dataclass(frozen=True, eq=False)
class _Selection:
    """The rows that one expert gets, and where its results are added."""

    scatter: Node
    found: Node
    """``nonzero``"""
    tokens: int
    """Which axis of the selection is that of tokens; the other is that of choices."""
    choices: Value
    expert: int


def fuse_selected(graph: Graph) -> tuple[int, list[Refusal]]:
    """Rewrites ``graph`` in place: how many layers were found, and why not where rows are selected by ``top_k`` and
    scattered."""
    analysis = IndexAnalysis(graph)
    layers: dict[tuple[Value, Value], list[_Selection]] = {}
    for node in graph.nodes:
        selection = _selection(node, analysis)
        if selection is not None:
            layers.setdefault((selection.choices, _sum(node)), []).append(selection)
    refusals = []
    count = 0
    for selections in layers.values():
        first = min(selections, key=lambda s: s.expert)
        try:
            _Layer(graph, selections, analysis).replace()
            count += 1
        except _NoMatch as reason:
            refusals.append(Refusal.at(first.scatter, WHAT, str(reason)))
    graph.remove_unused()
    return count, refusals


# -- which rows an expert gets -----------------------------------------------------------------------------------------


def _selection(node: Node, analysis: IndexAnalysis) -> _Selection | None:
    """What a scatter adds back, where its rows come from ``nonzero`` of the choices of ``top_k``."""
    if node.op.name not in ("scatter_nd", "scatter_elements") or node.attr("reduction") not in ("none", "add"):
        return None
    index = node.operands[1]
    whole_rows = index.shape[-1:] == (1,) if node.op.name == "scatter_nd" else node.attr("axis") == 0
    if index.type.rank != 2 or not whole_rows:
        return None
    place = analysis.element(index)
    if not isinstance(place, Load) or len(place.index) != 2 or place.index[1] != TOKEN:
        return None
    found, axis = analysis.tensor(place.tensor).producer, place.index[0]
    if found is None or found.op.name != "nonzero" or not isinstance(axis, Const):
        return None
    tokens = int(axis.value)
    choices = _choices(found.operands[0], tokens, analysis)
    return None if choices is None else _Selection(node, found, tokens, *choices)


def _choices(selected: Value, tokens: int, analysis: IndexAnalysis) -> tuple[Value, int] | None:
    """The choices [token, choice] and the expert, where ``selected`` says which of the choices are the expert."""
    if selected.type.rank != 2:
        return None
    names = {"x0": CHOICE, "x1": TOKEN} if tokens else {"x0": TOKEN, "x1": CHOICE}
    e = substitute(analysis.element(selected), names)
    read = {part for part in walk(e) if isinstance(part, Load)}
    if len(read) != 1:
        return None
    entry = read.pop()
    value = analysis.tensor(entry.tensor)
    node = value.producer
    if entry.index != (TOKEN, CHOICE) or node is None or node.op.name != "top_k" or value is not node.outputs[1]:
        return None
    size = node.operands[0].shape[node.attr("axis")]
    if node.attr("axis") % 2 != 1 or not isinstance(size, int):
        return None
    choice = Var("x2")
    simplify = Simplifier(Domain({"x2": size}), analysis.dtype_of)
    e = _at_load(e, choice)
    e = simplify(e if simplify.is_bool(e) else call("not_equal", e, 0))
    match e:
        case Call("equal", (Const(expert), other) | (other, Const(expert))) if other == choice:
            return value, int(expert)
    return None


def _at_load(e: Expr, variable: Var) -> Expr:
    """The expression with its loads replaced."""
    return variable if isinstance(e, Load) else rebuild(e, lambda x: _at_load(x, variable))


def _sum(node: Node) -> Value:
    """Where the result of a scatter ends when nothing else reads it on the way: sums and other scatters into it."""
    value = node.output
    while len(value.uses) == 1 and not value.is_output:
        use = value.uses[0]
        into = use.node.op.name.startswith("scatter") and use.position == 0 and use.node.attr("reduction") == "add"
        if not (use.node.op.name == "add" or into) or use.node.output.shape != value.shape:
            break
        value = use.node.output
    return value


# -- the layer of all experts ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Layer:
    graph: Graph
    selections: list[_Selection]
    analysis: IndexAnalysis
    made: dict[Value, Value] = field(default_factory=dict)

    def replace(self) -> None:
        """Puts the grouped layer in the place of the last scatter; the others add nothing. Raises _NoMatch."""
        last = self.selections[-1].scatter  # they come in the order of the graph
        self.selections.sort(key=lambda s: s.expert)
        first = self.selections[0]
        size = first.choices.producer.operands[0].shape[1] if first.choices.producer else 0
        if [s.expert for s in self.selections] != list(range(int(str(size)))):
            raise _NoMatch(f"of {size} experts only {len({s.expert for s in self.selections})} are there")
        for s in self.selections:
            into = s.scatter.operands[0]
            if into.shape[0] != first.choices.shape[0] or s.scatter.operands[2].shape[1:] != into.shape[1:]:
                raise _NoMatch(f"{s.scatter!r} does not add whole rows of tokens")
            if s.scatter.attr("reduction") == "none" and not _is_zero(into):
                raise _NoMatch(f"{s.scatter!r} overwrites rows")
        self.source = first.scatter.source
        self.tokens, self.used = first.choices.shape
        with self.graph.insert_before(last):
            self.group = self.reshape(first.choices, (self.rows,))
            y = self.grid([s.scatter.operands[2] for s in self.selections])
            y = self.reshape(y, (self.tokens, self.used, *y.shape[1:]))
            y = self.add("reduce_sum", y, axes=(1,))
            into = last.operands[0]
            y = y if _is_zero(into) else self.add("add", into, y)
        swap(self.graph, last.output, y)
        for s in self.selections:
            if s.scatter is not last:
                self.graph.replace_uses(s.scatter.output, s.scatter.operands[0])

    @property
    def rows(self) -> Dim:
        return product((self.tokens, self.used))

    def add(self, op: str, *inputs: Value, **attrs: object) -> Value:
        return self.graph.add(op, *inputs, attrs=attrs, source=self.source)[0]

    def reshape(self, value: Value, shape: tuple[Dim, ...]) -> Value:
        return reshaped(self.graph, value, shape, self.source)

    def depends(self, value: Value, selection: _Selection) -> bool:
        """Whether the size of a value is the number of selected rows."""
        return any(not symbols(d).isdisjoint(self.names(selection)) for d in value.shape)

    @staticmethod
    def names(selection: _Selection) -> frozenset[str]:
        return frozenset(symbols(selection.found.attr("count")))

    def row_axis(self, value: Value, selection: _Selection) -> int:
        """The axis of selected rows."""
        count = selection.found.attr("count")
        axes = [k for k, d in enumerate(value.shape) if d == count]
        others = [d for d in value.shape if d != count and not symbols(d).isdisjoint(self.names(selection))]
        if len(axes) != 1 or others:
            raise _NoMatch(f"{value} is not row by row")
        return axes[0]

    def grid(self, values: Sequence[Value]) -> Value:
        """The values of all experts as one, of every token and choice in the place of the selected rows."""
        value = values[0]
        if value in self.made:
            return self.made[value]
        nodes = [v.producer for v in values]
        node = nodes[0]
        if node is None or any(n is None for n in nodes):
            raise _NoMatch(f"{value} is given from outside")
        self.check_alike([n for n in nodes if n is not None])
        if node.op.name in ("gather", "gather_nd") and not self.depends(node.operands[0], self.selections[0]):
            made = self.looked_up([n for n in nodes if n is not None])
        else:
            made = self.computed([n for n in nodes if n is not None])
        self.made[value] = made
        return made

    def check_alike(self, nodes: Sequence[Node]) -> None:
        first, attrs = nodes[0], self.attrs(nodes[0], self.selections[0])
        for node, selection in zip(nodes, self.selections, strict=True):
            if node.op is not first.op or len(node.outputs) != 1 or node.regions:
                raise _NoMatch(f"{node!r} is not as the other experts have it, {first!r}")
            if len(node.inputs) != len(first.inputs) or self.attrs(node, selection) != attrs:
                raise _NoMatch(f"{node!r} is not as the other experts have it, {first!r}")

    def attrs(self, node: Node, selection: _Selection) -> dict[str, object]:
        """The attributes, with all tokens and choices in the place of the selected rows."""
        count = selection.found.attr("count")
        name, known = _symbol_of(count)
        sizes = {name: self.rows + known}
        return {key: substitute_attr(held, sizes) for key, held in node.attrs.items()}

    def computed(self, nodes: Sequence[Node]) -> Value:
        """A node that works row by row."""
        node, selection = nodes[0], self.selections[0]
        axis = self.row_axis(node.output, selection)
        self.check_rows(node, axis)
        operands: list[Value] = []
        own: list[tuple[int, list[Value]]] = []
        for position in range(len(node.inputs)):
            column = [n.operands[position] for n in nodes]
            if self.depends(column[0], selection):
                operands.append(self.grid(column))
            elif all(_same(v, column[0]) for v in column):
                operands.append(column[0])
            else:
                own.append((position, column))
                operands.append(column[0])
        if not any(self.depends(v, selection) for v in node.operands) and node.op.name != "expand":
            raise _NoMatch(f"{node!r} counts the selected rows")
        if not own:
            attrs = self.attrs(node, selection)
            return self.graph.add(node.op, *operands, attrs=attrs, source=node.source)[0]
        if len(own) > 1:
            raise _NoMatch(f"{node!r} reads several weights of its own")
        position, column = own[0]
        weights = self.stacked(column, node)
        if node.op.name == "matmul" and position == 1 and column[0].type.rank == 2:
            x = operands[0]
            if product(x.shape[:-1]) != self.rows:
                raise _NoMatch(f"{node!r} has more rows than were selected")
            y = self.add("grouped_matmul", self.reshape(x, (self.rows, x.shape[-1])), weights, self.group)
            return self.reshape(y, (*x.shape[:-1], y.shape[-1]))
        if node.op.name in ("add", "sub", "mul", "div") and column[0].type.rank == 1:
            if axis != node.output.type.rank - 2:
                raise _NoMatch(f"{node!r} has its rows in an unusual place")
            operands[position] = self.add("gather", weights, self.group, axis=0)
            return self.graph.add(node.op, *operands, source=node.source)[0]
        raise _NoMatch(f"{node!r} has weights of its own")

    def check_rows(self, node: Node, axis: int) -> None:
        """Raises where a node does not work row by row."""
        selection = self.selections[0]
        if node.op.name == "reshape":
            before = node.operands[0]
            start = self.row_axis(before, selection)
            if product(before.shape[:start]) != product(node.output.shape[:axis]):
                raise _NoMatch(f"{node!r} takes the selected rows apart")
            return
        locality = node.op.locality(node)
        for position, value in enumerate(node.inputs):
            if value is None or not self.depends(value, selection):
                continue
            if locality is None or locality[position][self.row_axis(value, selection)] != axis:
                raise _NoMatch(f"{node!r} brings selected rows together")

    def stacked(self, column: Sequence[Value], node: Node) -> Value:
        arrays: list[Array] = []
        for value in column:
            held = value.constant
            if held is None or held.is_missing or value.type != column[0].type:
                raise _NoMatch(f"{node!r} has no weights of one shape for each expert")
            arrays.append(held.array)
        return self.graph.add_constant(Tensor(np.stack(arrays), column[0].dtype), f"{column[0].name}.experts")

    # -- what is read at the token and the choice ------------------------------------------------------------------

    def looked_up(self, nodes: Sequence[Node]) -> Value:
        """Rows of a table that all experts read, for every token and choice."""
        places = []
        for node, selection in zip(nodes, self.selections, strict=True):
            if node.operands[0] is not nodes[0].operands[0]:
                raise _NoMatch(f"{node!r} reads another table than {nodes[0]!r}")
            places.append(self.places(node, selection))
        if any(p != places[0] for p in places):
            raise _NoMatch(f"{nodes[0]!r} is not read at the same place by all experts")
        node, x, place = nodes[0], nodes[0].operands[0], places[0]
        axis = node.attr("axis") % x.type.rank if node.op.name == "gather" else 0
        lead, rest = x.shape[:axis], x.shape[axis + len(place) :]
        if place == [TOKEN] and x.shape[axis] == self.tokens:
            y = self.reshape(x, (*lead, self.tokens, 1, *rest))
            y = self.add("expand", y, shape=(*lead, self.tokens, self.used, *rest))
        elif (place == [TOKEN, CHOICE] and x.shape[axis : axis + 2] == (self.tokens, self.used)) or (
            place == [self.flat()] and x.shape[axis] == self.rows
        ):
            y = x
        else:
            raise _NoMatch(f"{node!r} is read at {', '.join(map(str, place))}")
        return self.reshape(y, (*lead, self.rows, *rest))

    def flat(self) -> Expr:
        return self.simplify(call("add", CHOICE, call("mul", TOKEN, self.analysis.dim(self.used))))

    @property
    def simplify(self) -> Simplifier:
        return Simplifier(Domain({"x0": self.tokens, "x1": self.used}), self.analysis.dtype_of)

    def places(self, node: Node, selection: _Selection) -> list[Expr]:
        """Where a look-up reads, as expressions of the token and the choice."""
        index = node.operands[1]
        row = self.row_axis(index, selection)
        e = self.analysis.element(index)
        found = []
        for k in range(int(str(index.shape[-1])) if node.op.name == "gather_nd" else 1):
            part = e
            if node.op.name == "gather_nd":
                if index.type.rank != 2 or node.attr("batch_dims"):
                    raise _NoMatch(f"{node!r} is not read row by row")
                part = substitute(e, {"x1": Const(k)})
            elif any(d != 1 for axis, d in enumerate(index.shape) if axis != row):
                raise _NoMatch(f"{node!r} is not read row by row")
            found.append(self.simplify(self.at_row(part, selection, Var(f"x{row}"), node)))
        return found

    def at_row(self, e: Expr, selection: _Selection, row: Var, node: Node) -> Expr:
        if isinstance(e, Load) and self.analysis.tensor(e.tensor) is selection.found.output:
            axis, place = e.index
            if isinstance(axis, Const) and place == row:
                return TOKEN if int(axis.value) == selection.tokens else CHOICE
        if isinstance(e, Load) or e == row:
            raise _NoMatch(f"{node!r} is read at {e}")
        return rebuild(e, lambda x: self.at_row(x, selection, row, node))


def _symbol_of(count: Dim) -> tuple[str, int]:
    """The name in a size that data tells, which is a symbol less 1, and the 1."""
    assert not isinstance(count, int)
    name, offset = symbol_and_offset(count)
    return name, -offset


def _same(a: Value, b: Value) -> bool:
    if a is b:
        return True
    x, y = a.constant, b.constant
    return x is not None and y is not None and a.type == b.type and x.size <= 1024 and x.digest == y.digest


def _is_zero(value: Value) -> bool:
    node = made_by(value, "expand")
    held = (node.operands[0] if node is not None else value).constant
    return held is not None and not held.is_missing and held.size <= 1 and not held.array.any()
