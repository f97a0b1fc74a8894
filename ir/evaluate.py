"""Evaluation of a graph in NumPy, operator by operator: the definition that every backend is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dims import SymDim, evaluate_dim, least, linear_unknown, symbol_and_offset, symbols
from .errors import AttncError, InputError
from .graph import Graph, Node, State, Value
from .operator import Array, Run
from .types import DType, TensorType

__all__ = ["Kernels", "Observer", "begin", "bind_sizes", "check_feeds", "evaluate", "evaluate_node", "initial_state"]

Observer = Callable[[Node, Sequence[Array]], None]
Kernels = Mapping[str, Callable[..., tuple[Array, ...] | None]]
"""Other ways to compute operators, by name, called as ``Operator.evaluate``; None for a result leaves it to that."""


def evaluate(
    graph: Graph,
    feeds: Mapping[str, Any],
    precision: DType | None = None,
    states: dict[str, Array] | None = None,
    observer: Observer | None = None,
    kernels: Kernels | None = None,
) -> dict[str, Array]:
    """The outputs by name, in the graph's order.

    ``precision`` (float64) computes every float in that dtype. ``states`` holds the state tensors and is updated in
    place when the run has ended: every read sees what a state was before the run, wherever it stands. ``observer``
    sees every node with its results. ``kernels`` stand in for the definitions of operators. Raises InputError for wrong
    feeds, and AttncError that names the node when an operator fails.
    """
    arrays = check_feeds(graph, feeds)
    held = states if states is not None else {}
    sizes = begin(graph, arrays, held)
    writes: dict[str, Array] = {}
    context = _Context(precision, held, writes, observer, kernels or {})
    results = _run(graph, [arrays[v.name] for v in graph.inputs], sizes, context)
    held.update(writes)
    return {output.name: array for output, array in zip(graph.outputs, results, strict=True)}


@dataclass(frozen=True)
class _Context:
    """What all graphs of one evaluation share."""

    precision: DType | None
    states: Mapping[str, Array]
    writes: dict[str, Array]
    observer: Observer | None
    kernels: Kernels


def begin(graph: Graph, arrays: Mapping[str, Array], states: dict[str, Array]) -> dict[str, int]:
    """The sizes of a run with these inputs and states. States that are missing are added as they begin: then what they
    have seen before (``past``) is nothing. The order of inputs does not matter. Raises InputError."""
    types = [(v.type, arrays[v.name].shape, f"input {v.name}") for v in graph.inputs]
    missing = [state for state in graph.states.values() if state.name not in states]
    states.update((s.name, s.initial.array) for s in missing if s.initial is not None)
    held = [(s.type, states[s.name].shape, f"state {s.name}") for s in graph.states.values() if s.name in states]
    sizes: dict[str, int] = {}
    for entry in (*types, *held):
        _learn(*entry, sizes, plain=True)
    for state in missing:
        for name in {name for d in state.type.shape for name in symbols(d) if least(name) == 0}:
            sizes.setdefault(name, 0)
    known = -1
    while len(sizes) > known:
        known = len(sizes)
        for entry in (*types, *held):
            _learn(*entry, sizes)
    for state in missing:
        states.setdefault(state.name, initial_state(state, sizes))
    for state in graph.states.values():
        bind_sizes(state.type, states[state.name].shape, sizes, f"state {state.name}")
    for entry in types:
        bind_sizes(*entry[:2], sizes, entry[2])
    return sizes


def initial_state(state: State, sizes: Mapping[str, int]) -> Array:
    """What a state begins as: its ``initial`` or zeros. Sizes that are not fixed are 0, and so is what has been seen
    before, whatever the inputs say."""
    if state.initial is not None:
        return state.initial.array
    known = _ZeroDefault({name: size for name, size in sizes.items() if least(name) > 0})
    return np.zeros([evaluate_dim(d, known) for d in state.type.shape], state.type.dtype.numpy)


class _ZeroDefault(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def check_feeds(graph: Graph, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """The feeds as arrays of the declared dtypes. A Python number or list is converted, an array of another dtype is
    not, except between integer widths when no value changes. Raises InputError."""
    known = {v.name: v for v in graph.inputs}
    if feeds.keys() != known.keys():
        unknown = sorted(set(feeds) - set(known))
        missing = sorted(set(known) - set(feeds))
        parts = [f"no input is called {', '.join(unknown)}"] if unknown else []
        parts += [f"missing: {', '.join(missing)}"] if missing else []
        wanted = ", ".join(f"{v.name}: {v.type}" for v in graph.inputs) or "none"
        raise InputError(f"{'; '.join(parts)}. The inputs are {wanted}")
    return {name: _as_array(value, feeds[name]) for name, value in known.items()}


def _as_array(value: Value, given: Any) -> Array:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InputError(f"input {value.name} must be {value.type}: {error}") from None
    wanted = value.type.dtype.numpy
    if array.dtype != wanted:
        plain = not isinstance(given, np.ndarray | np.generic)
        both_integer = array.dtype.kind in "iu" and value.type.dtype.is_integer
        numbers = plain and array.dtype.kind in "iuf"
        if not (both_integer or (numbers and (value.type.dtype.is_float or array.size == 0))):
            raise InputError(f"input {value.name} must be {value.type}, not {array.dtype}{list(array.shape)}")
        converted = array.astype(wanted)
        if both_integer and not np.array_equal(converted, array):
            raise InputError(f"input {value.name} has values that do not fit {value.type.dtype}")
        array = converted
    return array


def bind_sizes(type: TensorType, shape: Sequence[int], sizes: dict[str, int], what: str) -> None:
    """Learns the sizes that a shape fixes and checks the others. An axis fixes the only unknown symbol of a linear
    expression, such as ``past`` of ``past + seq`` when ``seq`` is known. Raises InputError."""
    try:
        expected: list[int | None] = [evaluate_dim(d, sizes) for d in type.shape]
    except KeyError:
        _learn(type, shape, what, sizes, plain=True)
        _learn(type, shape, what, sizes)
        expected = [evaluate_dim(d, sizes) if symbols(d) <= sizes.keys() else None for d in type.shape]
    if len(shape) != len(expected):
        raise _wrong_rank(type, shape, what)
    for axis, (wanted, n) in enumerate(zip(expected, shape, strict=True)):
        if wanted is not None and wanted != n:
            raise _wrong_size(type, axis, n, what, sizes)


def _learn(type: TensorType, shape: Sequence[int], what: str, sizes: dict[str, int], plain: bool = False) -> None:
    """Adds the sizes that a shape fixes, with ``plain`` only those that are an axis by themselves."""
    if len(shape) != type.rank:
        raise _wrong_rank(type, shape, what)
    for axis, (d, n) in enumerate(zip(type.shape, shape, strict=True)):
        if not isinstance(d, SymDim):
            continue
        name, offset = symbol_and_offset(d)
        if name:
            if name not in sizes and not (plain and offset):
                sizes[name] = _at_least_zero(int(n) - offset, type, axis, n, what, sizes)
        elif not plain:
            found = linear_unknown(d, sizes)
            if found is not None:
                name, factor, rest = found
                value, left = divmod(int(n) - evaluate_dim(rest, sizes), factor)
                sizes[name] = _at_least_zero(-1 if left else value, type, axis, n, what, sizes)


def _at_least_zero(value: int, type: TensorType, axis: int, n: int, what: str, sizes: Mapping[str, int]) -> int:
    if value < 0:
        raise _wrong_size(type, axis, n, what, sizes)
    return value


def _wrong_rank(type: TensorType, shape: Sequence[int], what: str) -> InputError:
    return InputError(f"{what} must be {type}, not of shape {list(shape)}")


def _wrong_size(type: TensorType, axis: int, n: int, what: str, sizes: Mapping[str, int]) -> InputError:
    known = ", ".join(f"{name} = {sizes[name]}" for name in sorted(symbols(type.shape[axis])) if name in sizes)
    where = f", where {known}" if known else ""
    return InputError(f"{what} must be {type}, but axis {axis} has size {n}{where}")


def _run(
    graph: Graph,
    inputs: Sequence[Array],
    sizes: dict[str, int],
    context: _Context,
) -> list[Array]:
    precision = context.precision
    computed: dict[Value, Array] = {}

    def convert(array: Array, dtype: DType) -> Array:
        return array.astype(precision.numpy, copy=False) if precision and dtype.is_float else array

    for value, array in zip(graph.inputs, inputs, strict=True):
        computed[value] = convert(array, value.dtype)
    kept = {output.value for output in graph.outputs}
    remaining: dict[Value, int] = {}

    def fetch(value: Value) -> Array:
        if value.constant is not None:
            if value not in computed:
                computed[value] = convert(value.constant.array, value.dtype)
            return computed[value]
        return computed[value]

    def call_region(region: Graph, arguments: Sequence[Array]) -> list[Array]:
        inner: dict[str, int] = {}  # a region is closed: its sizes are those of its own inputs
        for value, array in zip(region.inputs, arguments, strict=True):
            bind_sizes(value.type, array.shape, inner, f"region input {value.name}")
        return _run(region, arguments, inner, context)

    for node in graph.nodes:
        operands = [None if v is None else fetch(v) for v in node.inputs]
        types = tuple(v.type for v in node.outputs)
        run = Run(node.attrs, types, sizes, precision, node.regions, context.states, context.writes, call_region)
        outputs = evaluate_node(node, run, operands, context.kernels)
        for result, array in zip(node.outputs, outputs, strict=True):
            bind_sizes(result.type, array.shape, sizes, f"{node.op.name} result {result.name}")
            if result.uses or result in kept:
                computed[result] = array
        if context.observer is not None:
            context.observer(node, outputs)
        for value in node.operands:
            left = remaining.get(value, len(value.uses)) - 1
            remaining[value] = left
            if left == 0 and value not in kept:
                computed.pop(value, None)
        del operands, outputs, array
    return [fetch(output.value) for output in graph.outputs]


def evaluate_node(
    node: Node, run: Run, operands: Sequence[Array | None], kernels: Kernels | None = None
) -> tuple[Array, ...]:
    """The results of one node. Raises AttncError that names the node for whatever NumPy raises."""
    try:
        with np.errstate(all="ignore"):
            kernel = (kernels or {}).get(node.op.name)
            found = kernel(run, *operands) if kernel is not None else None
            result = found if found is not None else node.op.evaluate(run, *operands)
    except AttncError:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        shapes = ", ".join("none" if a is None else f"{a.dtype}{list(a.shape)}" for a in operands)
        raise AttncError(f"{node!r} failed on {shapes}: {error}") from error
    return result if isinstance(result, tuple) else (result,)
