"""Control flow over a time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import ShapeError
from .model import Model
from .tensor import Tensor

__all__ = ["scan"]

Body = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]


def scan(
    body: Body, states: Sequence[Tensor], sequences: Sequence[Tensor], axis: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs ``body`` once for every position along ``axis`` of the sequences, in order.

    ``body(*states, *slices)`` gets the states and, of each sequence, the slice at that position without the axis; it
    gives (next states, outputs). The result is (last states, outputs stacked along ``axis``). Tensors and parameters
    from outside may be used within ``body``. Raises ShapeError where a state changes its shape.
    """
    if not sequences:
        raise ShapeError("scan needs at least one sequence to run along")
    outer = sequences[0].model
    inner = Model("body", dtype=outer.dtype, parent=outer)
    slices = [x.shape[:axis] + x.shape[axis + 1 :] for x in sequences]
    arguments = [inner.input(f"state_{k}", x.dtype, x.shape) for k, x in enumerate(states)]
    arguments += [
        inner.input(f"slice_{k}", x.dtype, shape) for k, (x, shape) in enumerate(zip(sequences, slices, strict=True))
    ]
    following, outputs = body(*arguments)
    for k, x in enumerate(following):
        inner.output(f"next_{k}", x)
    for k, x in enumerate(outputs):
        inner.output(f"out_{k}", x)
    results = outer.multi(
        "scan",
        *states,
        *sequences,
        *inner.captures,
        regions=(inner.graph,),
        states=len(states),
        sequences=len(sequences),
        axes=(axis,) * len(sequences),
        output_axes=(axis,) * len(outputs),
    )
    return list(results[: len(states)]), list(results[len(states) :])
