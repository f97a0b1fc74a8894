"""What a score is called: words for an expression of s, b, h, i and j, found by its structure and never by names.

The score is read as a sum. Each term gets the name of what it provably is: a linear bias per head is ALiBi (Press et
al. 2022), a table read at a logarithm of the distance is T5's buckets (Raffel et al. 2020), at another function of
the distance a relative bias (Shaw et al. 2018); c·tanh(x/c) is a softcap. Whatever has no name stays an expression.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from functools import reduce

from ..ir.expr import Call, Const, Expr, Load, Var, rebuild, variables, walk
from ..ir.expr import loads as loads_of

__all__ = ["score_words"]

Linear = dict[str, float]
"""The factors of variables in a sum; that of 1 is under ``""``."""


def score_words(score: Expr, scale: float, constants: Collection[str] = (), product: str = "q·k") -> str:
    """A score in words: ``30·tanh(s/30) + ALiBi``. ``scale`` is the factor that s holds already; ``constants`` are the
    loads whose contents are fixed. Where naming a softcap moves a factor out of s, "where s = …" says what s then is,
    with ``product`` for what the scale multiplies.
    """
    moved = _moved_scale(score, scale)
    if moved is not None:
        score, scale = moved
    words = _words(score, frozenset(constants))
    return f"{words}, where s = {_number(scale)}·{product}" if moved is not None else words


def _number(value: float) -> str:
    return re.sub(r"e\+?", "e", f"{value:.6g}").replace("-", "−")


def _words(e: Expr, constants: frozenset[str]) -> str:
    """A sum, term by term."""
    parts = [(sign, _term(term, constants)) for sign, term in _terms(e, 1)]
    parts.sort(key=lambda part: part[1] != "s" and "s" not in re.findall(r"\w+", part[1]))
    text = ""
    for sign, words in parts:
        if words.startswith("−"):
            sign, words = -sign, words[1:]
        text += (" + " if sign > 0 else " − ") if text else ("" if sign > 0 else "−")
        text += words
    return text


def _terms(e: Expr, sign: int) -> list[tuple[int, Expr]]:
    match e:
        case Call("add", (x, y)):
            return _terms(x, sign) + _terms(y, sign)
        case Call("sub", (x, y)):
            return _terms(x, sign) + _terms(y, -sign)
        case Call("neg", (x,)):
            return _terms(x, -sign)
    return [(sign, e)]


def _term(e: Expr, constants: frozenset[str]) -> str:
    if e == Var("s"):
        return "s"
    factor, rest = _factors(e)
    if "s" in variables(e):
        return _of_s(e, factor, rest, constants)
    return _bias(e, factor, rest, constants) or _printed(e)


def _printed(e: Expr) -> str:
    text = str(e)
    return f"({text})" if isinstance(e, Call) and e.fn in ("or", "and", "not", "where") else text


def _factors(e: Expr) -> tuple[float, list[Expr]]:
    """A product as a number and its other factors; what is divided by is none of these but by numbers."""
    match e:
        case Const(value) if not isinstance(value, bool):
            return float(value), []
        case Call("mul", (x, y)):
            (a, left), (b, right) = _factors(x), _factors(y)
            return a * b, left + right
        case Call("neg", (x,)):
            a, rest = _factors(x)
            return -a, rest
        case Call("div", (x, Const(value))) if value:
            a, rest = _factors(x)
            return a / float(value), rest
    return 1.0, [e]


# -- terms of s ------------------------------------------------------------------------------------------------------


def _of_s(e: Expr, factor: float, rest: list[Expr], constants: frozenset[str]) -> str:
    if len(rest) == 1 and isinstance(rest[0], Call) and rest[0].fn == "tanh":
        inner_factor, inner = _factors(rest[0].args[0])
        if _near(inner_factor * factor, 1.0) and len(inner) == 1:
            body = _words(inner[0], constants)
            cap = _number(factor)
            return f"{cap}·tanh({body}/{cap})" if body == "s" else f"{cap}·tanh(({body})/{cap})"
    if Var("s") in rest:
        others = [x for x in rest if x != Var("s")]
        if all(isinstance(x, Load) and _only(x, {"b", "h"}) for x in others):
            number = [_number(factor)] if factor != 1 else []
            names = [f"{x} (a temperature)" for x in others]
            return "·".join([*number, "s", *names])
    return _printed(e)


def _near(a: float, b: float) -> bool:
    """Equal up to what constants in float32 lose."""
    return math.isclose(a, b, rel_tol=1e-6)


def _moved_scale(score: Expr, scale: float) -> tuple[Expr, float] | None:
    """The score and scale with a softcap c·tanh(s) written c·tanh(s/c): s holds c times as much then."""
    caps: set[float] = set()

    def change(e: Expr) -> Expr:
        factor, rest = _factors(e)
        match rest:
            case [Call("tanh", (inner,))]:
                by, own = _factors(inner)
                if own == [Var("s")] and factor > 0 and by > 0:
                    caps.add(factor * by)
                    return Const(factor) * Call("tanh", (Var("s") / Const(factor),))
        return rebuild(e, change)

    changed = change(score)
    if len(caps) != 1 or sum(x == Var("s") for x in walk(score)) != 1:
        return None
    (by,) = caps
    return None if _near(by, 1.0) else (changed, scale * by)


# -- terms without s -------------------------------------------------------------------------------------------------


def _only(e: Expr, names: set[str]) -> bool:
    return variables(e) <= names


def _bias(e: Expr, factor: float, rest: list[Expr], constants: frozenset[str]) -> str | None:
    sign = "−" if factor < 0 else ""
    size = "" if abs(factor) == 1 else f"{_number(abs(factor))}·"
    match rest:
        case [Load(name, index)] if "j" in variables(rest[0]):
            words = _table(name, index, constants)
            return None if words is None else f"{sign}{size}{words}"
    slopes = [x for x in rest if isinstance(x, Load) and x.tensor in constants and _only(x, {"h"})]
    others = [x for x in rest if x not in slopes]
    if len(slopes) == 1 and others:
        words = _alibi(slopes[0], reduce(operator.mul, others), factor)
        if words is not None:
            return words
    match e:
        case Call("where", (condition, Const(0 | 0.0), Const(penalty))):
            return f"(penalty {_number(float(penalty))} unless {condition})"
        case Call("where", (condition, Const(penalty), Const(0 | 0.0))):
            return f"(penalty {_number(float(penalty))} where {condition})"
    return None


def _alibi(slope: Load, other: Expr, factor: float) -> str | None:
    """A constant per head times something linear in the position of the key."""
    if isinstance(other, Call) and other.fn == "abs":
        inner = _linear(other.args[0])
        if inner is not None and set(inner) <= {"i", "j"} and inner.get("i") == -inner.get("j", 0) != 0:
            sign = "−" if factor < 0 else ""
            return f"{sign}ALiBi (slopes {slope}, on both sides)"
        return None
    found = _linear(other)
    if found is not None:
        if found.get("j", 0) == 0 or "h" in found or "b" in found:
            return None
        return f"{'−' if factor * found['j'] < 0 else ''}ALiBi (slopes {slope})"
    if _only(other, {"b", "j"}) and "j" in variables(other) and "j" not in _outside_loads(other):
        return f"{'−' if factor < 0 else ''}ALiBi (slopes {slope}, positions {other})"
    return None


def _outside_loads(e: Expr) -> frozenset[str]:
    """The variables that stand in no index."""
    match e:
        case Var(name):
            return frozenset([name])
        case Call(_, args):
            return frozenset[str]().union(*map(_outside_loads, args))
    return frozenset()


def _table(name: str, index: tuple[Expr, ...], constants: frozenset[str]) -> str | None:
    """A bias that is read from a table."""
    moving = [part for part in index if variables(part) & {"i", "j"}]
    whose = "a fixed table" if name in constants else "what the model computes"
    if len(moving) == 1 and variables(moving[0]) >= {"i", "j"} and _by_distance(moving[0]):
        logarithm = any(isinstance(x, Call) and x.fn == "log" for x in walk(moving[0]))
        return f"{'T5 buckets' if logarithm else 'relative bias by j − i'} of {name}"
    if len(moving) == 1 and loads_of(moving[0]):
        return f"bias of {name} at {', '.join(loads_of(moving[0]))}[i, j]" if _plain(moving[0]) else None
    if {str(part) for part in moving} == {"i", "j"}:
        return f"bias {name}[{', '.join(map(str, index))}], {whose}"
    if len(moving) == 2 and any(str(part) == "i" for part in moving):
        other = next(part for part in moving if str(part) != "i")
        if _by_distance(other):
            return f"bias by query and j − i of {name}"
    return None


def _plain(e: Expr) -> bool:
    """Whether all that is loaded in an index is loaded at (i, j)."""
    return all(x.index == (Var("i"), Var("j")) for x in walk(e) if isinstance(x, Load))


def _linear(e: Expr) -> Linear | None:
    """The factors of a linear form of variables; None for anything else."""
    match e:
        case Const(value):
            return {"": float(value)}
        case Var(name):
            return {name: 1.0}
        case Call("neg", (x,)):
            return _combined(_linear(x), {}, -1, 0)
        case Call("add", (x, y)):
            return _combined(_linear(x), _linear(y), 1, 1)
        case Call("sub", (x, y)):
            return _combined(_linear(x), _linear(y), 1, -1)
        case Call("mul", (Const(value), x)) | Call("mul", (x, Const(value))):
            return _combined(_linear(x), {}, float(value), 0)
        case Call("div", (x, Const(value))) if value:
            return _combined(_linear(x), {}, 1 / float(value), 0)
    return None


def _combined(a: Linear | None, b: Linear | None, by_a: float, by_b: float) -> Linear | None:
    if a is None or b is None:
        return None
    total = {name: by_a * a.get(name, 0.0) + by_b * b.get(name, 0.0) for name in {**a, **b}}
    return {name: value for name, value in total.items() if value}


def _by_distance(e: Expr) -> bool:
    """Proves that an expression has the same value at (i + 1, j + 1) as at (i, j): every largest linear part has
    opposite factors of i and j. A comparison x < y is that of x - y with 0."""
    form = _linear(e)
    if form is not None:
        return form.get("i", 0.0) == -form.get("j", 0.0)
    match e:
        case Call("less" | "less_equal" | "greater" | "greater_equal" | "equal" | "not_equal", (x, y)):
            difference = _linear(x - y)
            if difference is not None:
                return difference.get("i", 0.0) == -difference.get("j", 0.0)
            return _by_distance(x) and _by_distance(y)
        case Call(_, args):
            return all(_by_distance(part) for part in args)
        case Load(_, index):
            return all(_by_distance(part) for part in index)
    return False
