"""How a program without a cache is stepped: a plan under which every input along time holds all tokens so far."""

from __future__ import annotations

from ..ir import Graph, TensorType, UsageError, Value
from ..ir.cacheplan import CachePlan, TimeInput, TimeOutput
from ..ir.dims import SymDim, symbol, symbol_and_offset
from .feeds import index_limits

__all__ = ["whole_plan"]


def whole_plan(graph: Graph) -> CachePlan:
    """A plan without states for a graph over all tokens. Each step runs the whole prefix again, which is right for
    every graph whose logits are those of the next token.

    The token ids are the integers [batch, n] or [n] whose n an output of floats has too, with the vocabulary behind
    it; among several the ones that index the largest table. Of the other inputs along n those called after a mask or
    after positions get defaults. Raises UsageError when the graph has no such pair, or states of its own.
    """
    if graph.states:
        raise UsageError(f"the program {graph.name} has states but no plan of what they hold: call session.run(feeds)")
    limits = index_limits(graph, {})
    found = [
        (limits.get(value, 0), -place, value, axis, outputs)
        for place, value in enumerate(graph.inputs)
        if value.dtype.is_integer and value.type.rank in (1, 2)
        for axis in reversed(range(value.type.rank))
        if (outputs := _outputs(graph, value, axis))
    ]
    if not found:
        raise UsageError(
            f"the program {graph.name} has no input of token ids [batch, n] with an output [batch, n, vocabulary], "
            "n being a size that may vary: it cannot be stepped; call session.run(feeds)"
        )
    *_, ids, axis, outputs = max(found, key=lambda entry: entry[:2])
    time = str(ids.shape[axis])
    other = ids.shape[1 - axis] if ids.type.rank == 2 else 1
    inputs = [
        TimeInput(value.name, at, _role(value, ids), whole=True)
        for value in graph.inputs
        if (at := _axis(value.type, time)) is not None
    ]
    return CachePlan(time, tuple(inputs), (), outputs, str(other) if _plain(other) else None)


def _outputs(graph: Graph, ids: Value, axis: int) -> tuple[TimeOutput, ...]:
    """The outputs of floats that run along the time of the ids."""
    time = ids.shape[axis]
    if not _plain(time):
        return ()
    return tuple(
        TimeOutput(output.name, at)
        for output in graph.outputs
        if output.value.dtype.is_float
        and output.value.type.rank == ids.type.rank + 1
        and isinstance(output.value.shape[-1], int)
        and (at := _axis(output.value.type, str(time))) is not None
    )


def _axis(type: TensorType, time: str) -> int | None:
    return next((k for k, d in enumerate(type.shape) if d == symbol(time)), None)


def _plain(d: object) -> bool:
    return isinstance(d, SymDim) and symbol_and_offset(d)[0] == str(d)


def _role(value: Value, ids: Value) -> str:
    if value is ids:
        return "ids"
    return "mask" if "mask" in value.name.lower() else "positions" if "position" in value.name.lower() else "other"
