"""A graph around one operator, for trying it on its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dims import Dim
from .graph import Graph, Value
from .operator import Array, Operator, Sample
from .tensor import Tensor
from .types import TensorType

__all__ = ["sample_graph"]


def sample_graph(
    op: Operator, sample: Sample, sizes: Mapping[int, Dim] | None = None
) -> tuple[Graph, dict[str, Array]]:
    """The graph that applies ``op`` to the sample's inputs, and feeds for it. Sizes in ``sizes`` become the symbols
    given there, in the inputs and in attributes that are dimensions. Raises ShapeError where the operator refuses."""
    symbolic = sizes or {}
    graph = Graph(op.name)
    operands: list[Value | None] = []
    feeds: dict[str, Array] = {}
    for position, array in enumerate(sample.inputs):
        if array is None:
            operands.append(None)
            continue
        type = Tensor(array).type
        shape = tuple(symbolic.get(n, n) if isinstance(n, int) else n for n in type.shape)
        value = graph.add_input(f"in{position}", TensorType(type.dtype, shape))
        operands.append(value)
        feeds[value.name] = array
    for state in sample.states:
        graph.add_state(state)
    attrs = {name: _replaced(op, name, value, symbolic) for name, value in sample.attrs.items()}
    regions = tuple(region.copy() for region in sample.regions)
    for index, result in enumerate(graph.add(op, *operands, attrs=attrs, regions=regions, source="sample")):
        graph.add_output(result, f"out{index}")
    return graph, feeds


def _replaced(op: Operator, name: str, value: Any, sizes: Mapping[int, Dim]) -> Any:
    spec = op.attributes.get(name)
    if spec is None or spec.kind not in ("dim", "dim*"):
        return value
    if isinstance(value, int):
        return sizes.get(value, value)
    return tuple(sizes.get(d, d) if isinstance(d, int) else d for d in value) if spec.is_tuple else value
