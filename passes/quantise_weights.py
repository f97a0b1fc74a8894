"""Weights stored in fewer bits than they are computed in.

``int8`` and ``int4``: every product x @ W with a stored matrix W [k, n] becomes a ``quantised_matmul``; W is rounded in
blocks along k with zero points. In 4 bits the blocks have 32 entries: with normally distributed weights the error is
7.8 % of the weights' root mean square, without zero points 8.3 %, in blocks of 64 8.7 %, and ONNX Runtime's kernel
takes the same time. In 8 bits they have 64: 0.53 % instead of 0.47 %, about what rounding x to 8 bits adds anyway, and
a large product takes three quarters of the time. Norms, biases, convolutions and tables of embeddings stay as they are;
a table that is also the matrix of the last product is stored twice, once as the rounded matrix, which every token
reads whole, once as the table, of which a token reads a row.

``float16`` and ``bfloat16``: the matrices of products and convolutions and the tables that rows are gathered from are
stored in that type and cast to the type of the model where they are used; rows are cast when they have been gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..ir import Array, Builder, DType, Graph, Node, Tensor, Value
from ..ir.quantised import QuantisedMatrix, quantise_matrix
from .base import PassResult, Refusal
from .patterns import made_by, regions

__all__ = ["WEIGHT_TYPES", "quantise_weights"]

WEIGHT_TYPES = ("float16", "bfloat16", "int8", "int4")
"""What weights can be stored in."""

_LEAST = 32
"""Matrices with fewer rows than this stay: a block would hold little, and they are small."""

_MATRICES = {("matmul", 1), ("conv", 1)}
"""Operators and operands that are stored in a narrower float type."""


def quantise_weights(graph: Graph, weights: str) -> PassResult:
    """Rewrites ``graph`` in place, its regions too, for weights in one of ``WEIGHT_TYPES``. What could be stored in
    fewer bits but is not has a refusal with the reason."""
    work = _Work(graph, weights)
    for one in regions(graph):
        if weights in ("int8", "int4"):
            work.round(one)
        else:
            work.narrow(one, DType(weights))
        one.remove_unused()
    return work.result


@dataclass
class _Work:
    graph: Graph
    weights: str
    result: PassResult = field(init=False)
    before: int = 0
    after: int = 0
    square: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        self.result = PassResult(self.graph, False)

    # -- integers --------------------------------------------------------------------------------------------

    def round(self, graph: Graph) -> None:
        made: dict[tuple[Value, bool], tuple[QuantisedMatrix, list[Value | None]]] = {}
        count = 0
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
                    matrix = self._rounded(tensor.array if turned else tensor.array.T)
                    made[value, turned] = matrix, _operands(graph, matrix, value.name)
                self._replace(graph, node, *made[value, turned])
            count += 1
        if count:
            self.result.changed = True
            blocks = {m.block for m, _ in made.values()}
            self.result.notes.append(
                f"{count} products with {len(made)} matrices in {self.weights}, in blocks of "
                f"{' or '.join(map(str, sorted(blocks)))} with zero points: {_megabytes(self.before)} became "
                f"{_megabytes(self.after)}, root mean square error {100 * (self.error / self.square) ** 0.5:.2g} %"
            )

    def _reason(self, node: Node, tensor: Tensor, turned: bool) -> str:
        """Why a product keeps its matrix; empty when it need not."""
        if len(tensor.shape) != 2:
            return f"the weights are no single matrix but {tensor.type}"
        if node.operands[0].dtype is DType.FLOAT64:
            return "the model computes in float64"
        rows = tensor.shape[1 if turned else 0]
        if rows < _LEAST or node.operands[0].type.rank < 2:
            return f"it sums over {rows} entries only" if rows < _LEAST else "it multiplies a single vector"
        return "" if np.isfinite(tensor.array).all() else "the weights are not all finite"

    def _rounded(self, columns: Array) -> QuantisedMatrix:
        """The matrix whose columns are the rows given."""
        n, k = columns.shape
        bits = 8 if self.weights == "int8" else 4
        matrix = quantise_matrix(columns, bits, 64 if bits == 8 and k % 64 == 0 else 32)
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
    if node.op.name != "matmul":
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
