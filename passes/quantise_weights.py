"""Weights stored in fewer bits than they are computed in.

``int8`` and ``int4``: every product x @ W with a stored matrix W [k, n] becomes a ``quantised_matmul``; W is rounded in
blocks along k with zero points. In 4 bits the blocks have 32 entries: with normally distributed weights the error is
7.8 % of the weights' root mean square, without zero points 8.3 %, in blocks of 64 8.7 %, and ONNX Runtime's kernel
takes the same time. In 8 bits they have 64: 0.53 % instead of 0.47 %, about what rounding x to 8 bits adds anyway, and
a large product takes three quarters of the time. The matrix of the last product, whose errors nothing averages, and
large tables of embeddings have 8 bits in ``int4`` too; rows of tables are computed when they are gathered, so that one
that is also the head is stored once. ``mixed`` has 8 bits as well for the values of attentions and where a product
is added to what runs through the layers. Norms, biases and convolutions stay as they are. ``stored`` changes nothing,
and says what is in few bits.

``float16`` and ``bfloat16``: the matrices of products and convolutions and the tables that rows are gathered from are
stored in that type and cast to the type of the model where they are used; rows are cast when they have been gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..ir import Array, Builder, DType, Graph, Node, Tensor, Value
from ..ir.quantised import QuantisedMatrix, quantise_matrix
from .base import PassResult, Refusal
from .feedback import feedback_factor, round_with_feedback
from .patterns import made_by, regions
from .weight_uses import is_added, is_embedded, is_table, last_products, makes_values

__all__ = ["MIXED", "STORED", "WEIGHT_TYPES", "quantise_weights"]

STORED = "stored"
"""As the model's file has them: nothing is rounded, matrices in few bits stay so."""

MIXED = "mixed"
"""In 4 bits, but in 8 the values of attentions and what is added to a sum that further products read."""

WEIGHT_TYPES = ("float16", "bfloat16", "int8", MIXED, "int4", STORED)
"""What weights can be stored in."""

_LEAST = 32
"""Matrices with fewer rows than this stay: a block would hold little, and they are small."""

_LEAST_TABLE = 1 << 16
"""Tables with fewer entries than this stay, unless they are the matrix of a product too."""

_MATRICES = {("matmul", 1), ("grouped_matmul", 1), ("conv", 1)}
"""Operators and operands that are stored in a narrower float type."""


def quantise_weights(graph: Graph, weights: str, moments: Mapping[Value, Array] | None = None) -> PassResult:
    """Rewrites ``graph`` in place, its regions too, for weights in one of ``WEIGHT_TYPES``. What could be stored in
    fewer bits but is not has a refusal with the reason.

    ``moments`` holds the mean of x xᵀ [k, k] for values x of products: matrices in 4 bits are then rounded for the
    least error of the products (``feedback.py``) instead of the least error of themselves.
    """
    if weights == STORED:
        return _stored(graph)
    work = _Work(graph, weights, moments or {})
    for one in regions(graph):
        if weights in ("int8", MIXED, "int4"):
            work.round(one)
        else:
            work.narrow(one, DType(weights))
        one.remove_unused()
    return work.result


def _stored(graph: Graph) -> PassResult:
    """What the graph has in few bits, and which matrices it has not."""
    result = PassResult(graph, False)
    sizes: dict[str, dict[Value, int]] = {}
    for one in regions(graph):
        for node in one.nodes:
            if node.op.name in ("quantised_matmul", "quantised_gather"):
                kind = f"{node.attr('bits')} bits in blocks of {node.attr('block')}"
                kind += " with minima" if len(node.inputs) > 4 and node.inputs[4] is not None else ""
                sizes.setdefault(kind, {}).update(
                    (v, v.constant.nbytes) for v in node.operands[1:] if v.constant is not None
                )
            elif _stored_matrix(node) is not None:
                reason = "the file has its weights as floats, or in blocks of a kind that has no form here"
                result.refusals.append(Refusal.at(node, "weights in few bits", reason))
    for kind, values in sorted(sizes.items()):
        matrices = sum(v.type.rank == 3 for v in values)
        result.notes.append(f"{matrices} matrices as stored, {kind}: {_megabytes(sum(values.values()))}")
    return result


@dataclass
class _Work:
    graph: Graph
    weights: str
    moments: Mapping[Value, Array]
    result: PassResult = field(init=False)
    before: int = 0
    after: int = 0
    square: float = 0.0
    error: float = 0.0
    fitted: int = 0
    known: tuple[Value | None, Array | None] = (None, None)

    def __post_init__(self) -> None:
        self.result = PassResult(self.graph, False)

    # -- integers --------------------------------------------------------------------------------------------

    def round(self, graph: Graph) -> None:
        made: dict[tuple[Value, bool], tuple[QuantisedMatrix, list[Value | None]]] = {}
        count = 0
        last = last_products(graph)
        for node in list(graph.nodes):
            found = _stored_matrix(node)
            if found is None:
                continue
            value, tensor, turned = found
            reason = self._reason(node, tensor, turned)
            if reason:
                self.result.refusals.append(Refusal.at(node, f"weights in {self.weights}", reason))
                continue
            with graph.insert_before(node):
                if (value, turned) not in made:
                    wide = self.weights == "int8" or node in last or any(is_table(use) for use in value.uses)
                    wide = wide or (self.weights == MIXED and (is_added(node) or makes_values(node)))
                    matrix = self._rounded(tensor.array if turned else tensor.array.T, 8 if wide else 4, node)
                    made[value, turned] = matrix, _operands(graph, matrix, value.name)
                self._replace(graph, node, *made[value, turned])
            count += 1
        what = f"{count} products with {len(made)} matrices"
        tables = self._tables(graph, made)
        if count or tables:
            self.result.changed = True
            what += f" and {tables} table{'s' if tables > 1 else ''}" if tables else ""
            kinds = {f"{sum(o.bits == m.bits for o, _ in made.values())} in {m.bits} bits" for m, _ in made.values()}
            fitted = f", {self.fitted} of them fitted to a text" if self.fitted else ""
            off = 100 * (self.error / max(self.square, 1e-30)) ** 0.5
            self.result.notes.append(
                f"{what} in {self.weights} ({', '.join(sorted(kinds))}{fitted}): {_megabytes(self.before)} became "
                f"{_megabytes(self.after)}, root mean square error {off:.2g} %"
            )

    def _tables(self, graph: Graph, made: dict[tuple[Value, bool], tuple[QuantisedMatrix, list[Value | None]]]) -> int:
        """Rows of tables come from the matrix of the head where that is the table; other large ones are rounded to 8
        bits. Gives how many tables there were."""
        found = 0
        for value in list(graph.constants):
            uses = [use for use in value.uses if is_table(use)]
            tensor = value.constant
            if not uses or tensor is None or tensor.is_missing or value.dtype not in (DType.FLOAT32, DType.FLOAT16):
                continue
            key = next((key for key in made if _holds(key, tensor)), (value, True))
            if key not in made:
                large = tensor.size >= _LEAST_TABLE and tensor.shape[1] >= _LEAST and np.isfinite(tensor.array).all()
                if not large or not all(is_embedded(use.node) for use in uses):
                    continue
                matrix = self._rounded(tensor.array, 8)
                made[key] = matrix, _operands(graph, matrix, value.name)
            for use in uses:
                self._gather(graph, use.node, *made[key])
            found += 1
        return found

    @staticmethod
    def _gather(graph: Graph, node: Node, matrix: QuantisedMatrix, operands: list[Value | None]) -> None:
        old = node.output
        name = old.name
        graph.rename(old, f"{name}_exact")
        with graph.insert_before(node):
            b = Builder(graph, node.source)
            rows = b(
                "quantised_gather", node.operands[1], *operands,
                bits=matrix.bits, block=matrix.block, length=matrix.length,
            )  # fmt: skip
            rows = b.cast(rows, old.dtype)
        graph.replace_uses(old, rows)
        graph.remove(node)
        graph.rename(rows, name)

    def _reason(self, node: Node, tensor: Tensor, turned: bool) -> str:
        """Why a product keeps its matrix; empty when it need not."""
        if len(tensor.shape) != 2:
            return f"the weights are no single matrix but {tensor.type}, as those of experts"
        if node.operands[0].dtype is DType.FLOAT64:
            return "the model computes in float64"
        rows = tensor.shape[1 if turned else 0]
        if rows < _LEAST or node.operands[0].type.rank < 2:
            return f"it sums over {rows} entries only" if rows < _LEAST else "it multiplies a single vector"
        return "" if np.isfinite(tensor.array).all() else "the weights are not all finite"

    def _rounded(self, columns: Array, bits: int, node: Node | None = None) -> QuantisedMatrix:
        """The matrix whose columns are the rows given, for a product ``node``."""
        n, k = columns.shape
        factor = None if node is None or bits == 8 else self._factor(node.operands[0])
        if factor is None:
            matrix = quantise_matrix(columns, bits, 64 if bits == 8 and k % 64 == 0 else 32)
        else:
            matrix = round_with_feedback(columns, factor, bits, 32)
            self.fitted += 1
        rows = max(1, (1 << 20) // k)
        whole = matrix.dequantised().T
        for start in range(0, n, rows):
            part = columns[start : start + rows].astype(np.float32)
            self.square += float(np.vdot(part, part))
            gap = part - whole[start : start + rows]
            self.error += float(np.vdot(gap, gap))
        self.before += columns.nbytes
        self.after += matrix.nbytes
        return matrix

    @staticmethod
    def _replace(graph: Graph, node: Node, matrix: QuantisedMatrix, operands: list[Value | None]) -> None:
        b = Builder(graph, node.source)
        x, old = node.operands[0], node.output
        name = old.name
        graph.rename(old, f"{name}_exact")
        y = b("quantised_matmul", b.cast(x, DType.FLOAT32), *operands, bits=matrix.bits, block=matrix.block)
        y = b.cast(y, old.dtype)
        graph.replace_uses(old, y)
        graph.remove(node)
        graph.rename(y, name)

    def _factor(self, x: Value) -> Array | None:
        """Of the inputs x of a product; the last one is kept, for several products may have one x."""
        if x not in self.moments or not np.isfinite(self.moments[x]).all():
            return None
        if x is not self.known[0]:
            self.known = x, feedback_factor(self.moments[x])
        return self.known[1]

    # -- narrower floats -------------------------------------------------------------------------------------

    def narrow(self, graph: Graph, dtype: DType) -> None:
        count = 0
        for value in list(graph.constants):
            tensor = value.constant
            if tensor is None or tensor.is_missing or not tensor.dtype.is_float or tensor.dtype.bits <= dtype.bits:
                continue
            readers = [use for use in value.uses if _is_matrix(use.node, use.position)]
            rows = [use.node for use in value.uses if (use.node.op.name, use.position) == ("gather", 0)]
            if value.type.rank < 2 or not (readers or rows):
                continue
            with np.errstate(over="ignore"):
                data = tensor.array.astype(dtype.numpy)
            if not np.array_equal(np.isfinite(data.astype(np.float32)), np.isfinite(tensor.array)):
                node = readers[0].node if readers else rows[0]
                reason = f"an entry of {value.name} is too large for {dtype}"
                self.result.refusals.append(Refusal.at(node, f"weights in {self.weights}", reason))
                continue
            stored = graph.add_constant(Tensor(data, dtype), f"{value.name}_{dtype}")
            self.before, self.after = self.before + tensor.nbytes, self.after + data.nbytes
            for node in dict.fromkeys(use.node for use in readers):
                with graph.insert_before(node):
                    wide = Builder(graph, node.source).cast(stored, value.dtype)
                graph.replace_inputs(node, [wide if v is value else v for v in node.inputs])
            for node in rows:
                self._gather_narrow(graph, node, stored)
            count += 1
        if count:
            self.result.changed = True
            self.result.notes.append(
                f"{count} matrices and tables in {self.weights}: {_megabytes(self.before)} became "
                f"{_megabytes(self.after)}"
            )

    @staticmethod
    def _gather_narrow(graph: Graph, node: Node, stored: Value) -> None:
        old = node.output
        name = old.name
        graph.rename(old, f"{name}_exact")
        with graph.insert_before(node):
            (rows,) = graph.add(node.op, stored, *node.inputs[1:], attrs=node.attrs, source=node.source)
            wide = Builder(graph, node.source).cast(rows, old.dtype)
        graph.replace_uses(old, wide)
        graph.remove(node)
        graph.rename(wide, name)


def _stored_matrix(node: Node) -> tuple[Value, Tensor, bool] | None:
    """Of a product with stored weights: the constant, its data, and whether the product takes it transposed."""
    if node.op.name not in ("matmul", "grouped_matmul"):
        return None
    value, turned = node.operands[1], False
    for _ in range(4):
        cast, transpose = made_by(value, "cast"), made_by(value, "transpose")
        if cast is not None and cast.operands[0].dtype.is_float:
            value = cast.operands[0]
        elif transpose is not None and value.type.rank == 2:
            value, turned = transpose.operands[0], turned != (tuple(transpose.attr("order")) == (1, 0))
    tensor = value.constant
    if tensor is None or tensor.is_missing or not tensor.dtype.is_float or node.operands[0].constant is not None:
        return None
    return value, tensor, turned


def _holds(key: tuple[Value, bool], table: Tensor) -> bool:
    """Whether the columns of a rounded matrix are the rows of a table: it may have been transposed on the way."""
    value, turned = key
    tensor = value.constant
    if tensor is None or tensor is table or tensor.shape != (table.shape if turned else table.shape[::-1]):
        return tensor is table and turned
    return np.array_equal(tensor.array if turned else tensor.array.T, table.array)


def _operands(graph: Graph, matrix: QuantisedMatrix, name: str) -> list[Value | None]:
    """The operands behind x."""
    parts = (("packed", matrix.packed), ("scales", matrix.scales), ("zeros", matrix.zeros), ("offsets", matrix.offsets))
    found = [None if a is None else graph.add_constant(Tensor(a), graph.unique_name(f"{name}_{p}")) for p, a in parts]
    return found[:3] if found[3] is None else found


def _is_matrix(node: Node, position: int) -> bool:
    """Whether an operand is the weight of a product or a convolution, perhaps transposed on the way."""
    if node.op.name == "transpose":
        return bool(node.output.uses) and all(_is_matrix(use.node, use.position) for use in node.output.uses)
    return (node.op.name, position) in _MATRICES


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
