"""How each operator is planned on a GPU: as on the CPU, but for products, whose right side is read where it lies, and
for attention."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir import DType, Node, Value
from ..pieces import Piece
from ..plan import Planner
from ..rules import RULES, Rule
from .attention_plan import plan_attention
from .attention_plan import takes as takes_attention
from .grouped import plan_grouped
from .quantised import plan_quantised

__all__ = ["CUDA_RULES", "takes"]


def _cast(p: Planner, node: Node) -> Piece | list[Piece] | None:
    """Stored factors of products that are narrower than the other side are read as they lie: kernels widen what they
    read."""
    value = node.operands[0]
    narrow = value.dtype in (DType.FLOAT16, DType.BFLOAT16) and node.output.dtype is DType.FLOAT32
    if narrow and value.constant is not None and _only_right_sides(p, node.output):
        return p.view(value)
    return RULES["cast"](p, node)


def _only_right_sides(p: Planner, value: Value) -> bool:
    """Whether nothing but products reads a value, on the right."""
    if any(output.value is value for output in p.graph.outputs):
        return False
    return all(
        (use.node.op.name in ("matmul", "grouped_matmul") and use.position == 1)
        or (use.node.op.name in ("transpose", "reshape") and _only_right_sides(p, use.node.output))
        for use in value.uses
    )


CUDA_RULES: Mapping[str, Rule] = {
    **RULES,
    "attention": plan_attention,
    "cast": _cast,
    "grouped_matmul": plan_grouped,
    "quantised_matmul": plan_quantised,
}
"""The operators that have kernels. A rule gives None, or plans a callback, for what its kernels lack."""


def takes(node: Node) -> bool:
    """Whether a node goes to its rule as it is; others are to be decomposed, where they can be."""
    if node.op.name == "attention":
        return takes_attention(node)
    if node.op.name in ("softmax", "layer_norm", "rms_norm"):
        rank = node.output.type.rank
        return bool(node.attr("axis") % rank == rank - 1)
    return node.op.name in CUDA_RULES
