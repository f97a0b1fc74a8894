"""How a program without a cache is stepped: a plan under which every input along time holds all tokens so far."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Graph, TensorType, UsageError, Value
from ..ir.cacheplan import CachePlan, TimeInput, TimeOutput
from ..ir.dims import Dim, SymDim, symbol_and_offset
from ..ir.graph import Output
from .feeds import index_limits

__all__ = ["whole_plan"]


def whole_plan(graph: Graph) -> CachePlan:
    """A plan without states for a graph over all tokens. Each step runs the whole prefix again, which is right for
    every graph whose logits are those of the next token.

    The token ids are the integers [batch, n] or [n] for which an output of floats has those sizes too, the vocabulary
    behind them; among several those that index a table with a row for each word, else those that index the largest.
    Of the other inputs along n, those called after a mask or after positions get defaults. Raises UsageError when the
    graph has no such pair, or has states of its own.
    """
    if graph.states:
        raise UsageError(f"the program {graph.name} has states but no plan of what they hold: call session.run(feeds)")
    limits = index_limits(graph, {})
    found = [
        (_likelihood(value, outputs, limits), -place, value, value.shape[axis], outputs)
        for place, value in enumerate(graph.inputs)
        if value.dtype.is_integer and value.type.rank in (1, 2)
        for axis in reversed(range(value.type.rank))
        if (outputs := _outputs(graph, value, value.shape[axis]))
    ]
    if not found:
        raise UsageError(
            f"the program {graph.name} has no input of token ids [batch, n] with an output [batch, n, vocabulary], "
            "n being a size that may vary: it cannot be stepped; call session.run(feeds)"
        )
    *_, ids, time, outputs = max(found, key=lambda entry: entry[:2])
    other = next((d for d in ids.shape if d != time), 1)
    inputs = [
        TimeInput(value.name, axis, "ids" if value is ids else _role(value), whole=True)
        for value in graph.inputs
        if (axis := _axis(value.type, time)) is not None
    ]
    rows = tuple(TimeOutput(o.name, axis) for o in outputs if (axis := _axis(o.value.type, time)) is not None)
    return CachePlan(str(time), tuple(inputs), (), rows, str(other) if _plain(other) else None)


def _likelihood(ids: Value, outputs: list[Output], limits: Mapping[Value, int]) -> tuple[bool, bool, int]:
    """How much an input looks like the token ids."""
    limit = limits.get(ids, 0)
    return limit in {o.value.shape[-1] for o in outputs}, _role(ids) == "other", limit


def _outputs(graph: Graph, ids: Value, time: Dim) -> list[Output]:
    """The outputs that may be logits for these ids."""
    return [
        output
        for output in graph.outputs
        if _plain(time)
        and output.value.dtype.is_float
        and output.value.type.rank == ids.type.rank + 1
        and isinstance(output.value.shape[-1], int)
        and set(output.value.shape[:-1]) == set(ids.shape)
    ]


def _axis(type: TensorType, time: Dim) -> int | None:
    return next((k for k, d in enumerate(type.shape) if d == time), None)


def _plain(d: Dim) -> bool:
    return isinstance(d, SymDim) and symbol_and_offset(d)[0] == d.text


def _role(value: Value) -> str:
    """By the names that exporters give: nothing else tells a mask from types of tokens."""
    name = value.name.lower()
    return "mask" if "mask" in name else "positions" if "position" in name else "other"
