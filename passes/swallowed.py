"""Keys that a penalty in the score hides: a finite number so low that their weight is 0 beside any other key's.

``where(j <= i, s, -3.4e38) + …`` is no mask, for a row that has nothing but penalised keys shares its weights among
them; but wherever a row has another key, exp(score - peak) is 0 in every float format, and the row reads those keys
alone.
"""

from __future__ import annotations

import math

from ..ir import Dim, Expr
from ..ir.affine import Domain, dim_expr
from ..ir.expr import Call, Const, Load, Var, substitute
from ..ir.simplify import Simplifier

__all__ = ["bounds", "hides_later_keys"]

ORDINARY = 1e30
"""No score that a model computes is as large; a penalty beyond ``LOW`` swallows it."""
LOW = -1e35

Interval = tuple[float, float]
_ANY: Interval = (-math.inf, math.inf)


def hides_later_keys(score: Expr, time: Dim, lead: Dim = 0) -> bool:
    """Whether the score of every key behind the query is a penalty that leaves it no weight beside an ordinary one.
    ``lead`` keys lie before the first query's own."""
    behind = substitute(score, {"j": Var("i") + 1 + dim_expr(lead) + Var("behind")})
    simplify = Simplifier(Domain({"i": time, "behind": time}), lambda name: None)
    return bounds(simplify(behind))[1] <= LOW


def bounds(e: Expr) -> Interval:
    """Numbers between which an expression lies: scores are ordinary, positions at least 0, loads anything."""
    match e:
        case Const(value):
            return (float(value), float(value)) if value == value else _ANY
        case Var("s"):
            return -ORDINARY, ORDINARY
        case Var():
            return 0.0, math.inf
        case Call("where", (_, x, y)):
            (a, b), (c, d) = bounds(x), bounds(y)
            return min(a, c), max(b, d)
        case Call("min" | "max" as fn, (x, y)):
            (a, b), (c, d) = bounds(x), bounds(y)
            return (min(a, c), min(b, d)) if fn == "min" else (max(a, c), max(b, d))
        case Call("neg", (x,)):
            a, b = bounds(x)
            return -b, -a
        case Call("add", (x, y)):
            (a, b), (c, d) = bounds(x), bounds(y)
            return _number(a + c, -math.inf), _number(b + d, math.inf)
        case Call("sub", (x, y)):
            (a, b), (c, d) = bounds(x), bounds(y)
            return _number(a - d, -math.inf), _number(b - c, math.inf)
        case Call("mul", (x, Const(value))) | Call("mul", (Const(value), x)) if value != 0 and math.isfinite(value):
            ends = sorted(end * value for end in bounds(x))
            return ends[0], ends[1]
        case Call("tanh", _):
            return -1.0, 1.0
        case Call("sigmoid", _):
            return 0.0, 1.0
        case Load() | Call():
            return _ANY
    return _ANY


def _number(x: float, otherwise: float) -> float:
    return otherwise if math.isnan(x) else x
