"""The attention operator: any mask, any score, softmax or plain sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..dims import Dim, SymDim, at_least, symbols
from ..expr import Call as FnCall
from ..expr import Const, Expr, Load, Var, is_boolean, parse, variables, walk
from ..expreval import evaluate
from ..exprlower import ExprLowering
from ..graph import Node, Value
from ..maskset import MaskSet, causal
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

AXES = ("b", "h", "i", "j")
SCORE = parse("s")
DOT = parse("q * k")


class Attention(Operator):
    """Scaled dot-product attention and its relatives (Vaswani et al. 2017; Bahdanau et al. 2015; Nadaraya 1964).

    With q[b,h,i,d], k[b,g,j,d], v[b,g,j,c] and g = h // (query heads / key heads):

        s      = scale * sum_d inner(q, k)              inner is q * k unless told otherwise
        s'     = score(s, b, h, i, j)                   any expression, reading operands as loads
        w_j    = e^s'_j / (e^sink + sum_j e^s'_j)       "softmax", over the visible keys j
        w_j    = s'_j / sum_j s'_j   or   s'_j          "sum", "none"
        out_i  = sum_j w_j v_j

    A key is visible where the set ``mask`` and the predicate ``where`` both hold. A query that sees no key gets zeros;
    with ``empty`` "mean" the mean of all values, as when a finite penalty that swallows every score stands for the
    mask, and with "nan" NaN, as a softmax of -inf alone.
    ``loads`` names the operands behind v, in order; n and m are the numbers of queries and keys. With ``weights`` a
    second result is w[b,h,i,j]. Half precisions are computed in float32.
    """

    name = "attention"
    inputs = ("q", "k", "v", "operands*")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "scale": Attr("float", 1.0),
        "mask": Attr("mask", None),
        "where": Attr("expr", None),
        "score": Attr("expr", SCORE),
        "inner": Attr("expr", DOT),
        "normalise": Attr("str", "softmax"),
        "sink": Attr("expr", None),
        "empty": Attr("str", "zeros"),
        "weights": Attr("bool", False),
        "loads": Attr("str*", ()),
    }

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        q, k, v = call.type(0), call.type(1), call.type(2)
        if not q.rank == k.rank == v.rank == 4:
            raise call.error("q, k and v must be [batch, heads, length, width]")
        dtype = call.same_dtype(0, 1, 2)
        if not dtype.is_float:
            raise call.error("q, k and v must be floats")
        for axis, what in ((0, "batch"), (3, "the widths of q and k")):
            call.same_dim(q.shape[axis], k.shape[axis], what)
        for axis, what in ((0, "batch"), (1, "the heads of k and v"), (2, "the numbers of keys and values")):
            call.same_dim(k.shape[axis], v.shape[axis], what)
        heads, groups = q.shape[1], k.shape[1]
        if heads != groups and not (
            isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups == 0
        ):
            raise call.error(f"{heads} query heads are not a multiple of {groups} key heads")
        _check_expressions(call)
        out = TensorType(dtype, (*q.shape[:3], v.shape[3]))
        return (out, TensorType(dtype, (*q.shape[:3], k.shape[2]))) if call.attr("weights") else (out,)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        q, k, v = (x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in inputs[:3])
        loads = dict(zip(run.attrs["loads"], inputs[3:], strict=True))
        tensors = {name: x if x.dtype.kind in "biu" else x.astype(q.dtype, copy=False) for name, x in loads.items()}
        batch, heads, n, width = q.shape
        groups, m = k.shape[1], k.shape[2]
        dims = (batch, heads, n, m)
        names: dict[str, Any] = {
            name: np.arange(size).reshape([-1 if a == axis else 1 for a in range(4)])
            for axis, (name, size) in enumerate(zip(AXES, dims, strict=True))
        }
        names.update(run.sizes)
        names.update(n=n, m=m)
        repeat = heads // max(groups, 1)
        q5 = q.reshape(batch, groups, repeat, n, width)
        if run.attrs["inner"] == DOT:
            s = np.matmul(q5, k[:, :, None].swapaxes(-1, -2)).reshape(dims)
        else:
            five = {name: x[..., None] if isinstance(x, np.ndarray) else x for name, x in names.items()}
            five |= {"q": q[:, :, :, None], "d": np.arange(width)}
            five["k"] = np.repeat(k, repeat, axis=1)[:, :, None]
            terms = evaluate(run.attrs["inner"], five, tensors, dtype=q.dtype)
            s = np.broadcast_to(terms, (*dims, width)).sum(-1)
        s = s * np.asarray(run.attrs["scale"], s.dtype)
        if run.attrs["score"] != SCORE:
            s = np.broadcast_to(evaluate(run.attrs["score"], names | {"s": s}, tensors, dtype=q.dtype), dims)
            s = s.astype(q.dtype, copy=False)
        seen = self._visible(run, names, tensors, dims)
        sink = run.attrs["sink"]
        extra = None if sink is None else np.asarray(evaluate(sink, names, tensors, dtype=q.dtype), q.dtype)
        w = _normalise(s, seen, run.attrs["normalise"], extra)
        if run.attrs["empty"] != "zeros" and seen is not None:
            alone = 1 / max(m, 1) if run.attrs["empty"] == "mean" else np.nan
            w = np.where(seen.any(-1, keepdims=True), w, np.asarray(alone, w.dtype))
        o = np.matmul(w.reshape(batch, groups, repeat, n, m), v[:, :, None]).reshape(batch, heads, n, v.shape[3])
        out = o.astype(inputs[0].dtype, copy=False)
        return (out, w.astype(inputs[0].dtype, copy=False)) if run.attrs["weights"] else (out,)

    def _visible(
        self, run: Run, names: Mapping[str, Any], tensors: Mapping[str, Array], dims: tuple[int, ...]
    ) -> Array | None:
        seen: Array | None = None
        mask = run.attrs["mask"]
        if mask is not None:
            sizes = {p: int(names[p]) for p in mask.params}
            seen = mask.evaluate(*dims, sizes)
        if run.attrs["where"] is not None:
            where = evaluate(run.attrs["where"], names, tensors)
            seen = where if seen is None else seen & where
        return seen

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        q, k, v = (x for x in inputs[:3] if x is not None)
        dtype, wide = q.dtype, DType.FLOAT32 if q.dtype.bits == 16 else q.dtype
        loads = {name: x for name, x in zip(attrs["loads"], inputs[3:], strict=True) if x is not None}
        tensors = {name: b.cast(x, wide) if x.dtype.is_float else x for name, x in loads.items()}
        heads, groups = q.shape[1], k.shape[1]
        q, k, v = (b.cast(x, wide) for x in (q, k, v))
        if heads != groups:
            k, v = (_repeat_heads(b, x, heads) for x in (k, v))
        if _is_linear(attrs, q.shape[2], k.shape[2]):
            return [b.cast(_running_sums(b, q, k, v, attrs), dtype)]
        grid = (*q.shape[:3], k.shape[2])
        sizes = {"n": q.shape[2], "m": k.shape[2]}
        lowering = ExprLowering(b, AXES, grid, {}, sizes, tensors, wide)
        if attrs["inner"] == DOT:
            s = b.matmul(q, b.transpose(k, (0, 1, 3, 2)))
        else:
            five = ExprLowering(
                b,
                (*AXES, "d"),
                (*grid, q.shape[3]),
                {"q": b.unsqueeze(q, 3), "k": b.unsqueeze(k, 2)},
                sizes,
                tensors,
                wide,
            )
            terms = b.expand(five.value(attrs["inner"]), five.grid)
            s = b("reduce_sum", terms, axes=(-1,))
        if attrs["scale"] != 1.0:
            s = b.mul(s, float(attrs["scale"]))
        if attrs["score"] != SCORE:
            scored = ExprLowering(b, AXES, grid, {"s": s}, sizes, tensors, wide)
            s = b.expand(b.cast(scored.value(attrs["score"]), wide), grid)
        seen = self._lower_visible(b, lowering, attrs)
        w = _lower_normalise(b, s, seen, attrs, lowering)
        out = b.cast(b.matmul(w, v), dtype)
        return [out, b.cast(w, dtype)] if attrs["weights"] else [out]

    def _lower_visible(self, b: Builder, lowering: ExprLowering, attrs: Mapping[str, Any]) -> Value | None:
        seen: Value | None = None
        if attrs["mask"] is not None and not attrs["mask"].is_all:
            seen = lowering.value(attrs["mask"].to_expr())
        if attrs["where"] is not None:
            where = lowering.value(attrs["where"])
            seen = where if seen is None else b("and", seen, where)
        return seen

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(0)
        q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))
        yield Sample((q, k, v), {"scale": 0.5})
        yield Sample((q, k, v), {"mask": "j <= i + m - n", "weights": True})
        yield Sample((q, k, v), {"mask": "{[b,h,i,j] : i - 1 <= j <= i and i >= 1}", "score": "3 * tanh(s / 3)"})
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        lengths = np.array([2, 0])
        yield Sample(
            (q, k, v, slopes, lengths),
            {
                "score": "s + slopes[h] * (j - i)",
                "where": "j < lengths[b]",
                "sink": "slopes[h] - 1",
                "loads": ("slopes", "lengths"),
            },
        )
        w = rng.normal(size=8).astype(np.float32)
        yield Sample((q, k, v, w), {"inner": "w[d] * tanh(q + k)", "loads": ("w",)})
        yield Sample((abs(q), abs(k), v), {"normalise": "sum", "mask": "j <= i"})
        yield Sample((abs(q), abs(k[:, :, :3]), v[:, :, :3]), {"normalise": "sum", "mask": "j <= i", "scale": 0.5})
        yield Sample((abs(q), abs(k), v), {"normalise": "sum"})
        yield Sample((q, k, v), {"normalise": "none", "mask": "j <= i", "weights": True})
        yield Sample((q, k, v), {"empty": "mean", "mask": "j <= i - 1", "score": "s + j", "weights": True})
        yield Sample((q, k, v), {"empty": "nan", "mask": "j <= i - 1"})


def _check_expressions(call: Call) -> None:
    names = call.attr("loads")
    types = dict(zip(names, call.types[3:], strict=False))
    if len(names) != len(call.types) - 3 or len(set(names)) != len(names):
        raise call.error(f"loads names {len(names)} operands behind v, of which there are {len(call.types) - 3}")
    if call.attr("normalise") not in ("softmax", "sum", "none"):
        raise call.error('normalise is "softmax", "sum" or "none"')
    if call.attr("sink") is not None and call.attr("normalise") != "softmax":
        raise call.error("a sink needs the softmax")
    if call.attr("empty") not in ("zeros", "mean", "nan"):
        raise call.error('empty is "zeros", "mean" or "nan"')
    if call.attr("empty") != "zeros" and (call.attr("normalise") != "softmax" or call.attr("sink") is not None):
        raise call.error("empty is for a softmax without a sink")
    sizes = {name for t in call.types if t is not None for d in t.shape for name in symbols(d)}
    common = {*AXES, "n", "m", *sizes}
    flags = {name for name, t in types.items() if t is not None and t.dtype is DType.BOOL}
    allowed = {
        "score": common | {"s"}, "inner": common | {"q", "k", "d"}, "where": common, "sink": common - {"j"},
    }  # fmt: skip
    for attr, known in allowed.items():
        expr: Expr | None = call.attr(attr)
        if expr is None:
            continue
        unknown = sorted(variables(expr) - known)
        if unknown:
            raise call.error(f"{attr} mentions {', '.join(unknown)}; it may use {', '.join(sorted(known))}")
        if (attr == "where") != is_boolean(expr, flags):
            raise call.error(f"{attr} must be {'a condition' if attr == 'where' else 'a number'}: {expr}")
        _check_loads(call, attr, expr, types)
    mask: MaskSet | None = call.attr("mask")
    unknown = sorted(set(mask.params) - common) if mask is not None else []
    if unknown:
        raise call.error(f"mask mentions {', '.join(unknown)}; its sizes may be {', '.join(sorted(common - {*AXES}))}")


def _check_loads(call: Call, attr: str, expr: Expr, types: Mapping[str, TensorType | None]) -> None:
    grid = dict(zip(AXES, (*call.type(0).shape[:3], call.type(1).shape[2]), strict=True))
    for load in (part for part in walk(expr) if isinstance(part, Load)):
        name, count = load.tensor, len(load.index)
        t = types.get(name)
        if t is None:
            raise call.error(f"{attr} reads {name}, which is not among the loads {', '.join(types) or '(none)'}")
        if t.rank != count:
            raise call.error(f"{attr} reads {name} with {count} indices, but it is {t}")
        for axis, part in enumerate(load.index):
            wanted = grid.get(part.name) if isinstance(part, Var) else None
            if wanted is not None and at_least(t.shape[axis], wanted) is False:
                raise call.error(f"{attr} reads {load} for {wanted} values of {part}, but {name} is {t}")


def _normalise(s: Array, seen: Array | None, how: str, sink: Array | None) -> Array:
    """The weights of every query over its visible keys."""
    zero = np.zeros((), s.dtype)
    if how != "softmax":
        w = s if seen is None else np.where(seen, s, zero)
        if how == "none":
            return w
        total = w.sum(-1, keepdims=True)
        return np.asarray(w / np.where(total == 0, np.ones_like(total), total))
    if seen is not None:
        s = np.where(seen, s, np.asarray(-np.inf, s.dtype))
    peak = s.max(-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        peak = np.maximum(peak, sink)
    peak = np.where(np.isneginf(peak), zero, peak)
    e = np.exp(s - peak)
    total = e.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - peak)
    return np.asarray(e / np.where(total == 0, np.ones_like(total), total))


def _lower_normalise(
    b: Builder, s: Value, seen: Value | None, attrs: Mapping[str, Any], lowering: ExprLowering
) -> Value:
    zero = b.constant(np.zeros((), s.dtype.numpy))
    if attrs["normalise"] != "softmax":
        w = s if seen is None else b("where", seen, s, zero)
        if attrs["normalise"] == "none":
            return w
        return _divide_rows(b, w, b("reduce_sum", w, axes=(-1,), keepdims=True))
    if seen is None and attrs["sink"] is None and _is_finite(attrs["score"], lowering.tensors):
        return b("softmax", s, axis=-1)
    if seen is not None and attrs["empty"] == "mean":
        return b("softmax", b("where", seen, s, float(np.finfo(s.dtype.numpy).min)), axis=-1)
    if seen is not None and attrs["empty"] == "nan":
        return b("softmax", b("where", seen, s, float("-inf")), axis=-1)
    if seen is not None:
        s = b("where", seen, s, float("-inf"))
    peak = b("reduce_max", s, axes=(-1,), keepdims=True)
    sink = None if attrs["sink"] is None else b.cast(lowering.value(attrs["sink"]), s.dtype)
    if sink is not None:
        peak = b("max", peak, sink)
    peak = b("where", b("equal", peak, float("-inf")), zero, peak)
    e = b("exp", b.sub(s, peak))
    total = b("reduce_sum", e, axes=(-1,), keepdims=True)
    if sink is not None:
        total = b.add(total, b("exp", b.sub(sink, peak)))
    return _divide_rows(b, e, total)


def _is_finite(score: Expr, tensors: Mapping[str, Value]) -> bool:
    """Whether the score of finite products is finite: a row of -inf alone has to give zeros, which softmax does not."""
    match score:
        case Var():
            return True
        case Const(value):
            return math.isfinite(value)
        case Load(name, index):
            known = tensors[name].constant
            held = not tensors[name].dtype.is_float or (known is not None and bool(np.isfinite(known.array).all()))
            return held and all(_is_finite(part, tensors) for part in index)
        case FnCall("div" | "floordiv" | "mod", (top, Const(value))):
            return value != 0 and _is_finite(top, tensors)
        case FnCall(fn, args):
            return fn not in _UNBOUNDED and all(_is_finite(part, tensors) for part in args)
    return False


_UNBOUNDED = frozenset({"div", "floordiv", "mod", "log", "sqrt", "pow", "exp"})
"""Functions that may give no finite number for an ordinary one."""


def _divide_rows(b: Builder, x: Value, total: Value) -> Value:
    one = b.constant(np.ones((), x.dtype.numpy))
    return b.div(x, b("where", b("equal", total, 0.0), one, total))


def is_linear(node: Node) -> bool:
    """Whether the weights of an attention are the products q·k themselves, over all keys or over those up to the
    query's own, so that time linear in the length is possible."""
    q, k = node.operands[:2]
    return _is_linear(node.attrs, q.shape[2], k.shape[2])


def _is_linear(attrs: Mapping[str, Any], n: Dim, m: Dim) -> bool:
    mask: MaskSet | None = attrs["mask"]
    plain = attrs["inner"] == DOT and attrs["score"] == SCORE and attrs["where"] is None and not attrs["weights"]
    if not plain or attrs["normalise"] == "softmax":
        return False
    return mask is None or mask.is_all or (n == m and mask.same_set(causal()))


def _running_sums(b: Builder, q: Value, k: Value, v: Value, attrs: Mapping[str, Any]) -> Value:
    """sum_j (q_i·k_j) v_j = q_i (sum_j k_j v_jᵀ): the sum in brackets runs along the keys, so that time is linear in
    the length (Katharopoulos et al. 2020, equations 9 to 12)."""
    q = b.mul(q, float(attrs["scale"]))
    if attrs["mask"] is None or attrs["mask"].is_all:
        top = b.matmul(q, b.matmul(b.transpose(k, (0, 1, 3, 2)), v))
        total = b("reduce_sum", k, axes=(2,), keepdims=True)
    else:
        sums = b("cumsum", b.mul(b.unsqueeze(k, 4), b.unsqueeze(v, 3)), axis=2)
        top = b.reshape(b.matmul(b.unsqueeze(q, 3), sums), (*q.shape[:3], v.shape[3]))
        total = b("cumsum", k, axis=2)
    if attrs["normalise"] == "none":
        return top
    return _divide_rows(b, top, b("reduce_sum", b.mul(q, total), axes=(-1,), keepdims=True))


def _repeat_heads(b: Builder, x: Value, heads: int | SymDim) -> Value:
    batch, groups, length, width = x.shape
    wide = b.expand(b.unsqueeze(x, 2), (batch, groups, heads // groups, length, width))
    return b.reshape(wide, (batch, heads, length, width))


OPS: tuple[Operator, ...] = (Attention(),)

__all__ = ["AXES", "DOT", "OPS", "SCORE", "Attention", "is_linear"]
