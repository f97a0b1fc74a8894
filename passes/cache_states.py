"""The states of a step: what each is called, how it is read and written, and what the plan says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from ..ir import Builder, Dim, DType, Graph, Tensor, TensorType, Value, dim_min, product, symbol, symbols
from ..ir.attributes import print_attrs
from ..ir.cacheplan import CacheState
from ..ir.dims import substitute_dim
from ..ir.graph import State
from .cache_static import Frontier, all_zero
from .segments import ALL, PAST, Segment
from .timing import TimeAxis, TimingAnalysis

__all__ = ["States"]


@dataclass(eq=False)
class States:
    """The states that the step gets while it is made. ``names`` and ``proofs`` say of values of the full model what
    their states are called and why they are right; ``rows`` is how many sequences run side by side."""

    analysis: TimingAnalysis
    step: Graph
    builder: Builder
    frontier: Frontier
    rows: Dim | None
    names: dict[Value, str]
    proofs: dict[Value, str]
    found: list[CacheState] = field(default_factory=list)

    def add(
        self,
        value: Value,
        type: TensorType,
        kind: str,
        axis: int | None,
        proof: str,
        window: int | None = None,
        initial: Tensor | None = None,
    ) -> State:
        """Declares a state for a value of the full model. ``axis`` is the one that grows."""
        number = sum(s.kind == kind for s in self.found)
        wanted = base = self.names.get(value, f"{number}.{kind}")
        while wanted in self.step.states:
            number += 1
            wanted = f"{base}_{number}" if value in self.names else f"{number}.{kind}"
        node = value.producer
        where = (node.source or node.op.name) if node is not None else f"input {value.name}"
        state = self.step.add_state(State(wanted, type, initial, description=f"{kind}: {where}"))
        entries: dict[str, Dim] = {"past": symbol("length")}
        if window is not None:
            entries[f"past_{window}"] = window - 1
        size = substitute_dim(product(type.shape) * (type.dtype.bits // 8 or 1), entries)
        self.found.append(CacheState(wanted, kind, self._batch(type), axis, where, str(size), proof, window))
        return state

    def _batch(self, type: TensorType) -> int | None:
        """The axis of the rows: the first, or wherever their number stands."""
        if self.rows is None:
            return None
        return next((k for k, d in enumerate(type.shape) if d == self.rows), None)

    def keep(self, value: Value, new: Value, segment: Segment, axis: TimeAxis) -> Value:
        """All times of a causal value, or the last ones: those seen from a state, the new ones behind them."""
        proof = self.proofs.get(value, "all its entries are needed; an entry does not change when tokens are added")
        held = PAST if segment is ALL else segment.held
        type = TensorType(value.dtype, tuple(held if k == axis.axis else d for k, d in enumerate(new.shape)))
        if segment is ALL:
            state = self.add(value, type, "append", axis.axis, proof)
            return self.builder("state_append", new, state=state.name, axis=axis.axis)
        window = segment.window
        assert isinstance(window, int)
        state = self.add(value, type, "ring", axis.axis, proof, window)
        both = self.builder("concat", self.builder("state_read", state=state.name), new, axis=axis.axis)
        self._write_last(state, both, axis.axis, dim_min(held + self.analysis.length, window - 1))
        return both

    def carried(
        self, value: Value, type: TensorType, kind: str, proof: str, first: Value | None = None, fill: int | None = None
    ) -> tuple[State, Value]:
        """A state of fixed shape and what it was before the step. It begins as ``first``, a value of the full model
        that is the same at every step, filled with a number, or as zeros."""
        fixed = [d for d in type.shape if isinstance(d, int)]
        if fill is not None and len(fixed) == type.rank:
            return self._begun(value, type, kind, proof, Tensor(np.full(fixed, fill, type.dtype.numpy)))
        if first is not None and first.constant is not None and first.type == type:
            return self._begun(value, type, kind, proof, first.constant)
        state = self.add(value, type, kind, None, proof)
        read = self.builder("state_read", state=state.name)
        if fill is not None:
            return state, self.first_time(self.builder.constant(fill, dtype=type.dtype), read)
        if first is None or all_zero(first):
            return state, read
        if self.frontier.is_given(first):
            self.frontier.begin(first, state)
            return state, read
        return state, self.first_time(self.frontier.read(self.step, first, self.names), read)

    def _begun(self, value: Value, type: TensorType, kind: str, proof: str, initial: Tensor) -> tuple[State, Value]:
        state = self.add(value, type, kind, None, proof, initial=initial)
        return state, self.builder("state_read", state=state.name)

    def first_time(self, begin: Value, read: Value) -> Value:
        """``begin`` while no token has been seen, then what the state holds."""
        none_seen = self.builder("equal", self.builder("size", value=PAST), 0)
        return self.builder("where", none_seen, begin, read)

    def with_rows(
        self, value: Value, new: Value, axis: int, count: Dim, proof: str, first: Value | None = None
    ) -> Value:
        """The new entries behind the last ``count`` before them, which a state keeps; before the first token they are
        ``first``, a value of the step, or zeros."""
        type = TensorType(new.dtype, tuple(count if k == axis else d for k, d in enumerate(new.shape)))
        state = self.add(value, type, "rows", None, proof)
        read = self.builder("state_read", state=state.name)
        if first is not None:
            read = self.first_time(first, read)
        both = self.builder("concat", read, new, axis=axis)
        self._write_last(state, both, axis, count)
        return both

    def _write_last(self, state: State, both: Value, axis: int, count: Dim) -> None:
        tail = self.builder("slice", both, axes=(axis,), starts=(both.shape[axis] - count,), sizes=(count,))
        self.builder("state_write", tail, state=state.name)

    def count_past(self) -> None:
        """Where the number of tokens seen is needed and nothing tells it, a state of one byte a token does."""
        given = [d for v in self.step.inputs for d in v.shape]
        whole = any(str(PAST) in symbols(d) for d in given)
        told = whole and self.analysis.length in given  # two equations for the new tokens and those seen
        held = any(str(PAST) in symbols(d) for s in self.step.states.values() for d in s.type.shape)
        if held or told or not (whole or self._needs_past()):
            return
        state = self.step.add_state(State("seen", TensorType(DType.BOOL, (PAST,)), description="append: tokens seen"))
        self.found.append(
            CacheState("seen", "append", None, 0, "positions", "length", "its length is the number of tokens seen")
        )
        no = self.builder("expand", self.builder.constant(False), shape=(self.analysis.length,))
        self.builder("state_append", no, state=state.name, axis=0)

    def _needs_past(self) -> bool:
        """Whether a size, a mask or an expression of the step mentions the number of tokens seen."""
        if any(str(PAST) in symbols(d) for node in self.step.nodes for v in node.outputs for d in v.shape):
            return True
        word = re.compile(rf"\b{PAST}\b")
        return any(word.search(print_attrs(node.op.attributes, node.attrs)) for node in self.step.nodes)
