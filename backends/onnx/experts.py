"""Products in which each row has a matrix of its own, for ONNX Runtime.

A few rows gather their matrices and are one batched product. More rows are sorted by matrix in a loop over those that
are named: its rows, its matrix, their product; the results are brought back to their places at the end. Measured with
1.32 on one thread, 32 matrices of 512 x 768, float32: 4 rows 0.3 ms by gathering and 3.3 by a loop over all matrices,
256 rows 58 and 6.9, 1024 rows 14.8 by the loop. com.microsoft.MoE, which computes a whole layer, takes as long as
three loops, and longer than three gathers for a single token.

Files for others have the decomposition, which gathers.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref, onnx_type
from .kernels import Dialect

__all__ = ["EMISSIONS"]


def _fits(node: Node, dialect: Dialect) -> bool:
    x, w, group = node.operands
    static = all(isinstance(d, int) for d in w.shape)
    return dialect.runtime and static and x.dtype in (DType.FLOAT32, DType.FLOAT64) and group.type.rank > 0


def _emit(e: Emitter, node: Node) -> Ref:
    x, w, group = (e.share(e.operand(node, k)) for k in range(3))
    experts, depth, width = (int(str(d)) for d in node.operands[1].shape)
    rows = e.share(e.node("Reshape", x, e.ints([-1, depth])))
    names = e.share(e.node("Reshape", e.cast(group, DType.INT64), e.ints([-1])))
    count = e.node("Size", names, dtype=DType.INT64)
    is_few = e.node("LessOrEqual", count, e.number(experts // 2, DType.INT64), dtype=DType.BOOL)
    branches = {
        "then_branch": _Branch(e, "few").gathered(rows, w, names),
        "else_branch": _Branch(e, "many").looped(rows, w, names),
    }
    y = e.multi("If", is_few, dtypes=[x.dtype], **branches)[0]
    return e.node("Reshape", y, e.sizes.vector((*node.output.shape[:-1], width)))


class _Branch:
    """A subgraph that reads tensors of the outer graph."""

    def __init__(self, e: Emitter, name: str) -> None:
        self.e, self.name = e, name
        self.nodes: list[onnx.NodeProto] = []

    def fresh(self, name: str) -> str:
        return self.e.names.unique(f"{self.e.base()}/{self.name}/{name}")

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attrs: Any) -> list[str]:
        made = [self.fresh(op_type) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name=made[0] + "/node", **attrs))
        return made

    def one(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        return self.node(op_type, *inputs, **attrs)[0]

    def graph(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, self.fresh("graph"), inputs, outputs)

    def gathered(self, rows: Ref, w: Ref, names: Ref) -> onnx.GraphProto:
        axis = self.e.ints([1]).name
        matrices = self.one("Gather", w.name, names.name)
        each = self.one("MatMul", self.one("Unsqueeze", rows.name, axis), matrices)
        y = self.one("Squeeze", each, axis)
        return self.graph([], [helper.make_tensor_value_info(y, onnx_type(rows.dtype), [None, None])])

    def looped(self, rows: Ref, w: Ref, names: Ref) -> onnx.GraphProto:
        e, kind = self.e, onnx_type(rows.dtype)
        used = self.one("Unique", names.name)
        first = self.one("SequenceEmpty", dtype=kind)
        nowhere = self.one("SequenceEmpty", dtype=TensorProto.INT64)
        count = self.one("Size", used)
        body = _Branch(e, f"{self.name}/body").body(rows, w, names, used)
        products, places = self.node("Loop", count, "", first, nowhere, outputs=2, body=body)
        sorted_rows = self.one("ConcatFromSequence", products, axis=0)
        order = self.one("Unsqueeze", self.one("ConcatFromSequence", places, axis=0), e.ints([1]).name)
        # Every row is written, so that what it is written into does not matter.
        y = self.one("ScatterND", sorted_rows, order, sorted_rows)
        return self.graph([], [helper.make_tensor_value_info(y, kind, [None, None])])

    def body(self, rows: Ref, w: Ref, names: Ref, used: str) -> onnx.GraphProto:
        kind = onnx_type(rows.dtype)
        step, going, products, places = (self.fresh(x) for x in ("step", "going", "products", "places"))
        name = self.one("Gather", used, step)
        hit = self.one("NonZero", self.one("Equal", names.name, name))
        mine = self.one("Squeeze", hit, self.e.ints([0]).name)
        y = self.one("MatMul", self.one("Gather", rows.name, mine), self.one("Gather", w.name, name))
        more = self.one("SequenceInsert", products, y)
        where = self.one("SequenceInsert", places, mine)
        on = self.one("Identity", going)

        def sequence(name: str, kind: int) -> onnx.ValueInfoProto:
            return helper.make_tensor_sequence_value_info(name, kind, None)

        return self.graph(
            [
                helper.make_tensor_value_info(step, TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                sequence(products, kind),
                sequence(places, TensorProto.INT64),
            ],
            [
                helper.make_tensor_value_info(on, TensorProto.BOOL, []),
                sequence(more, kind),
                sequence(where, TensorProto.INT64),
            ],
        )


EMISSIONS: dict[str, Emission] = {"grouped_matmul": Emission(_emit, _fits)}
