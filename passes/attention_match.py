"""The search for one attention around a softmax."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import Builder, Expr, Graph, Node, Value
from ..ir.affine import dim_expr
from ..ir.dims import product
from ..ir.elements import IndexAnalysis
from ..ir.expr import Const, Load, Var, call, loads, substitute, walk
from .attention_parts import Operand, Parts, RefusedError, rearranged
from .layout import Atom, Axes, LayoutError, atoms_of, axes_of, backward, forward, parse_axis, scalar
from .scores import Score, ScoreError, score_of
from .softmax import Softmax

__all__ = ["BranchingError", "Match"]


@dataclass(eq=False)
class _Weights:
    """A value that holds the weights: its axes, whether NaN has been replaced by 0 on the way."""

    value: Value
    axes: Axes
    guarded: bool
    path: tuple[Node, ...] = ()
    """The nodes from the softmax, which is the first, to here."""

    def then(self, value: Value, axes: Axes, guarded: bool | None = None) -> _Weights:
        """The weights behind the node that makes ``value``."""
        assert value.producer is not None
        return _Weights(value, axes, self.guarded if guarded is None else guarded, (*self.path, value.producer))


class BranchingError(Exception):
    """Says that several products read the same weights: ``branches`` behind the nodes of ``path``."""

    def __init__(self, path: tuple[Node, ...], branches: list[Node]) -> None:
        super().__init__()
        self.path = path
        self.branches = branches


@dataclass(eq=False)
class Match:
    """The search for one attention, and its making."""

    graph: Graph
    softmax: Softmax
    analysis: IndexAnalysis
    kept: list[_Weights] = field(default_factory=list)
    """The weights that others than the contraction read."""
    _sink_axis: int | None = None
    """The axis of the keys when a sink lies behind them …"""
    _sink_first: bool = False
    """… or before them."""

    def fuse(self) -> None:
        """Replaces the attention around the softmax. Raises RefusedError and LayoutError."""
        shape, axis = self.softmax.output.type.shape, self.softmax.axis
        self.axes = axes_of(shape, "x")
        self.variables = {f"x{k}": atoms for k, atoms in enumerate(self.axes)}
        self.key_axis = axis
        weights, contraction, position = self._contraction()
        self.keys = tuple(atoms_of([self.axes[axis]]))
        self._values(weights, contraction, position)
        element = self.analysis.element(self.softmax.input)
        if self.softmax.factor != 1.0:
            element = element * self.softmax.factor
        # Beside a sink, the scores of the keys themselves.
        shape = tuple(product([a.size for a in atoms_of([axis])]) for axis in self.axes)
        seen = element
        if self._sink_first:
            seen = substitute(element, {f"x{self._sink_axis}": Var(f"x{self._sink_axis}") + 1})
        if self._sink_axis is not None:
            seen = self.analysis.simplifier(shape)(seen)
        load, node = self._product(seen)
        parts = self._parts(load, node)
        score = self._score(seen, load, node, parts, self._sink(element), weights.guarded)
        self._emit(weights, contraction, parts, score)

    def _sink(self, element: Expr) -> Expr | None:
        """The score of the sink over x0, x1, …: the last of ``element`` along the keys, or what is in the sum only."""
        beside = self.softmax.sink
        if self._sink_axis is None:
            if not isinstance(beside, Value):
                return None if beside is None else Const(beside)
            skipped = len(self.axes) - beside.type.rank
            moved: dict[str, Expr] = {f"x{k}": Var(f"x{k + skipped}") for k in range(beside.type.rank)}
            score = substitute(self.analysis.element(beside), moved)
            return call("log", score) if self.softmax.logged else score
        if beside is not None:
            raise RefusedError("it has a sink beside its scores and one in its sum")
        place = Const(0) if self._sink_first else dim_expr(product([a.size for a in self.keys]))
        return substitute(element, {f"x{self._sink_axis}": place})

    # -- from the weights to the values --------------------------------------------------------------------------

    def _contraction(self) -> tuple[_Weights, Node, int]:
        """The weights where they meet the values, and the operand that they are there."""
        at = _Weights(self.softmax.output, self.axes, self.softmax.guarded, (self.softmax.node,))
        while True:
            users = list(at.value.users)
            following = [(node, self._next(node, at)) for node in users]
            steps = [(node, step) for node, step in following if step is not None]
            products = [node for node in users if node.op.name == "matmul"]
            guards = {node for node, _ in steps if node.op.name == "where"}
            asks = [node for node in users if node.op.name == "is_nan"]
            harmless = {node for node in asks if all(u in guards for u in node.output.users)}
            rest = [n for n in users if n not in harmless and n not in products and n not in {s for s, _ in steps}]
            if len(products) == 1 and not steps:
                (node,) = products
                places = [use.position for use in at.value.uses if use.node is node]
                if len(places) == 1 and self._meets_keys(at, node, places[0]):
                    if rest or at.value.is_output:
                        self.kept.append(at)
                    return at, node, places[0]
                if len(places) == 1:
                    raise RefusedError("its weights are summed over another axis than the one they share out", node)
            if len(steps) == 1 and not products:
                if rest or at.value.is_output:
                    self.kept.append(at)
                at = steps[0][1]
                continue
            if not steps and not products:
                names = list(dict.fromkeys(node.op.name for node in rest))
                what = ", ".join(names + ["an output of the model"] * at.value.is_output) or "nothing"
                raise RefusedError(f"its weights do not meet values in a contraction: they go to {what}")
            branches = [node for node in users if node in products or node in {s for s, _ in steps}]
            if len(branches) > 1:
                raise BranchingError(at.path, branches)
            raise RefusedError(
                "its weights are read in several places: " + ", ".join(node.op.name for node in users), users[-1]
            )

    def _next(self, node: Node, at: _Weights) -> _Weights | None:
        """The weights behind a node that moves, converts or guards them."""
        if node.op.name == "cast" and node.output.type.dtype.is_float:
            return at.then(node.output, at.axes)
        if node.op.name == "where" and len(node.operands) == 3:
            condition, first, second = node.operands
            asks = condition.producer
            if (
                asks is not None
                and asks.op.name == "is_nan"
                and asks.operands[0] is at.value
                and second is at.value
                and scalar(first) == 0.0
            ):
                return at.then(node.output, at.axes, True)
            return None
        if node.op.name == "slice" and self._drops_sink(node, at):
            return at.then(node.output, self.axes)
        axes = forward(node, at.axes)
        return None if axes is None else at.then(node.output, axes)

    def _drops_sink(self, node: Node, at: _Weights) -> bool:
        """Whether a slice takes all keys but the last, or the first, which then is a sink."""
        whole = at.value.type.shape[self.key_axis]
        if at.axes is not self.axes or self._sink_axis is not None or node.attr("axes") != (self.key_axis,):
            return False
        (start,), (size,) = node.attr("starts"), node.attr("sizes")
        if node.attr("steps") is not None or size != whole - 1 or start not in (0, 1):
            return False
        self._sink_axis, self._sink_first = self.key_axis, start == 1
        self.axes = axes_of(node.output.type.shape, "x")
        self.variables = {f"x{k}": atoms for k, atoms in enumerate(self.axes)}
        return True

    def _meets_keys(self, at: _Weights, node: Node, position: int) -> bool:
        """Whether a product sums over the keys and no other axis of the weights."""
        if len(at.axes) < 2 or any(v.type.rank < 2 for v in node.operands):
            return False
        summed = at.axes[-1] if position == 0 else at.axes[-2]
        return atoms_of([summed]) == atoms_of([self.axes[self.key_axis]])

    def _values(self, weights: _Weights, node: Node, position: int) -> None:
        """The values and the result of the contraction, as atoms."""
        other = node.operands[1 - position]
        rank = node.output.type.rank
        lead: Axes = [()] * (rank - weights.value.type.rank) + weights.axes[:-2]
        own = other.type.shape
        lead_v: Axes = []
        for k, d in enumerate(own[:-2]):
            axis = lead[rank - len(own) + k]
            if d != 1 and not axis:
                raise RefusedError("the values have an axis that the weights lack", node)
            lead_v.append(() if d == 1 else axis)
        width = own[-1] if position == 0 else own[-2]
        own_width: tuple[Atom, ...] = () if width == 1 else (Atom(width, "c"),)
        queries = weights.axes[-2] if position == 0 else weights.axes[-1]
        v, v_axes, _ = backward(
            other, [*lead_v, self.keys, own_width] if position == 0 else [*lead_v, own_width, self.keys]
        )
        self.v = Operand(v, v_axes, own_width)
        self.out_axes: Axes = [*lead, queries, own_width] if position == 0 else [*lead, own_width, queries]

    # -- from the scores to queries and keys ---------------------------------------------------------------------

    def _product(self, element: Expr) -> tuple[Load, Node]:
        """The load of the contraction of queries and keys in the expression of the scores."""
        found: dict[Load, Node] = {}
        for part in walk(element):
            if not isinstance(part, Load):
                continue
            node = self.analysis.tensor(part.tensor).producer
            if node is not None and node.op.name == "matmul" and self._is_product(part, node):
                found.setdefault(part, node)
        if not found:
            names = sorted({self._producer(name) for name in loads(element)})
            raise RefusedError(
                "no product of queries and keys is found in its scores, which read " + (", ".join(names) or "nothing")
            )
        return next(iter(found.items()))

    def _producer(self, name: str) -> str:
        value = self.analysis.tensor(name)
        node = value.producer
        return f"{node.op.name} at {node.source}" if node is not None and node.source else str(value)

    def _is_product(self, load: Load, node: Node) -> bool:
        if any(v.type.rank < 2 for v in node.operands):
            return False
        try:
            axes = self._place(load)
        except LayoutError:
            return False
        rows, columns = atoms_of([axes[-2]]), atoms_of([axes[-1]])
        keys = list(atoms_of([self.keys]))
        return (columns == keys and not set(rows) & set(keys)) or (rows == keys and not set(columns) & set(keys))

    def _place(self, load: Load) -> Axes:
        axes = [parse_axis(part, self.variables) for part in load.index]
        flat = atoms_of(axes)
        if len({id(a) for a in flat}) != len(flat):
            raise LayoutError
        shape = self.analysis.tensor(load.tensor).type.shape
        if any(product([a.size for a in atoms_of([axis])]) != d for axis, d in zip(axes, shape, strict=True)):
            raise LayoutError  # a part of it only
        return axes

    def _parts(self, load: Load, node: Node) -> Parts:
        axes = self._place(load)
        first, second = node.operands
        rank = len(axes)

        def lead(value: Value) -> Axes:
            shape = value.type.shape[:-2]
            return [() if d == 1 else axes[rank - 2 - len(shape) + k] for k, d in enumerate(shape)]

        depth = first.type.shape[-1]
        own: tuple[Atom, ...] = () if depth == 1 else (Atom(depth, "d"),)
        left: Axes = [*lead(first), axes[-2], own]
        right: Axes = [*lead(second), own, axes[-1]]
        swapped = atoms_of([axes[-1]]) != atoms_of([self.keys])
        (q, q_axes), (k, k_axes) = ((second, right), (first, left)) if swapped else ((first, left), (second, right))
        queries = atoms_of([axes[-1] if swapped else axes[-2]])
        q, q_axes, by_q = backward(q, q_axes, constants=True)
        k, k_axes, by_k = backward(k, k_axes, constants=True)
        if k.constant is not None and self.v.value.constant is not None:
            raise RefusedError("its keys and values are constants", node)
        if q.constant is not None and not queries:
            raise RefusedError("it pools by one constant query, without an axis of queries", node)
        keys, queries = atoms_of([self.keys]), atoms_of([tuple(queries)])
        rest = [a for a in atoms_of(self.axes) if a not in keys and a not in queries]
        return Parts.of(Operand(q, q_axes, own), Operand(k, k_axes, own), self.v, by_q * by_k, rest, queries, keys)

    def _score(self, seen: Expr, load: Load, node: Node, parts: Parts, sink: Expr | None, guarded: bool) -> Score:
        dtype = self.softmax.output.dtype
        made_of = _behind(node, self.softmax.node)
        try:
            return score_of(
                self.analysis, seen, load, self.variables, parts.groups, dtype, sink, guarded, made_of
            )  # fmt: skip
        except ScoreError as error:
            raise RefusedError(str(error)) from None

    # -- the new node --------------------------------------------------------------------------------------------

    def _emit(self, weights: _Weights, contraction: Node, parts: Parts, score: Score) -> None:
        graph = self.graph
        loads = [self.analysis.tensor(name) for name in score.loads]
        empty = "zeros" if weights.guarded and score.empty == "nan" else score.empty
        if score.empty == "nan" and any(w.guarded != weights.guarded for w in self.kept):
            raise RefusedError("its weights are read before and behind a guard against NaN")
        q, k, v = parts.q.value, parts.k.value, parts.v.value
        if not q.dtype.is_float or k.dtype is not q.dtype or v.dtype is not contraction.output.dtype:
            raise RefusedError(f"its operands are {q.dtype}, {k.dtype} and {v.dtype}", contraction)
        with graph.insert_before(self._spot(contraction, [q, k, v, *loads])):
            b = Builder(graph, self.softmax.node.source)
            results = parts.make(b, loads, score, empty, bool(self.kept))
            out = rearranged(b, results[0], parts.out_axes(), self.out_axes, contraction.output)
            kept = [rearranged(b, results[1], parts.weight_axes(), w.axes, w.value) for w in self.kept]
        graph.replace_uses(contraction.output, out)
        for old, new in zip(self.kept, kept, strict=True):
            for use in old.value.uses:
                if use.node is not contraction and not self._is_chain(use.node):
                    graph.set_input(use.node, use.position, new)
            for output in graph.outputs:
                if output.value is old.value:
                    output.value = new

    def _spot(self, contraction: Node, needed: list[Value]) -> Node:
        """Where the new node goes: before the contraction, or before the first other reader of the weights."""
        if not self.kept:
            return contraction
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        readers = [node for w in self.kept for node in w.value.users]
        spot = min([contraction, *readers], key=lambda n: order[n])
        if any(v.producer is not None and order[v.producer] >= order[spot] for v in needed):
            raise RefusedError("its weights are read before its values are known", spot)
        return spot

    def _is_chain(self, node: Node) -> bool:
        """Whether a reader of the weights is on the way to the contraction, which is dead now."""
        return all(not v.uses and not v.is_output for v in node.outputs) or (
            bool(node.outputs) and all(self._is_chain(u) for v in node.outputs for u in v.users)
        )


def _behind(node: Node, end: Node, limit: int = 500) -> set[Node]:
    """The nodes that read ``node`` directly or by others, as far as ``end``."""
    found: set[Node] = set()
    stack = [node]
    while stack and len(found) < limit:
        for user in (u for v in stack.pop().outputs for u in v.users):
            if user not in found and user is not end:
                found.add(user)
                stack.append(user)
    return found
