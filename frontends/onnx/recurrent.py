"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import Value
from .contents import Undecided
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]

_ACTIVATIONS = {"RNN": ["tanh"], "GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"]}
"""Operator → the activations of one direction that it has unless it says otherwise."""


def _check(context: Context, directions: int) -> None:
    usual = _ACTIVATIONS[context.op_type] * directions
    given = [x.decode() if isinstance(x, bytes) else str(x) for x in context.attr("activations") or usual]
    if [name.lower() for name in given] != usual:
        raise context.unsupported(f"the activations are {', '.join(given)}; only {', '.join(usual)} are known")
    for name in ("activation_alpha", "activation_beta"):
        context.attr(name)  # sigmoid and tanh have none
    if context.attr("clip") is not None:
        raise context.unsupported("clipped gates are not known")
    if context.op_type == "LSTM" and (context.int_attr("input_forget", 0) or context.has(7)):
        raise context.unsupported("peepholes and coupled gates are not known; export the layer without them")
    if context.attr("output_sequence") not in (None, 0, 1):
        raise context.error("output_sequence is 0 or 1")


def _check_lengths(context: Context, length: object) -> None:
    """Every sequence must be as long as the tensor."""
    if not context.has(4):
        return
    try:
        entries = list(context.content(4).reshape(-1))
    except Undecided:
        raise context.unsupported(
            f"the lengths of the sequences ({context.item(4).name}) are computed; export the layer without them"
        ) from None
    if any(entry != length for entry in entries):
        raise context.unsupported(f"the sequences have the lengths {entries}, but must all have {length}")


def _recurrent(context: Context) -> Sequence[Result]:
    """With ``layout`` 1 the batch comes first, in the operands as in the results."""
    b = context.b
    direction = context.str_attr("direction", "forward").lower()
    w, r, bias = context.value(1), context.value(2), context.optional(3)
    _check(context, 2 if direction == "bidirectional" else 1)
    hidden = context.int_attr("hidden_size", int(str(r.shape[-1])))
    batch_first = bool(context.int_attr("layout", 0))

    def turned(value: Value | None) -> Value | None:
        """The first two axes exchanged where the batch comes first."""
        if value is None or not batch_first:
            return value
        return b.transpose(value, (1, 0, *range(2, value.type.rank)))

    x = turned(context.value(0))
    assert x is not None
    _check_lengths(context, x.shape[0])
    initial = [turned(context.optional(k)) for k in ((5, 6) if context.op_type == "LSTM" else (5,))]
    attrs: dict[str, Any] = {"hidden": hidden, "direction": direction}
    if context.op_type == "GRU":
        attrs["linear_before_reset"] = bool(context.int_attr("linear_before_reset", 0))
    y, *last = b.multi(context.op_type.lower(), x, w, r, bias, *initial, **attrs)
    if batch_first:
        y = b.transpose(y, (2, 0, 1, 3))
    return [y, *(turned(v) for v in last)]


HANDLERS: dict[str, Handler] = {"RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent}
"""ONNX operator → handler."""
