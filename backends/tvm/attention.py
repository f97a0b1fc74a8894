"""How an attention is planned: keys packed once, then tiles; few queries go along the keys instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...ir import DType, Node
from ...ir.dims import dim_max, dim_min
from ...ir.expr import variables
from ...ir.ops.attention import DOT, is_linear
from .pieces import Piece, SpecBuilder
from .tuning import AttentionTile, FewQueries
from .views import View

if TYPE_CHECKING:
    from .plan import Planner

__all__ = ["attention_key", "plan_attention", "takes"]

CHUNK = {"chunk": 32}
"""Tokens whose weights linear attention takes one by one, by measurement."""

LARGEST = 128 * 128
"""The largest sum of k vᵀ, in elements, that stays in the second-level cache beside a chunk."""

WIDEST = 512
"""A head of more features would not leave its tile in the first-level cache."""


def takes(node: Node) -> bool:
    """Whether the kernels compute an attention; others are decomposed."""
    q, k, v = (x.shape for x in node.operands[:3])
    static = all(isinstance(d, int) and 0 < d <= WIDEST for d in (q[3], v[3]))
    static = static and all(isinstance(x[1], int) for x in (q, k))
    # Without a mask, linear attention is two matrix products.
    whole = is_linear(node) and not _is_masked(node)
    return static and not node.attr("weights") and node.attr("inner") == DOT and not whole


def _is_masked(node: Node) -> bool:
    mask = node.attr("mask")
    return mask is not None and not mask.is_all


def _by_chunks(node: Node) -> bool:
    """Whether the weights are the products q·k of each query and the keys up to its own, so that a sum of k vᵀ stands
    for the keys of earlier chunks."""
    d, c = node.operands[0].shape[3], node.operands[2].shape[3]
    return is_linear(node) and _is_masked(node) and d * c <= LARGEST


def plan_attention(p: Planner, node: Node) -> Piece:
    from .rules import pack

    q, k, v = (p.view(x) for x in node.operands[:3])
    if v.strides[-1] != 1:
        v = p.solid(v, node.output.name)
    loads = [p.view(x) for x in node.operands[3:]]
    b, h, n, _ = q.shape
    c = v.shape[3]
    # [b, n, h, c] in memory: then the heads lie side by side, as the projection behind reads them.
    made = p.buffer(node.output.dtype, (b, n, h, c))
    out = made.transposed((0, 2, 1, 3))
    options = _options(p, node)
    key = attention_key(node)
    few = p.tuning.of(key, FewQueries()).most
    if not isinstance(n, int) or n <= few:
        _along(p, node, (q, k, v), loads, out, options, None if isinstance(n, int) else (n, 0, few))
    when = None if isinstance(n, int) else (n, few + 1, _LARGE)
    if (not isinstance(n, int) or n > few) and _by_chunks(node):
        spec = SpecBuilder()
        outs = [spec.read(out)]
        chosen = [o for o in options if o[0] in ("scale", "normalise", "repeat", "lanes")]
        p.emit(
            spec, "linear", outs, [spec.read(x) for x in (q, k, v)], [*chosen, *CHUNK.items()], node.output.name, when
        )
    elif not isinstance(n, int) or n > few:
        keys = pack(p, k.transposed((0, 1, 3, 2)), node.output.name, when)
        spec = SpecBuilder()
        outs = [spec.read(out)]
        trees = [spec.read(x) for x in (q, keys, v, *loads)]
        named = ("names", _names(p, node, spec))
        options += [*asdict(p.tuning.of(key, AttentionTile())).items(), named]
        p.emit(spec, "attention", outs, trees, options, node.output.name, when, key)
    return out


def _along(
    p: Planner, node: Node, views: Sequence[View], loads: Sequence[View], out: View, options: Any, when: Any
) -> None:  # fmt: skip
    q, k, v = views
    b, h, n, _ = q.shape
    m, c = v.shape[2:]
    # A part has at least 512 keys; more than 8 parts would not find as many threads.
    parts = dim_max(1, dim_min(8, m // 512))
    wide = DType.FLOAT32 if q.dtype.bits == 16 else q.dtype
    held = [p.buffer(wide, (b, h, n, parts, c)), p.buffer(wide, (b, h, n, parts)), p.buffer(wide, (b, h, n, parts))]
    spec = SpecBuilder()
    outs = [spec.read(x) for x in held]
    trees = [spec.read(x) for x in (q, k, v, *loads)]
    named = ("names", _names(p, node, spec))
    key = attention_key(node)
    few = p.tuning.of(key, FewQueries())
    p.emit(spec, "along", outs, trees, [*options, *asdict(few).items(), named], node.output.name, when, key)
    spec = SpecBuilder()
    outs = [spec.read(out)]
    values = [v] if node.attr("empty") == "mean" else []
    trees = [spec.read(x) for x in (*held, *loads, *values)]
    named = ("names", _names(p, node, spec))
    p.emit(spec, "merge", outs, trees, [*options, ("keys", spec.size(m)), named], node.output.name, when)


_LARGE = 1 << 62


def attention_key(node: Node) -> str:
    """What the tiles of an attention go by."""
    q, k, v = (x.shape for x in node.operands[:3])
    n, m = ("*" if not isinstance(d, int) else str(d) for d in (q[2], k[2]))
    mask = node.attr("mask")
    seen = "all" if mask is None or mask.is_all else mask.text
    heads = f"{q[1]} heads on {k[1]} of width {q[3]} and {v[3]}"
    return f"{node.output.dtype.value} {heads}, {n} queries, {m} keys, {seen}"


def _names(p: Planner, node: Node, spec: SpecBuilder) -> tuple[tuple[str, Any], ...]:
    return tuple((name, spec.size(d)) for name, d in _sizes(p, node).items())


def _options(p: Planner, node: Node) -> list[tuple[str, Any]]:
    mask = node.attr("mask")
    texts = [
        (name, None if node.attr(name) is None else str(node.attr(name))) for name in ("score", "where", "sink")
    ]  # fmt: skip
    heads, groups = node.operands[0].shape[1], node.operands[1].shape[1]
    return [
        ("dtype", node.output.dtype.value),
        ("scale", float(node.attr("scale"))),
        ("mask", None if mask is None or mask.is_all else mask.text),
        *texts,
        ("normalise", node.attr("normalise")),
        ("empty", node.attr("empty")),
        ("loads", tuple(node.attr("loads"))),
        ("repeat", heads // groups),
        ("lanes", p.machine.lanes(node.output.dtype)),
    ]


def _sizes(p: Planner, node: Node) -> Mapping[str, Any]:
    """The sizes that the expressions mention, by name."""
    from ...ir.dims import symbol

    found: set[str] = set()
    mask = node.attr("mask")
    if mask is not None:
        found |= set(mask.params)
    for name in ("score", "where", "sink"):
        e = node.attr(name)
        if e is not None:
            found |= variables(e)
    return {name: symbol(name) for name in sorted(found - {"s", "b", "h", "i", "j", "n", "m"})}
