"""Random inputs that a model accepts: integers that stay inside the tables they index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..ir import Graph, Node, TensorType, UsageError, Value, evaluate_dim, symbols
from ..ir.dims import least
from ..ir.operator import Array

__all__ = ["index_limits", "random_feeds", "size_choices"]

# Primes, so that no two sizes agree by chance and none divides another; then small ones, among them 1.
_CHOICES = ((2, 5, 3, 7, 11, 13), (1, 8, 4, 2, 6, 3), (3, 1, 1, 1, 1, 1))


def size_choices(graph: Graph, fixed: Mapping[str, int]) -> list[dict[str, int]]:
    """A few values for the symbolic sizes of the inputs and states, with those in ``fixed`` as they are given. What has
    been seen before (``past``) is nothing where states hold it, and once where inputs do. Raises UsageError for a name
    that no input has or a size below the least it may have."""
    names = _names_in_order(graph)
    unknown = sorted(set(fixed) - set(names))
    if unknown:
        raise UsageError(f"the model has no size called {', '.join(unknown)}; it has: {', '.join(names) or 'none'}")
    small = [name for name, size in fixed.items() if size < least(name)]
    if small:
        raise UsageError(f"the size {small[0]} must be at least {least(small[0])}, not {fixed[small[0]]}")
    seen = {name for name in names if least(name) == 0}
    held = seen & {name for state in graph.states.values() for d in state.type.shape for name in symbols(d)}
    choices: list[dict[str, int]] = []
    for turn, numbers in enumerate(_CHOICES):
        sizes = {name: numbers[k % len(numbers)] for k, name in enumerate(names)}
        sizes |= dict.fromkeys(seen if turn == 1 else held, 0)
        sizes |= fixed
        if sizes not in choices:
            choices.append(sizes)
    return choices


def _names_in_order(graph: Graph) -> list[str]:
    """The sizes in the order in which the inputs mention them; a plain dimension before one in a formula."""
    plain = [str(d) for v in graph.inputs for d in v.type.shape if str(d).isidentifier()]
    return list(dict.fromkeys([*plain, *sorted(graph.size_names())]))


def random_feeds(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """An array for every input: normal numbers for floats, indices below what they index, else zeros and ones.

    Of zeros and ones (masks) three quarters are ones, and so is the first along the last axis: then no query of a
    causal attention is left without a key.
    """
    rng = np.random.default_rng(seed)
    limits = index_limits(graph, sizes)
    return {v.name: _random(rng, v.type, sizes, limits.get(v)) for v in graph.inputs}


def _random(rng: np.random.Generator, type: TensorType, sizes: Mapping[str, int], limit: int | None) -> Array:
    shape = type.concrete(sizes)
    if type.dtype.is_float:
        return rng.standard_normal(shape).astype(type.dtype.numpy)
    if type.dtype.is_integer and limit is not None:
        top = min(max(limit, 1), 2 ** (type.dtype.bits - 1))
        return np.asarray(rng.integers(0, top, shape)).astype(type.dtype.numpy)
    flags = np.asarray(rng.random(shape) < 0.75)
    if flags.ndim:
        flags[..., :1] = True
    return flags.astype(type.dtype.numpy)


# Operators whose result holds elements of these operands (all of them for None) and no others.
_MOVES: dict[str, tuple[int, ...] | None] = {
    "reshape": (0,),
    "transpose": (0,),
    "expand": (0,),
    "slice": (0,),
    "cast": (0,),
    "concat": None,
    "gather": (0,),
    "gather_elements": (0,),
    "gather_nd": (0,),
    "where": (1, 2),
    "min": (0, 1),
    "max": (0, 1),
    "reduce_max": (0,),
    "reduce_min": (0,),
    "relu": (0,),
}


def index_limits(graph: Graph, sizes: Mapping[str, int]) -> dict[Value, int]:
    """For each value that becomes an index further on, the number that its elements must stay below."""
    limits: dict[Value, int] = {}
    for node in reversed(list(graph.nodes)):
        for position, value in enumerate(node.inputs):
            if value is None or not value.dtype.is_integer:
                continue
            limit = _limit(node, position, limits, sizes)
            if limit is not None:
                limits[value] = min(limit, limits.get(value, limit))
    return limits


def _limit(node: Node, position: int, limits: Mapping[Value, int], sizes: Mapping[str, int]) -> int | None:
    """What a node asks of its operand: indices below the axis, moved elements what their new place asks."""
    name = node.op.name
    if name in ("gather", "gather_elements", "gather_nd") and position == 1:
        return _axis_size(node, sizes)
    if name == "quantised_gather" and position == 0:
        return int(str(node.operands[1].shape[0]))
    later = limits.get(node.output)
    if later is None:
        return None
    if name in _MOVES:
        moved = _MOVES[name]
        return later if moved is None or position in moved else None
    if name in ("add", "sub", "mul") and len(node.operands) == 2:
        other = node.operands[1 - position].constant
        if other is None or other.is_missing or not other.size:
            return None
        low, high = int(other.array.min()), int(other.array.max())
        if name == "add":
            return later - high
        if name == "sub" and position == 0:
            return later + low
        if name == "mul" and low > 0:
            return (later - 1) // high + 1
    return None


def _axis_size(node: Node, sizes: Mapping[str, int]) -> int | None:
    """The size of the axis that a gather indexes, the smallest of them when there are several."""
    shape = node.operands[0].type.shape
    if node.op.name == "gather_nd":
        width, batch = node.operands[1].type.shape[-1], node.attr("batch_dims")
        axes = shape[batch : batch + width] if isinstance(width, int) else ()
    else:
        axes = (shape[node.attr("axis")],)
    try:
        return min((evaluate_dim(d, sizes) for d in axes), default=None)
    except KeyError:
        return None


def cases(graph: Graph, fixed: Mapping[str, int], seed: int) -> Iterator[tuple[dict[str, int], dict[str, Array]]]:
    """Sizes and feeds to compare at."""
    for number, sizes in enumerate(size_choices(graph, fixed)):
        yield sizes, random_feeds(graph, sizes, seed + number)
