"""What convolutions and pooling have in common: kernels, strides and padding along the spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir import Dim, Value
from .context import Context

__all__ = ["Windows", "pad_space", "read_windows"]


@dataclass(frozen=True)
class Windows:
    """One entry a spatial axis. The axis, with ``before`` and ``after`` elements added, holds ``count`` windows."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Dim, ...]
    after: tuple[Dim, ...]
    extra: tuple[Dim, ...]
    """What the last window of ``ceil_mode`` reaches beyond the padding."""
    count: tuple[Dim, ...]


def read_windows(context: Context, space: Sequence[Dim], kernel: Sequence[int]) -> Windows:
    """The node's strides, dilations, pads, auto_pad and ceil_mode, for an operand with these spatial axes."""
    rank = len(space)
    strides = context.ints_attr("strides") or [1] * rank
    dilations = context.ints_attr("dilations") or [1] * rank
    pads: Sequence[Dim] = context.ints_attr("pads") or [0] * (2 * rank)
    mode = context.str_attr("auto_pad", "NOTSET")
    if not len(kernel) == len(strides) == len(dilations) == rank or len(pads) != 2 * rank:
        raise context.error(f"kernel, strides, dilations and pads must have one entry for each of {rank} axes")
    if min([*kernel, *strides, *dilations]) < 1 or any(p < 0 for p in context.ints_attr("pads") or ()):
        raise context.error("kernel, strides and dilations must be at least 1, pads at least 0")
    before, after, extra, count = list(pads[:rank]), list(pads[rank:]), [], []
    ceil = bool(context.int_attr("ceil_mode", 0))
    for k, size in enumerate(space):
        reach, stride = (kernel[k] - 1) * dilations[k] + 1, strides[k]
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            windows = (size + stride - 1) // stride
            total = context.sizes.maximum((windows - 1) * stride + reach - size, 0)
            small = total // 2
            before[k], after[k] = (small, total - small) if mode == "SAME_UPPER" else (total - small, small)
        elif mode == "VALID":
            before[k] = after[k] = 0
        elif mode != "NOTSET":
            raise context.unsupported(f"auto_pad {mode} is not known")
        room = size + before[k] + after[k] - reach
        if ceil and mode == "NOTSET":
            # A window that would begin in the padding behind the data is left out.
            windows = (room + stride - 1) // stride + 1
            windows = context.sizes.minimum(windows, (size + before[k] - 1) // stride + 1)
            extra.append(context.sizes.maximum((windows - 1) * stride - room, 0))
        else:
            windows = room // stride + 1
            extra.append(0)
        count.append(windows)
    return Windows(
        tuple(kernel), tuple(strides), tuple(dilations), tuple(before), tuple(after), tuple(extra), tuple(count)
    )


def pad_space(context: Context, x: Value, before: Sequence[Dim], after: Sequence[Dim], value: float | int) -> Value:
    """``x`` with elements added at its spatial axes, the last ones."""
    if all(w == 0 for w in (*before, *after)):
        return x
    lead = (0,) * (x.type.rank - len(before))
    return context.b("pad", x, value, before=(*lead, *before), after=(*lead, *after))
