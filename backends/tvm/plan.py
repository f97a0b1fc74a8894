"""The plan of a graph: which kernels are called in which order, and where every value lies.

Views cost nothing; elementwise operators wait until something needs their result as a tensor and are computed there;
a matrix product waits for what is computed of its result element by element. Only values with one reader wait, so
nothing is computed twice but what reads no tensor at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ir import DType, Graph, Node, UnsupportedError, Value
from ...ir.dims import Dim, product, symbol, symbols
from .pieces import (
    LEAVES,
    POINTWISE,
    Piece,
    SpecBuilder,
    collapse,
    is_leaf,
    is_pointwise,
    map_views,
    product_of,
    views_of,
)
from .spec import Kernel, Literal
from .tuning import PARALLEL, MatmulTile, Tuning
from .views import Storage, View, contiguous

__all__ = ["Call", "Callback", "Machine", "Packed", "Plan", "Planner", "Waits", "matmul_key"]


@dataclass(frozen=True)
class Machine:
    """What kernels are shaped by: bytes of a vector register, and columns of a panel."""

    vector: int = 64
    vectors: int = 2

    def lanes(self, dtype: DType) -> int:
        bits = 32 if dtype.bits == 16 else max(dtype.bits, 8)
        return max(1, min(self.vector * 8 // bits, 16))

    @property
    def registers(self) -> int:
        """How many vector registers there are."""
        return 32 if self.vector == 64 else 16

    @property
    def product(self) -> MatmulTile:
        """The tile of a matrix product whose sums the registers hold."""
        return MatmulTile() if self.registers == 32 else MatmulTile(rows=4, vectors=3)

    def panel(self, dtype: DType, columns: Dim, vectors: int | None = None) -> int:
        """Columns of a panel of a matrix with so many columns."""
        lanes = self.lanes(dtype)
        if isinstance(columns, int) and columns <= lanes:
            return lanes
        return lanes * (vectors or self.vectors)


@dataclass(frozen=True)
class Call:
    """A kernel with what it is called on. It is skipped unless ``least <= size <= most``, where ``when`` is given.
    ``key`` is what its choice in ``Tuning`` goes by, where it has one."""

    kernel: Kernel
    storages: tuple[Storage, ...]
    sizes: tuple[Dim, ...]
    node: str
    when: tuple[Dim, int, int] | None = None
    key: str = ""


@dataclass(frozen=True, eq=False)
class Callback:
    """A node that NumPy computes: the operands and results as views."""

    node: Node
    operands: tuple[View | None, ...]
    results: tuple[View, ...]


@dataclass(frozen=True)
class Packed:
    """A constant matrix [k, n] in panels of ``width`` columns."""

    source: View
    width: int


@dataclass
class Plan:
    """Everything an executor needs."""

    steps: list[Call | Callback] = field(default_factory=list)
    buffers: dict[str, tuple[DType, Dim]] = field(default_factory=dict)
    packed: dict[str, Packed] = field(default_factory=dict)
    constants: dict[str, Value] = field(default_factory=dict)
    rooms: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of each state that is appended to: the name of the size that is its buffer's room, and the axis."""
    grown: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    """The shape of such a state after the run."""
    written: dict[str, View] = field(default_factory=dict)
    outputs: dict[str, View] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels by name, each once."""
        return {step.kernel.name: step.kernel for step in self.steps if isinstance(step, Call)}

    @property
    def callbacks(self) -> list[str]:
        """The operators that NumPy computes, one entry a node."""
        return [step.node.op.name for step in self.steps if isinstance(step, Callback)]


Waits = frozenset({"softmax", "layer_norm", "rms_norm", "state_append", "state_write", "concat", "cumsum", "cumprod"})
"""Operators besides the pointwise ones and reductions that compute an operand where they read it."""


SPREAD = frozenset({"map", "reduce", "cumulative", "pack", "rows"})
"""The kinds of kernels that are shared among threads only from ``Tuning.parallel`` elements on."""


def matmul_key(a: View, shape: Sequence[Dim]) -> str:
    """What the tile of a product of these shapes goes by: sizes that are no numbers are alike."""
    m, k, n = ("*" if not isinstance(d, int) else str(d) for d in (shape[-2], a.shape[-1], shape[-1]))
    return f"{a.dtype.value} [{m}, {k}] x [{k}, {n}]"


class Planner:
    """Plans one graph. The operators' rules are in ``rules``."""

    target = "tvm-cpu"
    others = "numpy or ort-cpu"
    """What to compile for instead of what the target lacks."""
    least_bits = 16
    """Products of narrower entries have no kernel."""
    most_chosen: int | None = 64
    """So many of the largest elements are kept in order as a row passes; more of them are found by sorting (NumPy)."""
    slides = True
    """Whether there is a kernel for windows that move along rows."""

    def __init__(
        self, graph: Graph, machine: Machine, rules: Mapping[str, Any], tuning: Tuning | None = None
    ) -> None:  # fmt: skip
        self.graph = graph
        self.machine = machine
        self.tuning = tuning or Tuning()
        self.rules = rules
        self.plan = Plan()
        self.pieces: dict[Value, Piece] = {}
        self._outputs: dict[Value, str] = {}
        for output in graph.outputs:
            self._outputs.setdefault(output.value, output.name)
        self._appended: dict[Value, Node] = {}
        for node in graph.nodes:
            if node.op.name == "state_append":
                self._appended.setdefault(node.operands[0], node)
        self._check_sizes()

    def _check_sizes(self) -> None:
        known = self.graph.size_names()
        for node in self.graph.nodes:
            for value in node.outputs:
                fresh = {name for d in value.shape for name in symbols(d)} - known
                if fresh:
                    raise UnsupportedError(
                        f"{self.target}: the size {', '.join(sorted(fresh))} of {value} is known only when {node!r} "
                        f"has run; compile for {self.others} instead"
                    )

    def run(self) -> Plan:
        for value in self.graph.inputs:
            self.pieces[value] = contiguous(Storage("input", value.name), value.dtype, value.shape)
        for node in self.graph.nodes:
            rule = self.rules.get(node.op.name)
            found = None if rule is None else rule(self, node)
            if found is None:
                found = self.callback(node)
            pieces = found if isinstance(found, list) else [found]
            for value, piece in zip(node.outputs, pieces, strict=True):
                self.keep(value, piece)
        for output in self.graph.outputs:
            wanted = Storage("output", output.name)
            view = self.view(output.value)
            if view.storage != wanted or not view.is_contiguous:
                target = contiguous(wanted, view.dtype, view.shape)
                self.emit_map([(target, view)], f"output {output.name}")
                view = target
            self.plan.outputs[output.name] = view
        return self.plan

    # -- pieces --------------------------------------------------------------------------------------------------

    def keep(self, value: Value, piece: Piece) -> None:
        """Notes a value, and computes it now unless its only reader can do so."""
        self.pieces[value] = piece
        if isinstance(piece, View | Literal) or (is_leaf(piece) and value not in self._outputs):
            return
        uses = value.uses
        waits = len(uses) == 1 and value not in self._outputs and _absorbs(uses[0].node, uses[0].position)
        if not waits:
            self.view(value)

    def piece(self, value: Value) -> Piece:
        """A value as it is: waiting or computed."""
        if value.constant is not None and value not in self.pieces:
            tensor = value.constant
            if tensor.size == 1 and not tensor.shape:
                return Literal(value.dtype.value, _text(tensor.array))
            self.plan.constants[tensor.digest] = value
            self.pieces[value] = contiguous(Storage("constant", tensor.digest), value.dtype, value.shape)
        return self.pieces[value]

    def view(self, value: Value) -> View:
        """A value as a tensor, computed now if it was waiting."""
        piece = self.piece(value)
        if isinstance(piece, View):
            return piece
        made = self.materialise(piece, value.shape, value.dtype, self.place(value), value.name)
        if value.constant is None:
            self.pieces[value] = made
        return made

    def place(self, value: Value) -> View:
        """A place for a value: the output's own where it is one, behind the rows of a cache where it is appended to
        one, else a buffer. Contiguous but in a cache, where the last axis is."""
        if value in self._outputs:
            return contiguous(Storage("output", self._outputs[value]), value.dtype, value.shape)
        node = self._appended.get(value)
        if node is not None and node.attr("axis") % value.type.rank < value.type.rank - 1:
            return self.appended(node)[1]
        return self.buffer(value.dtype, value.shape)

    def appended(self, node: Node) -> tuple[View, View]:
        """Of a state that is appended to: all its rows after the run, in a buffer with room to spare, and the new
        ones."""
        value, name = node.operands[0], node.attr("state")
        axis = node.attr("axis") % value.type.rank
        room = self.plan.rooms.setdefault(name, (f"attnc_room{len(self.plan.rooms)}", axis))[0]
        self.plan.grown[name] = node.output.shape
        full = [*node.output.shape]
        full[axis] = symbol(room)
        whole = contiguous(Storage("grown", name), value.dtype, full)
        new = whole.sliced([axis], [self.graph.states[name].type.shape[axis]], [value.shape[axis]], [1])
        return View(whole.storage, whole.dtype, node.output.shape, whole.strides), new

    def buffer(self, dtype: DType, shape: Sequence[Dim]) -> View:
        """A new buffer of the arena."""
        name = f"b{len(self.plan.buffers)}"
        self.plan.buffers[name] = (dtype, product(shape))
        return contiguous(Storage("buffer", name), dtype, shape)

    def materialise(self, piece: Piece, shape: tuple[Dim, ...], dtype: DType, out: View, node: str) -> View:
        """Computes a piece into ``out``."""
        if product_of(piece) is not None:
            self._emit_product(piece, out, node)
        else:
            self.emit_map([(out, piece)], node)
        return out

    def solid(self, view: View, node: str) -> View:
        """The view, or a contiguous copy of it."""
        if view.is_contiguous:
            return view
        copy = self.buffer(view.dtype, view.shape)
        self.emit_map([(copy, view)], node)
        return copy

    # -- kernels -------------------------------------------------------------------------------------------------

    def emit(
        self, b: SpecBuilder, kind: str, outs: Any, trees: Any, options: Any, node: str, when: Any = None, key: str = ""
    ) -> None:  # fmt: skip
        if kind in SPREAD and self.tuning.parallel != PARALLEL:
            options = (*options, ("parallel", self.tuning.parallel))
        kernel = b.kernel(kind, outs, trees, options)
        self.plan.steps.append(Call(kernel, tuple(b.storages), tuple(b.sizes), node, when, key))

    def emit_map(self, parts: Sequence[tuple[View, Piece]], node: str) -> None:
        """One kernel that computes each piece into its view."""
        b = SpecBuilder()
        outs, trees = [], []
        for out, piece in parts:
            out, piece = _collapsed(out, piece)
            outs.append(b.read(out))
            trees.append(b.tree(piece))
        self.emit(b, "map", outs, trees, (), node)

    def _emit_product(self, piece: Piece, out: View, node: str) -> None:
        found = product_of(piece)
        assert found is not None
        a, right = found.a, found.b
        *lead, m, n = found.shape
        wide = [v.expanded(found.shape) for v in views_of(piece)]
        lists = [v.strides[:-1] for v in (out, a, *wide)] + [(*right.strides[:-3], 0)]
        groups = collapse((*lead, m), lists)
        # The last axis is the one of rows; the panels differ along the others.
        rows = groups[-1] if groups and all(right.strides[x] == 0 for x in groups[-1] if x < len(lead)) else []
        if groups and not rows:
            groups.append([])
        groups = groups or [[]]

        def part(view: View, keep: int) -> View:
            head = len(view.shape) - keep
            shape = tuple(product([view.shape[x] for x in g]) for g in groups)
            strides = tuple(view.strides[g[-1]] if g else 0 for g in groups)
            return replace(view, shape=(*shape, *view.shape[head:]), strides=(*strides, *view.strides[head:]))

        lead_shape = tuple(product([(*lead, m)[x] for x in g]) for g in groups)
        outer = groups[:-1]
        packed = replace(
            right,
            shape=(*lead_shape[:-1], *right.shape[-3:]),
            strides=(*(right.strides[g[-1]] for g in outer), *right.strides[-3:]),
        )
        tail = map_views(piece, lambda v: part(v.expanded(found.shape), 1), (*lead_shape, n))
        self.multiply(part(out, 1), part(a, 1), packed, tail, node, matmul_key(a, found.shape))

    def right_side(self, b: View, node: str, key: str = "") -> View:
        """The right side [lead…, k, n] of a product as kernels read it: in panels [lead…, panels, k, w]."""
        from .rules import pack

        return pack(self, b, node, vectors=self.tuning.of(key, self.machine.product).vectors)

    def multiply(self, out: View, a: View, right: View, tail: Piece, node: str, key: str) -> None:
        """Writes ``tail``, which holds the product of a [outer…, m, k] and right [outer…, panels, k, w], into out
        [outer…, m, n]."""
        b = SpecBuilder()
        target = b.read(out)
        trees = [b.read(a), b.read(right), b.tree(tail)]
        tile = self.tuning.of(key, self.machine.product)
        options = [("lanes", self.machine.lanes(a.dtype)), ("rows", tile.rows), ("near", tile.near)]
        self.emit(b, "matmul", [target], trees, options, node, key=key)

    def callback(self, node: Node) -> list[Piece]:
        """The node as NumPy computes it."""
        operands = tuple(None if v is None else self.view(v) for v in node.inputs)
        results = tuple(self.place(v) for v in node.outputs)
        self.plan.steps.append(Callback(node, operands, results))
        return list(results)


def _absorbs(node: Node, position: int) -> bool:
    name = node.op.name
    if name in POINTWISE or name in LEAVES:
        return True
    return (position == 0 and (name in Waits or name.startswith("reduce_"))) or name == "concat"


def _collapsed(out: View, piece: Piece) -> tuple[View, Piece]:
    """A pointwise map on as few axes as its strides allow."""
    if not is_pointwise(piece, out.shape):
        return out, piece
    wide = [v.expanded(out.shape) for v in views_of(piece)]
    groups = collapse(out.shape, [v.strides for v in (out, *wide)])
    shape = tuple(product([out.shape[x] for x in g]) for g in groups)

    def change(view: View) -> View:
        view = view.expanded(out.shape)
        return replace(view, shape=shape, strides=tuple(view.strides[g[-1]] for g in groups))

    return change(out), map_views(piece, change, shape)


def _text(array: Any) -> str:
    value = array.reshape(()).item() if array.dtype.name != "bfloat16" else float(array.reshape(()))
    return repr(value)
