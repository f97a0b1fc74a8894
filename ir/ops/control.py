"""Control flow: operators that run a region, a closed graph that sees only its inputs and its constants.

The sizes that a region's types mention are its own: a region input ``float32[k, 4]`` takes any operand with 4 columns,
and ``k`` is what that operand has there. Result types are the region's output types in the outer graph's sizes. A
size that only a run knows (how often a loop ran, how long a carried tensor grew) needs a name: the attributes
``length`` and ``sizes`` give them, in the order in which the results need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..dims import Dim, SymDim, substitute_dim, symbol, symbols
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

if TYPE_CHECKING:
    from ..graph import Graph


class Cond(Operator):
    """The results of the region ``then`` where ``pred`` holds, else those of ``else``; both get the captures.

    The branches give as many results, of the same dtypes and ranks. Where they differ in a dimension, ``sizes`` names
    the result's: a list with one symbol for each such dimension, in order.
    """

    name = "cond"
    inputs = ("pred", "captures*")
    regions = ("then", "else")
    attributes: ClassVar[Mapping[str, Attr]] = {"sizes": Attr("dim*", ())}

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        if call.type(0) != TensorType(DType.BOOL, ()):
            raise call.error("pred must be bool[]")
        both = [_output_types(call, r, _match(call, r, range(1, len(call.types)))) for r in call.regions]
        if len(both[0]) != len(both[1]):
            raise call.error(f"the branches give {len(both[0])} and {len(both[1])} results")
        names = _Names(call)
        results = []
        for position, (a, b) in enumerate(zip(*both, strict=True)):
            if a.dtype is not b.dtype or a.rank != b.rank:
                raise call.error(f"result {position} is {a} in one branch and {b} in the other")
            shape = [d if d == e else names.take(f"result {position}: {d} or {e}") for d, e in _pairs(a, b)]
            results.append(a.with_shape(tuple(shape)))
        names.finish()
        return tuple(results)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        assert run.call_region is not None
        return tuple(run.call_region(run.regions[0 if inputs[0] else 1], inputs[1:]))

    def samples(self) -> Iterable[Sample]:
        x, y = np.array([1.5, -2.0], np.float32), np.array([4.0, 0.5], np.float32)
        vector = "float32[k]"
        then = _region(f"""
            region @then(%x: {vector}, %y: {vector}) {{
              %z = add(%x, %y): {vector}
              return z = %z
            }}""")
        other = _region(f"""
            region @else(%x: {vector}, %y: {vector}) {{
              %z = mul(%x, float32(-1)): {vector}
              return z = %z
            }}""")
        yield Sample((np.array(True), x, y), {}, (x + y,), (then, other))
        yield Sample((np.array(False), x, y), {}, (-x,), (then, other))


class Loop(Operator):
    """A loop as ONNX Loop has it: body(iteration, condition, carried…, captures…) → (condition, carried…, scanned…).

    The body runs while fewer than ``trip_count`` iterations are done (absent: no limit) and the condition holds, which
    is the operand (absent: true) before the first and the body's first result before each other iteration. The first
    ``carried`` of the values are handed from iteration to iteration, the others go to each as they are. The results are
    the last carried values and the scanned outputs of all iterations, stacked on a new first axis.

    ``length`` is the size of that axis: a number or an expression where it is known before, else a symbol of its own;
    it must be given when there are scanned outputs. ``sizes`` names each dimension of a carried value (and then of a
    scanned one) that may change from one iteration to the next.
    """

    name = "loop"
    inputs = ("trip_count?", "condition?", "values*")
    regions = ("body",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "carried": Attr("int"),
        "length": Attr("dim", None),
        "sizes": Attr("dim*", ()),
    }

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        body, carried = call.regions[0], call.attr("carried")
        scalars = (TensorType(DType.INT64, ()), TensorType(DType.BOOL, ()))
        for t, scalar, what in zip(call.types, scalars, ("trip_count", "condition"), strict=False):
            if t is not None and t != scalar:
                raise call.error(f"{what} must be {scalar}")
        if not 0 <= carried <= max(len(call.types) - 2, 0):
            raise call.error(f"carried is {carried}, but there are {max(len(call.types) - 2, 0)} values")
        if len(body.outputs) < 1 + carried or body.outputs[0].value.type != scalars[1]:
            raise call.error(f"the region must give its condition (bool[]) and {carried} carried values")
        if tuple(v.type for v in body.inputs[:2]) != scalars:
            raise call.error("the region's first inputs must be the iteration (int64[]) and the condition (bool[])")
        varying = self._varying(call)
        outputs = _output_types(call, body, _match(call, body, range(2, len(call.types)), 2, varying))[1:]
        known = _outer_symbols(call)
        names = _Names(call)
        results = []
        for position, output in enumerate(outputs):
            if position < carried:
                start = call.type(2 + position)
                shape = [
                    d if d == e and not symbols(e) - known else names.take(f"carried {position}, which begins as {d}")
                    for d, e in _pairs(start, output)
                ]
            else:
                if call.attr("length") is None:
                    raise call.error("there are scanned outputs: length must say or name how many iterations there are")
                shape = [call.attr("length")]
                for d in output.shape:
                    shape.append(d if not symbols(d) - known else names.take(f"scanned {position - carried}: {d}"))
            results.append(output.with_shape(tuple(shape)))
        names.finish()
        if call.attr("length") is not None and len(outputs) == carried:
            raise call.error("length is given, but nothing is scanned")
        return tuple(results)

    def _varying(self, call: Call) -> frozenset[str]:
        """The body's sizes that change between iterations: those of carried inputs that come out with another size,
        and, in turn, what is computed from them."""
        body, carried = call.regions[0], call.attr("carried")
        varying: frozenset[str] = frozenset()
        while True:
            mapping = _match(call, body, range(2, len(call.types)), 2, varying)
            found = set(varying)
            for position in range(carried):
                inside, start = body.inputs[2 + position].type, call.type(2 + position)
                output = body.outputs[1 + position].value.type
                if output.dtype is not start.dtype or output.rank != start.rank:
                    raise call.error(f"carried {position} begins as {start} and leaves the region as {output}")
                own = frozenset(mapping) | varying
                for d, e, first in zip(inside.shape, output.shape, start.shape, strict=True):
                    same = symbols(e) <= own and not symbols(e) & varying and substitute_dim(e, mapping) == first
                    if not same and isinstance(d, int) and d != e:
                        raise call.error(f"carried {position} leaves as {output}, but the region takes {inside}")
                    if not same:
                        found |= symbols(d)
            if found == varying:
                return varying
            varying = frozenset(found)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        assert run.call_region is not None
        carried = run.attrs["carried"]
        limit, condition, *values = (*inputs, None, None)[: max(len(inputs), 2)]
        state, captures = list(values[:carried]), list(values[carried:])
        scanned: list[list[Array]] = [[] for _ in run.types[carried:]]
        holds = condition is None or bool(condition)
        done = 0
        while holds and (limit is None or done < int(limit)):
            head = [np.asarray(done, np.int64), np.asarray(holds)]
            again, *results = run.call_region(run.regions[0], [*head, *state, *captures])
            holds = bool(again)
            state = results[:carried]
            for rows, row in zip(scanned, results[carried:], strict=True):
                rows.append(row)
            done += 1
        stacks = [_stack(run, carried + k, rows, 0) for k, rows in enumerate(scanned)]
        return (*state, *stacks)

    def samples(self) -> Iterable[Sample]:
        powers = _region("""
            region @body(%i: int64[], %c: bool[], %x: float32[k], %w: float32[k]) {
              %y = mul(%x, %w): float32[k]
              %top = reduce_max(%y): float32[]
              %go = less(%top, float32(20)): bool[]
              return go = %go, x = %y, seen = %x
            }""")
        x, w = np.array([1, 1], np.float32), np.array([2, 3], np.float32)
        seen = np.array([[1, 1], [2, 3], [4, 9]], np.float32)
        attrs = {"carried": 1, "length": "steps"}
        start = (np.array(9), np.array(True), x, w)
        yield Sample(start, attrs, (np.array([8, 27], np.float32), seen), (powers,))
        yield Sample((np.array(2), None, x, w), attrs, (np.array([4, 9], np.float32), seen[:2]), (powers,))
        yield Sample((None, np.array(False), x, w), attrs, (x, seen[:0]), (powers,))
        grow = _region("""
            region @body(%i: int64[], %c: bool[], %x: int64[k]) {
              %one = reshape(%i) {shape = [1]}: int64[1]
              %y = concat(%x, %one) {axis = 0}: int64[k + 1]
              return c = %c, x = %y
            }""")
        grown = np.array([7, 0, 1, 2])
        yield Sample((np.array(3), None, grown[:1]), {"carried": 1, "sizes": ("grown",)}, (grown,), (grow,))


class Scan(Operator):
    """A loop over an axis as ONNX Scan has it: body(states…, slices…, captures…) → (states…, scanned…).

    The values are ``states`` initial states, then ``sequences`` sequences of one length, then captures. Iteration t
    gets element t of each sequence along its entry of ``axes`` (default 0), counted from the end where its entry of
    ``reverse`` is true. The results are the last states, of the shapes they had, and the scanned outputs, stacked on a
    new axis (``output_axes``, default 0) in the order of the iterations or, with ``output_reverse``, backwards.
    """

    name = "scan"
    inputs = ("values*",)
    regions = ("body",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "states": Attr("int"),
        "sequences": Attr("int"),
        "axes": Attr("int*", None),
        "reverse": Attr("bool*", None),
        "output_axes": Attr("int*", None),
        "output_reverse": Attr("bool*", None),
    }

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        body, states, count = call.regions[0], call.attr("states"), call.attr("sequences")
        if states < 0 or count < 1 or states + count > len(call.types):
            raise call.error(f"states is {states}, sequences (1 or more) {count}, of {len(call.types)} values")
        scanned = len(body.outputs) - states
        if scanned < 0:
            raise call.error(f"the region gives {len(body.outputs)} results, fewer than its {states} states")
        for attr, wanted in (
            ("axes", count),
            ("reverse", count),
            ("output_axes", scanned),
            ("output_reverse", scanned),
        ):
            if call.attr(attr) is not None and len(call.attr(attr)) != wanted:
                raise call.error(f"{attr} must have {wanted} entries")
        operands = [call.type(k) for k in range(len(call.types))]
        length: Dim | None = None
        for k, axis in enumerate(_or_default(call.attr("axes"), 0, count)):
            t = operands[states + k]
            if not -t.rank <= axis < t.rank:
                raise call.error(f"axis {axis} is out of range for sequence {k}, {t}")
            size = t.shape[axis]
            length = size if length is None else length
            call.same_dim(length, size, "the lengths of the sequences")
            operands[states + k] = t.with_shape(tuple(d for a, d in enumerate(t.shape) if a != axis % t.rank))
        assert length is not None
        mapping = _match_types(call, body, operands)
        results = []
        known = _outer_symbols(call)
        for position, output in enumerate(_output_types(call, body, mapping)):
            if position < states:
                if output != operands[position]:
                    raise call.error(f"state {position} begins as {operands[position]} but becomes {output}")
                results.append(output)
                continue
            unknown = {name for d in output.shape for name in symbols(d)} - known
            axis = _or_default(call.attr("output_axes"), 0, scanned)[position - states]
            if unknown or not -output.rank - 1 <= axis <= output.rank:
                raise call.error(f"scanned output {position - states}, {output}, cannot be stacked on axis {axis}")
            at = axis % (output.rank + 1)
            results.append(output.with_shape((*output.shape[:at], length, *output.shape[at:])))
        return tuple(results)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        assert run.call_region is not None
        states, count = run.attrs["states"], run.attrs["sequences"]
        state, captures = list(inputs[:states]), list(inputs[states + count :])
        sequences = []
        axes, reverse = _or_default(run.attrs["axes"], 0, count), _or_default(run.attrs["reverse"], False, count)
        for array, axis, backwards in zip(inputs[states : states + count], axes, reverse, strict=True):
            moved = np.moveaxis(array, axis, 0)
            sequences.append(moved[::-1] if backwards else moved)
        total = len(run.types) - states
        scanned: list[list[Array]] = [[] for _ in range(total)]
        for t in range(len(sequences[0])):
            results = run.call_region(run.regions[0], [*state, *(np.asarray(s[t]) for s in sequences), *captures])
            state = results[:states]
            for rows, row in zip(scanned, results[states:], strict=True):
                rows.append(row)
        axes = _or_default(run.attrs["output_axes"], 0, total)
        reverse = _or_default(run.attrs["output_reverse"], False, total)
        stacks = [
            _stack(run, states + k, rows[::-1] if reverse[k] else rows, axes[k]) for k, rows in enumerate(scanned)
        ]
        return (*state, *stacks)

    def samples(self) -> Iterable[Sample]:
        sums = _region("""
            region @body(%s: float32[k], %x: float32[k], %w: float32[]) {
              %scaled = mul(%x, %w): float32[k]
              %t = add(%s, %scaled): float32[k]
              return s = %t, all = %t
            }""")
        s, w = np.array([1, 2], np.float32), np.array(2, np.float32)
        x = np.array([[1, 10], [2, 20], [3, 30]], np.float32)
        forward = np.array([[3, 22], [7, 62], [13, 122]], np.float32)
        backward = np.array([[7, 62], [11, 102], [13, 122]], np.float32)
        attrs = {"states": 1, "sequences": 1}
        yield Sample((s, x, w), attrs, (forward[-1], forward), (sums,))
        turned = {**attrs, "axes": (1,), "reverse": (True,), "output_axes": (-1,), "output_reverse": (True,)}
        yield Sample((s, x.T, w), turned, (forward[-1], backward[::-1].T), (sums,))
        yield Sample((s, x[:0], w), attrs, (s, x[:0]), (sums,))


class _Names:
    """Hands out the entries of ``sizes``."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.rest: Iterator[Dim] = iter(call.attr("sizes"))

    def take(self, what: str) -> Dim:
        found = next(self.rest, None)
        if found is None:
            raise self.call.error(f"a size that only a run knows ({what}) needs a name in sizes")
        return found

    def finish(self) -> None:
        left = list(self.rest)
        if left:
            raise self.call.error(f"sizes names {', '.join(map(str, left))}, which nothing needs")


def _pairs(a: TensorType, b: TensorType) -> Iterable[tuple[Dim, Dim]]:
    return zip(a.shape, b.shape, strict=True)


def _or_default(given: Sequence[Any] | None, default: Any, count: int) -> Sequence[Any]:
    return (default,) * count if given is None else given


def _outer_symbols(call: Call) -> frozenset[str]:
    return frozenset(name for t in call.types if t is not None for d in t.shape for name in symbols(d))


def _match(
    call: Call, region: Graph, positions: Iterable[int], skip: int = 0, varying: frozenset[str] = frozenset()
) -> dict[str, Dim]:
    """What the region's sizes are when it gets these operands behind ``skip`` inputs of its own."""
    return _match_types(call, region, [call.type(p) for p in positions], skip, varying)


def _match_types(
    call: Call, region: Graph, given: Sequence[TensorType], skip: int = 0, varying: frozenset[str] = frozenset()
) -> dict[str, Dim]:
    wanted = region.inputs[skip:]
    if len(wanted) != len(given):
        raise call.error(f"the region {region.name} has {len(wanted)} inputs for {len(given)} operands")
    for value, t in zip(wanted, given, strict=True):
        if value.dtype is not t.dtype or value.type.rank != t.rank:
            raise call.error(f"the region {region.name} takes {value.type} as {value}, not {t}")
    pairs = [(v, d, e) for v, t in zip(wanted, given, strict=True) for d, e in zip(v.shape, t.shape, strict=True)]
    mapping: dict[str, Dim] = {}
    for _, d, e in pairs:
        if isinstance(d, SymDim) and d.text.isidentifier() and d.text not in varying:
            mapping.setdefault(d.text, e)
    for value, d, e in pairs:
        if not symbols(d) & varying and symbols(d) <= mapping.keys() and substitute_dim(d, mapping) != e:
            raise call.error(f"the region {region.name} takes {value.type} as {value}, but {d} would be {e}")
    return mapping


def _output_types(call: Call, region: Graph, mapping: Mapping[str, Dim]) -> list[TensorType]:
    """The region's output types in the outer graph's sizes. A size of the region that stands for none of them gets a
    name that none of them has."""
    clash = _outer_symbols(call)
    types = [output.value.type for output in region.outputs]
    own = {name for t in types for d in t.shape for name in symbols(d)} - mapping.keys()
    rename: dict[str, Dim] = dict(mapping)
    for name in own:
        fresh = f"{region.name}_{name}" if f"{region.name}_{name}".isidentifier() else f"inner_{name}"
        while fresh in clash:
            fresh += "_"
        rename[name] = symbol(fresh)
    return [t.substitute(rename) for t in types]


def _stack(run: Run, index: int, rows: Sequence[Array], axis: int) -> Array:
    """The rows on a new axis; of none, the declared shape with that axis (and sizes nobody knows) at 0."""
    if rows:
        return np.stack(rows, axis=axis)
    declared = run.types[index]
    shape = [run.dim(d) if symbols(d) <= run.sizes.keys() else 0 for d in declared.shape]
    shape[axis % declared.rank] = 0
    return np.zeros(shape, run.dtype(declared.dtype))


def _region(text: str) -> Graph:
    """A region of a sample."""
    from ..text import parse

    return parse(text.strip().replace("region @", "graph @", 1))


OPS: tuple[Operator, ...] = (Cond(), Loop(), Scan())
