"""Products in which each row has a matrix of its own, for ONNX Runtime.

A few rows gather their matrices and are one batched product. More rows are sorted by matrix in a loop over those that
are named: its rows, its matrix, their product; the results are brought back to their places at the end. Measured with
1.32 on one thread, 32 matrices of 512 x 768, float32: 4 rows 0.3 ms by gathering and 3.3 by a loop over all matrices,
256 rows 58 and 6.9, 1024 rows 14.8 by the loop. com.microsoft.MoE, which computes a whole layer, takes as long as
three loops, and longer than three gathers for a single token.

Files for others have the decomposition, which gathers.
"""

from __future__ import annotations

import onnx
from onnx import helper

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
    few, many = _gathered(e, rows, w, names), _looped(e, rows, w, names)
    y = e.multi("If", is_few, dtypes=[x.dtype], then_branch=few, else_branch=many)[0]
    return e.node("Reshape", y, e.sizes.vector((*node.output.shape[:-1], width)))


def _gathered(e: Emitter, rows: Ref, w: Ref, names: Ref) -> onnx.GraphProto:
    b, axis = e.child("few"), e.ints([1])
    matrices = b.node("Gather", w, names)
    each = b.node("MatMul", b.node("Unsqueeze", rows, axis), matrices)
    return _graph(b, [], [_matrix(b.node("Squeeze", each, axis))])


def _looped(e: Emitter, rows: Ref, w: Ref, names: Ref) -> onnx.GraphProto:
    b = e.child("many")
    used = b.share(b.node("Unique", names))
    products, places = (b.multi("SequenceEmpty", dtypes=[t], dtype=onnx_type(t))[0] for t in (rows.dtype, names.dtype))
    types, body = [rows.dtype, names.dtype], _body(b, rows, w, names, used)
    products, places = b.multi("Loop", b.node("Size", used), None, products, places, dtypes=types, body=body)
    in_order = b.node("ConcatFromSequence", products, axis=0)
    order = b.node("Unsqueeze", b.node("ConcatFromSequence", places, axis=0), e.ints([1]))
    # Every row is written, so that what it is written into does not matter.
    return _graph(b, [], [_matrix(b.node("ScatterND", in_order, order, in_order))])


def _body(e: Emitter, rows: Ref, w: Ref, names: Ref, used: Ref) -> onnx.GraphProto:
    b = e.child("body")
    types = {"step": DType.INT64, "going": DType.BOOL, "products": rows.dtype, "places": names.dtype}
    step, going, products, places = (Ref(e.names.unique(f"{b.base()}/{name}"), t) for name, t in types.items())
    name = b.node("Gather", used, step)
    hit = b.node("NonZero", b.node("Equal", names, name, dtype=DType.BOOL), dtype=DType.INT64)
    mine = b.node("Squeeze", hit, e.ints([0]))
    y = b.node("MatMul", b.node("Gather", rows, mine), b.node("Gather", w, name))
    more, where = b.node("SequenceInsert", products, y), b.node("SequenceInsert", places, mine)
    on = b.node("Identity", going)
    return _graph(
        b,
        [_scalar(step), _scalar(going), _sequence(products), _sequence(places)],
        [_scalar(on), _sequence(more), _sequence(where)],
    )


def _graph(
    b: Emitter, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.GraphProto:  # fmt: skip
    return helper.make_graph(b.nodes, b.base(), inputs, outputs)


def _scalar(ref: Ref) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(ref.name, onnx_type(ref.dtype), [])


def _matrix(ref: Ref) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(ref.name, onnx_type(ref.dtype), [None, None])


def _sequence(ref: Ref) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(ref.name, onnx_type(ref.dtype), None)


EMISSIONS: dict[str, Emission] = {"grouped_matmul": Emission(_emit, _fits)}
