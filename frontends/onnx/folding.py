"""A builder that computes small nodes over constants at once, so that sizes reach the shapes that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...ir import Builder, Graph, Run, Tensor, Value
from ...ir.builder import Operand
from ...ir.evaluate import evaluate_node
from .contents import CONTENT_LIMIT

if TYPE_CHECKING:
    from .blocks import Blocked

__all__ = ["FoldingBuilder"]


class FoldingBuilder(Builder):
    """Folds nodes whose operands and results have at most CONTENT_LIMIT elements; the rest is left to passes."""

    def __init__(self, graph: Graph, source: str | Callable[[], str] = "") -> None:
        super().__init__(graph, source)
        self.blocked: dict[Value, Blocked] = {}
        """Matrices that were dequantised by blocks, which a product may take in few bits."""

    def multi(
        self, op: str, *inputs: Operand | None, names: Sequence[str] = (), regions: Sequence[Graph] = (), **attrs: Any
    ) -> tuple[Value, ...]:
        outputs = super().multi(op, *inputs, names=names, regions=regions, **attrs)
        node = outputs[0].producer
        assert node is not None
        foldable = node.operands and not node.regions and not node.op.has_effect
        if not foldable or not all(_is_folded(v) for v in node.operands) or not all(_is_small(v) for v in outputs):
            return outputs
        arrays = [None if v is None or v.constant is None else v.constant.array for v in node.inputs]
        run = Run(node.attrs, tuple(v.type for v in outputs), {})
        results = evaluate_node(node, run, arrays)
        self.graph.remove(node)
        return tuple(
            self.graph.add_constant(Tensor(array, v.dtype), names[k] if k < len(names) else "")
            for k, (array, v) in enumerate(zip(results, outputs, strict=True))
        )


def _is_small(value: Value) -> bool:
    size = value.type.size
    return isinstance(size, int) and size <= CONTENT_LIMIT


def _is_folded(value: Value) -> bool:
    return value.constant is not None and _is_small(value)
