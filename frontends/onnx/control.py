"""If, Loop and Scan: their subgraphs become regions, what they read from outside becomes captures."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ...ir import Dim, DType, Graph, SymDim, TensorType, Value
from .contents import Undecided
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]


def _if(context: Context) -> Sequence[Result]:
    """Where the condition follows from sizes, only the branch that runs; else both."""
    branches = [context.attr("then_branch"), context.attr("else_branch")]
    try:
        chosen = bool(context.content(0).reshape(-1)[0])
    except Undecided:
        pass
    else:
        return context.inline(branches[0 if chosen else 1])
    captured = context.captures(*branches)
    regions = [context.region(branch, [], captured) for branch in branches]
    for a, b in zip(regions[0].outputs, regions[1].outputs, strict=True):
        if a.value.type.rank != b.value.type.rank:
            raise context.unsupported(
                f"its branches give {a.name} as {a.value.type} and {b.value.type}; only results of one rank are known"
            )
    differ = [
        d != e
        for a, b in zip(regions[0].outputs, regions[1].outputs, strict=True)
        for d, e in zip(a.value.shape, b.value.shape, strict=False)
    ]
    sizes = tuple(context.fresh_size(f"size_{k}") for k in range(sum(differ)))
    pred = _scalar(context, context.value(0))
    return context.b.multi("cond", pred, *_realised(context, captured), regions=regions, sizes=sizes)


def _realised(context: Context, captured: Sequence[str]) -> list[Value]:
    return [context.realise(context.outer(name)) for name in captured]


def _scalar(context: Context, value: Value) -> Value:
    return context.b.reshape(value, ())


def _loop(context: Context) -> Sequence[Result]:
    """body(iteration, condition, carried…) → (condition, carried…, scanned…)."""
    body: onnx.GraphProto = context.attr("body")
    carried = [context.value(k) for k in range(2, len(context.items))]
    heads = [TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())]
    captured = context.captures(body)
    region = context.region(body, [*heads, *(v.type for v in carried)], captured)
    _keep_types(context, region, 1, carried)
    scanned = len(region.outputs) - 1 - len(carried)
    trip = _scalar(context, context.value(0)) if context.has(0) else None
    condition = _scalar(context, context.value(1)) if context.has(1) else None
    return context.b.multi(
        "loop", trip, condition, *carried, *_realised(context, captured), regions=[region],
        carried=len(carried), length=_iterations(context, region) if scanned else None,
    )  # fmt: skip


def _iterations(context: Context, region: Graph) -> Dim:
    """How often the body runs: the trip count where nothing stops it earlier, else a size that a run finds out."""
    stops = region.outputs[0].value is not region.inputs[1]
    always = not context.has(1) or (context.is_constant(1) and bool(context.constant(1, "condition").reshape(-1)[0]))
    if context.has(0) and always and not stops:
        try:
            trips = context.content(0).reshape(-1)[0]
        except Undecided:
            pass
        else:
            return trips if isinstance(trips, SymDim) else max(int(trips), 0)
    return context.fresh_size("iterations")


def _keep_types(context: Context, region: Graph, first: int, carried: Sequence[Value]) -> None:
    for output, start in zip(region.outputs[first:], carried, strict=False):
        if output.value.type != start.type:
            raise context.unsupported(
                f"the carried {output.name} begins as {start.type} and becomes {output.value.type} in an iteration; "
                "only values that keep their shape are known"
            )


def _scan(context: Context) -> Sequence[Result]:
    """body(states…, slices…) → (states…, scanned…), as it is since opset 9."""
    if context.version < 9:
        raise context.unsupported(
            "Scan before opset 9, with a batch axis of its own; convert the model to opset 9 or up"
        )
    body: onnx.GraphProto = context.attr("body")
    count = context.int_attr("num_scan_inputs", 0)
    values = [context.value(k) for k in range(len(context.items))]
    states = len(values) - count
    if count < 0 or states < 0:
        raise context.error(f"num_scan_inputs is {count}, but there are {len(values)} operands")
    axes = context.ints_attr("scan_input_axes") or [0] * count
    slices = [
        v.type.with_shape(tuple(d for k, d in enumerate(v.shape) if k != context.axis(axis, v.type.rank)))
        for v, axis in zip(values[states:], axes, strict=True)
    ]
    captured = context.captures(body)
    region = context.region(body, [*(v.type for v in values[:states]), *slices], captured)
    _keep_types(context, region, 0, values[:states])
    scanned = len(region.outputs) - states
    backwards = context.ints_attr("scan_input_directions") or [0] * count
    written_backwards = context.ints_attr("scan_output_directions") or [0] * scanned
    return context.b.multi(
        "scan", *values, *_realised(context, captured), regions=[region], states=states, sequences=count,
        axes=tuple(axes), reverse=tuple(map(bool, backwards)),
        output_axes=tuple(context.ints_attr("scan_output_axes") or [0] * scanned),
        output_reverse=tuple(map(bool, written_backwards)),
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""ONNX operator → handler."""
