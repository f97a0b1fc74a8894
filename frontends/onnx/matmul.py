"""Matrix products and contractions."""

from __future__ import annotations

import numpy as np

from ...ir import Dim, Tensor, Value, product
from .blocks import blocked_product
from .context import Context, Handler

__all__ = ["HANDLERS"]


def _matmul(context: Context) -> Value:
    x, y = context.value(0), context.value(1)
    return blocked_product(context, x, y) or context.b.matmul(x, y)


def _gemm(context: Context) -> Value:
    """alpha · A B + beta · C, A and B transposed on demand."""
    x, y, b = context.value(0), context.value(1), context.b
    x = b.transpose(x, (1, 0)) if context.int_attr("transA", 0) else x
    y = b.transpose(y, (1, 0)) if context.int_attr("transB", 0) else y
    product = blocked_product(context, x, y) or b.matmul(x, y)
    z = _scaled(context, product, context.float_attr("alpha", 1.0))
    beta = context.float_attr("beta", 1.0)
    if not context.has(2) or beta == 0:
        return z
    return b.add(z, _scaled(context, context.value(2), beta))


def _scaled(context: Context, x: Value, factor: float) -> Value:
    return x if factor == 1 else context.b.mul(x, context.b.constant(Tensor(np.asarray(factor), x.dtype)))


def _einsum(context: Context) -> Value:
    """Pair by pair from the left: batch letters lead, contracted ones meet in a matrix product."""
    operands = [context.value(k) for k in range(len(context.items))]
    terms, result = _parse(context, context.str_attr("equation", ""), [v.type.rank for v in operands])
    for k, term in enumerate(terms):
        operands[k], terms[k] = _diagonal(context, operands[k], term)
    value, letters = operands[0], terms[0]
    for k, (other, more) in enumerate(zip(operands[1:], terms[1:], strict=True), 2):
        needed = set(result).union(*terms[k:])
        value, letters = _contract(context, (value, letters), (other, more), needed)
    value, letters = _sum_out(context, value, letters, set(result))
    return context.b.transpose(value, [letters.index(x) for x in result]) if letters != result else value


def _parse(context: Context, equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Letters per operand and of the result; an ellipsis becomes letters of its own."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        raise context.error(f"{equation!r} names {len(parts)} operands, not {len(ranks)}")
    spare = [chr(0x391 + k) for k in range(16)]  # Greek letters, which an equation does not use
    widest = max((r - len(p.replace("...", "")) for p, r in zip(parts, ranks, strict=True) if "..." in p), default=0)
    dots = "".join(spare[:widest])
    terms = []
    for part, rank in zip(parts, ranks, strict=True):
        own = rank - len(part.replace("...", ""))
        term = part.replace("...", dots[widest - own :]) if "..." in part else part
        if len(term) != rank:
            raise context.unsupported(f"{part!r} of {equation!r} for an operand of rank {rank}")
        terms.append(term)
    if not arrow:
        letters = [x for x in sorted(set("".join(parts)) - {"."}) if left.count(x) == 1]
        right = ("..." if "..." in left else "") + "".join(letters)
    return terms, right.replace("...", dots)


def _diagonal(context: Context, value: Value, letters: str) -> tuple[Value, str]:
    """A letter that stands twice walks along the diagonal: the sum along its later axis of what lies there."""
    b = context.b
    for letter in sorted(set(letters)):
        while letters.count(letter) > 1:
            first, later = letters.index(letter), letters.rindex(letter)
            shape = [d if k in (first, later) else 1 for k, d in enumerate(value.shape)]
            on = b("equal", *(b("iota", shape=tuple(shape), axis=k) for k in (first, later)))
            zero = b.constant(Tensor(np.zeros((), value.dtype.numpy)))
            value = b("reduce_sum", b("where", on, value, zero), axes=(later,))
            letters = letters[:later] + letters[later + 1 :]
    return value, letters


def _sum_out(context: Context, value: Value, letters: str, needed: set[str]) -> tuple[Value, str]:
    gone = tuple(k for k, x in enumerate(letters) if x not in needed)
    if not gone:
        return value, letters
    return context.b("reduce_sum", value, axes=gone), "".join(x for x in letters if x in needed)


def _contract(
    context: Context, left: tuple[Value, str], right: tuple[Value, str], needed: set[str]
) -> tuple[Value, str]:
    b = context.b
    x, xs = _sum_out(context, *left, needed | set(right[1]))
    y, ys = _sum_out(context, *right, needed | set(left[1]))
    shared = [c for c in xs if c in ys]
    batch = [c for c in shared if c in needed]
    inner = [c for c in shared if c not in needed]
    rows, columns = [c for c in xs if c not in ys], [c for c in ys if c not in xs]
    sizes: dict[str, Dim] = dict(zip(ys, y.shape, strict=True))
    for c, d in zip(xs, x.shape, strict=True):
        if sizes.get(c, 1) == 1:
            sizes[c] = d
    x = b.transpose(x, [xs.index(c) for c in (*batch, *rows, *inner)])
    y = b.transpose(y, [ys.index(c) for c in (*batch, *inner, *columns)])
    lead_x, lead_y = x.shape[: len(batch)], y.shape[: len(batch)]
    width = product(sizes[c] for c in inner)
    x = b.reshape(x, (*lead_x, product(sizes[c] for c in rows), width))
    y = b.reshape(y, (*lead_y, width, product(sizes[c] for c in columns)))
    z = b.matmul(x, y)
    order = (*batch, *rows, *columns)
    return b.reshape(z, tuple(sizes[c] for c in order)), "".join(order)


HANDLERS: dict[str, Handler] = {"MatMul": _matmul, "Gemm": _gemm, "Einsum": _einsum}
"""ONNX operator → handler."""
