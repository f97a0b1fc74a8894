"""Subgraphs of control-flow nodes: put into the graph around them, or made regions with captures."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import AttributeProto, GraphProto

from ...ir import Graph, ModelError, SymDim, TensorType, symbols
from .contents import Content
from .context import Item
from .order import free_names

if TYPE_CHECKING:
    from .importer import Importer

__all__ = ["Names", "NodeSubgraphs"]

Names = MutableMapping[str, Item]


@dataclass
class NodeSubgraphs:
    """The subgraphs of one node, in the scope that they are in."""

    importer: Importer
    names: Names
    opsets: Mapping[str, int]
    attributes: Mapping[str, AttributeProto]
    path: str

    def inline(self, graph: GraphProto) -> list[Item]:
        return self._run(self.importer, graph, ChainMap({}, self.names))

    def captures(self, *graphs: GraphProto) -> list[str]:
        free = dict.fromkeys(name for graph in graphs for name in free_names(graph))
        return [name for name in free if not self._is_known(self.outer(name))]

    def region(self, graph: GraphProto, types: Sequence[TensorType], captured: Sequence[str]) -> Graph:
        child = self.importer.child(graph.name)
        if len(types) != len(graph.input):
            raise ModelError(f"the subgraph {graph.name} has {len(graph.input)} inputs, not {len(types)}")
        inner: Names = {}
        for value, type in zip(graph.input, types, strict=True):
            inner[value.name] = Item.of_value(child.graph.add_input(value.name, type))
        for name in captured:
            inner[name] = Item.of_value(child.graph.add_input(name, self.outer(name).type))
        child.settled.update(child.graph.inputs)
        sizes = child.graph.size_names()
        for name in free_names(graph):
            known = self.outer(name)
            if name not in captured:
                inner[name] = Item(name, known.dtype, known.shape, None, known.tensor, known.content)
            elif known.content is not None and _symbols(known.content) <= sizes:
                inner[name].content = known.content
        for output, item in zip(graph.output, self._run(child, graph, inner), strict=True):
            child.graph.add_output(child.realise(item), output.name)
        child.graph.remove_unused()
        return child.graph

    def outer(self, name: str) -> Item:
        if name not in self.names:
            raise ModelError(f"a subgraph reads {name}, which nothing defines")
        return self.names[name]

    @staticmethod
    def _is_known(item: Item) -> bool:
        """Whether the item is a constant, which a region holds itself."""
        return item.tensor is not None or (item.content is not None and not _symbols(item.content))

    def _run(self, importer: Importer, graph: GraphProto, names: Names) -> list[Item]:
        for tensor in graph.initializer:
            names[tensor.name] = Item.of_tensor(importer.read(tensor), tensor.name)
        importer.run_nodes(graph.node, names, self.opsets, self.attributes, f"{self.path}/")
        return [names[output.name] for output in graph.output]


def _symbols(content: Content) -> frozenset[str]:
    return frozenset().union(*(symbols(d) for d in content.reshape(-1) if isinstance(d, SymDim)))
