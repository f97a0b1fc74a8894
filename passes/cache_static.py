"""What depends on inputs without a time axis alone, such as the encoder's half of a model: computed once, then kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ir import Builder, Graph, Value, product
from ..ir.cacheplan import CacheState
from ..ir.copies import append_value
from ..ir.graph import State

if TYPE_CHECKING:
    from .timing import TimingAnalysis

__all__ = ["Frontier", "all_zero"]


@dataclass(eq=False)
class Frontier:
    """The static values that the step reads: those made of constants are copied into it, the others are
    states that ``prepare`` writes."""

    graph: Graph
    analysis: TimingAnalysis
    states: list[CacheState] = field(default_factory=list)
    kept: dict[Value, State] = field(default_factory=dict)
    begun: list[tuple[Value, State]] = field(default_factory=list)
    """States of the step that begin as such a value, which ``prepare`` writes into them."""
    _given: dict[Value, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            self._given[value] = True
        for node in self.graph.nodes:
            given = any(self._given.get(v, False) for v in node.operands)
            for value in node.outputs:
                self._given[value] = given

    def is_given(self, value: Value) -> bool:
        """Whether a static value depends on an input, so that no step can compute it from constants."""
        return self._given.get(value, False)

    def begin(self, value: Value, state: State) -> None:
        """Lets a state of the step begin as a static value that depends on inputs."""
        self.begun.append((value, state))

    def read(self, step: Graph, value: Value, names: Mapping[Value, str]) -> Value:
        """A static value in the step."""
        if not self.is_given(value):
            return append_value(step, value, {})
        if value not in self.kept:
            name = names.get(value, f"fixed.{value.name}")
            node = value.producer
            where = (node.source or node.op.name) if node is not None else f"input {value.name}"
            self.kept[value] = step.add_state(State(name, value.type, description=f"fixed: {where}"))
            proof = "depends on inputs that are the same at every step; computed once"
            size = str(product(value.shape) * (value.dtype.bits // 8 or 1))
            batch = 0 if value.type.rank and not isinstance(value.shape[0], int) else None
            self.states.append(CacheState(name, "fixed", batch, None, where, size, proof))
        return Builder(step, value.name)("state_read", state=self.kept[value].name)

    def prepare(self, names: Mapping[Value, str]) -> Graph | None:
        """The graph that computes what is kept, or None when nothing is."""
        if not self.kept and not self.begun:
            return None
        prepared = Graph(f"{self.graph.name}_prepare")
        mapping: dict[Value, Value] = {}
        for value in self.graph.inputs:
            if not self.analysis[value].axes:
                mapping[value] = prepared.add_input(value.name, value.type)
        for value, state in (*self.kept.items(), *self.begun):
            prepared.add_state(state)
            made = append_value(prepared, value, mapping)
            Builder(prepared, value.name)("state_write", made, state=state.name)
        return prepared


def all_zero(value: Value) -> bool:
    """Whether every entry is a stored zero, however often it is repeated."""
    while value.producer is not None and value.producer.op.name in ("expand", "reshape", "transpose", "slice", "cast"):
        value = value.producer.operands[0]
    return value.constant is not None and not value.constant.is_missing and not value.constant.array.any()
