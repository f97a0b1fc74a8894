"""Whether ONNX Runtime's GroupQueryAttention means the same as an attention, decided from its attributes alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from ...ir import Dim, DType, Expr, MaskSet, Node, ParseError, SymDim, Value
from ...ir.dims import symbol_and_offset
from ...ir.expr import Var, variables
from ...ir.ops.attention import DOT
from .scores import added_bias, is_finite, soft_cap

__all__ = ["Grouped", "Held", "plan"]

_S = Var("s")


@dataclass(frozen=True)
class Held:
    """Keys or values: ``node`` puts those that are ``new`` [b, g, n, d] behind the ``past`` ones in ``state``. ``read``
    are those where they are a value of their own, None where ``node`` appends to the state itself."""

    node: Node
    new: Value
    past: Dim
    state: str
    read: Value | None


@dataclass(frozen=True)
class Grouped:
    """What the kernel gets: keys and values, the scale, how many keys a query sees at most (0: all up to its own), how
    scores are capped and what is added to them then."""

    key: Held
    value: Held
    scale: float
    window: int = 0
    softcap: float = 0.0
    bias: Expr | None = None


def plan(node: Node) -> Grouped | None:
    """How the node is said with GroupQueryAttention, or None when that kernel means something else or lacks something.

    Checked with ONNX Runtime 1.32 on the CPU: query i sees the keys j <= i + past, with a window of w those with
    i + past - j < w; a cap is applied before what is added; heads have a multiple of 8 features; as many keys as
    queries are new, so a single query, the last, is one of as many as there are new keys. It computes half precisions
    as they are, ours in float32, and it would give NaN for a query that sees no key: with a ``where`` the rows that
    see none are replaced afterwards, without one every query sees at least the key at its own place.
    """
    if node.op.name != "attention" or not _is_plain(node):
        return None
    q, k, v = node.operands[:3]
    key, value = _held(k), _held(v)
    if key is None or value is None or key.state == value.state or (key.read is None) != (value.read is None):
        return None
    n, new = q.shape[2], key.new.shape[2]
    if new != value.new.shape[2] or key.past != value.past or n not in (new, 1):
        return None
    offset = key.past if n == new else key.past + new - 1
    window = _window(node.attr("mask"), offset, n, k.shape[2])
    if window is None or not _where_fits(node) or not _sink_fits(node):
        return None
    score = node.attr("score")
    if score == _S:
        return Grouped(key, value, node.attr("scale"), window)
    cap = soft_cap(score)
    if cap is not None:
        return Grouped(key, value, node.attr("scale") * cap[0] * cap[1], window, cap[0])
    bias = added_bias(score)
    fits = bias is not None and is_finite(node, bias)
    return Grouped(key, value, node.attr("scale"), window, bias=bias) if fits else None


def _is_plain(node: Node) -> bool:
    """Whether it is a softmax of products in types and sizes that the kernel takes."""
    q, k, v = node.operands[:3]
    width, scale = q.shape[3], node.attr("scale")
    return (
        q.dtype is DType.FLOAT32
        and isinstance(width, int)
        and width == v.shape[3]
        and width % 8 == 0
        and isinstance(q.shape[1], int)
        and isinstance(k.shape[1], int)
        and scale != 0
        and math.isfinite(scale)
        and node.attr("inner") == DOT
        and node.attr("normalise") == "softmax"
        and not node.attr("weights")
    )


def _held(x: Value) -> Held | None:
    """What makes ``x`` of past and new keys, along their axis: an append that nothing else reads, or a joining."""
    node = x.producer
    if node is None:
        return None
    if node.op.name == "state_append" and node.attr("axis") % 4 == 2:
        past = node.graph.states[node.attr("state")].type.shape[2]
        alone = len(x.uses) == 1 and not x.is_output
        is_symbol = isinstance(past, SymDim) and symbol_and_offset(past) == (str(past), 0)
        return Held(node, node.operands[0], past, node.attr("state"), None) if alone and is_symbol else None
    if node.op.name == "concat" and node.attr("axis") % 4 == 2 and len(node.operands) == 2:
        read, new = node.operands
        source = read.producer
        if source is not None and source.op.name == "state_read":
            return Held(node, new, read.shape[2], source.attr("state"), read)
    return None


def _where_fits(node: Node) -> bool:
    where = node.attr("where")
    return where is None or ("h" not in variables(where) and node.attr("empty") in ("zeros", "mean"))


def _sink_fits(node: Node) -> bool:
    sink = node.attr("sink")
    return sink is None or not variables(sink) & {"b", "i", "j"}


def _window(mask: MaskSet | None, offset: Dim, n: Dim, m: Dim) -> int | None:
    """0 where the mask is causal at the offset, w where it is that and a window of w; else None."""
    return None if mask is None else _window_of(mask.text, f"({offset})", f"({n})", f"({m})")


@lru_cache(maxsize=256)
def _window_of(mask: str, offset: str, n: str, m: str) -> int | None:
    names = sorted(set(re.findall(r"[A-Za-z_]\w*", f"{offset} {n} {m}")))
    sizes = " and ".join(f"{name} >= 0" for name in names) or "true"
    context = f"b >= 0 and h >= 0 and 0 <= i and i < {n} and 0 <= j and j < {m} and {sizes}"
    lengths = {"n": n, "m": m}
    condition = re.sub(r"^\[[^\]]*\] -> ", "", mask)
    condition = re.sub(r"[A-Za-z_]\w*", lambda found: lengths.get(found[0], found[0]), condition)
    try:
        given, causal = MaskSet(condition), MaskSet(f"j <= i + {offset}")
        if not given.is_subset(causal, context):
            return None
        if causal.is_subset(given, context):
            return 0
        numbers = {int(text) for text in re.findall(r"\d+", condition)}
        for w in sorted(numbers | {number + 1 for number in numbers}):
            windowed = MaskSet(f"j <= i + {offset} and i + {offset} - j < {w}")
            if w > 0 and given.is_subset(windowed, context) and windowed.is_subset(given, context):
                return w
    except ParseError:
        pass  # a size that is no affine expression
    return None
