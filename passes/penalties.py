"""Which penalties that are added to scores are a mask, and what is left of them.

A penalty of -inf masks. A finite one only masks where that is what it comes to, and then the rows in which no key is
left decide (``Score.empty``):

- every row provably keeps a key: the penalised weights are e^(-huge) = 0 beside it, so the penalty is a mask. That
  asks for a penalty of at least 1e8 (in half precision, where scores end at 65504, of the least number), and for
  scores of which none is above the row's largest visible one by that much;
- else a penalty of 1e30 and more swallows every score it is added to (half a unit in its last place is beyond 1e13),
  so that a row without a key is uniform: ``empty = "mean"``;
- else it stays what it was, a term of the score: so does -10000 always, which scores of ±1e4 outweigh, and so does
  one beside numbers of that size in other places (below a cap, within a choice), for a key that a mask leaves may be
  hidden by them.

A row of -inf alone is NaN: ``empty = "nan"``, unless a guard against NaN follows or every row keeps a key. Scores
that are not finite themselves are not accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import Dim, DType, Expr, MaskSet, ParseError, SymDim
from ..ir.affine import Domain, NotAffineError, is_affine
from ..ir.dims import product, substitute_dim, symbol
from ..ir.elements import IndexAnalysis
from ..ir.expr import Call, Const, Var, call, substitute, variables
from ..ir.simplify import Simplifier
from .layout import Atom, atoms_of

__all__ = [
    "MASKS",
    "TAKEN",
    "Frame",
    "Lifted",
    "Penalty",
    "Score",
    "ScoreError",
    "aliased",
    "decide",
    "finished",
    "frame_of",
    "is_low",
    "lift",
]

MASKS = -1e8
"""A finite penalty from here on masks where another key is visible."""

SWALLOWS = -1e30
"""A finite penalty from here on swallows every score."""

_APART = 1e-4
"""Of two penalties that meet, the lesser as a part of the greater: below, it may vanish in the sum (2^-24 of it)."""

_AXES = ("b", "h", "i", "j")
TAKEN = frozenset({*_AXES, "s", "q", "k", "d", "n", "m"})
"""Names that mean something in the expressions of an attention; sizes of these names are called otherwise here."""


class ScoreError(Exception):
    """Why the score is none that we can say."""


@dataclass
class Score:
    """The attributes of an attention that the score decides."""

    score: Expr
    scale: float
    mask: MaskSet | None
    where: Expr | None
    sink: Expr | None
    empty: str
    loads: list[str] = field(default_factory=list)


@dataclass
class Penalty:
    """A key is left where ``condition`` holds; elsewhere ``amount`` is added to the score, or takes its place."""

    condition: Expr
    amount: float
    replaces: bool


@dataclass(eq=False)
class Frame:
    """The index space (b, h, i, j) of an attention."""

    analysis: IndexAnalysis
    sizes: Mapping[str, Dim]
    half: bool

    def __post_init__(self) -> None:
        self.domain = Domain(self.sizes, self.analysis.lower)
        self.simplify = Simplifier(self.domain, self.analysis.dtype_of)


def frame_of(analysis: IndexAnalysis, groups: Mapping[str, Sequence[Atom]], dtype: DType) -> Frame:
    """The index space of an attention whose axes have these atoms."""
    sizes = {name: aliased(product([a.size for a in atoms_of([tuple(atoms)])])) for name, atoms in groups.items()}
    return Frame(analysis, sizes, dtype is DType.FLOAT16)


def aliased(d: Dim) -> Dim:
    """A size in which no symbol has a name that is taken."""
    names = {name: symbol(f"size_{name}") for name in TAKEN}
    return substitute_dim(d, names) if isinstance(d, SymDim) else d


# -- penalties -------------------------------------------------------------------------------------------------------


@dataclass
class Lifted:
    """A score taken apart: ``value`` is what it is without penalties, ``kept`` with the finite ones as they were,
    ``hard`` the conditions of those of -inf, ``soft`` the finite ones."""

    value: Expr
    kept: Expr
    hard: list[Expr] = field(default_factory=list)
    soft: list[Penalty] = field(default_factory=list)


def lift(e: Expr, frame: Frame) -> Lifted:
    """Takes a score apart."""
    match e:
        case Call("where", (c, x, Const(float() as amount))) if _is_penalty(amount, frame):
            return _penalised(c, x, amount, frame)
        case Call("where", (c, Const(float() as amount), x)) if _is_penalty(amount, frame):
            return _penalised(_opposite(c), x, amount, frame)
        case Call("add", (x, y)):
            first, second = lift(x, frame), lift(y, frame)
            soft = first.soft + second.soft
            value = frame.simplify(first.value + second.value)
            # What takes the place of one addend is added to the other: then the sum stays as it was.
            replaced = any(p.replaces for p in soft)
            kept = frame.simplify(first.kept + second.kept) if replaced else _with(value, soft)
            return Lifted(value, kept, first.hard + second.hard, soft)
        case Call("sub", (x, Call("where", (c, Const(float() as p), Const(float() as q))))):
            return lift(x + call("where", c, -p, -q), frame)
        case Call("mul" | "div" as fn, (x, Const(value))) if 0 < value < math.inf:
            return _times(fn, lift(x, frame), float(value), e)
        case Call("mul", (Const(value), x)) if 0 < value < math.inf:
            return _times("mul", lift(x, frame), float(value), e)
    return Lifted(e, e)


def _times(fn: str, inner: Lifted, by: float, whole: Expr) -> Lifted:
    if not inner.hard and not inner.soft:
        return Lifted(whole, whole)
    scaled = [Penalty(p.condition, p.amount * by if fn == "mul" else p.amount / by, p.replaces) for p in inner.soft]
    if any(-math.inf < p.amount < -3.5e38 for p in scaled):
        return Lifted(whole, whole)  # it overflows in single precision
    return Lifted(call(fn, inner.value, by), call(fn, inner.kept, by), inner.hard, scaled)


def _with(value: Expr, soft: list[Penalty]) -> Expr:
    """A score with its finite penalties, exactly as they were."""
    for penalty in soft:
        amount = Const(penalty.amount)
        if penalty.replaces:
            value = call("where", penalty.condition, value, amount)
        else:
            value = value + call("where", penalty.condition, 0.0, amount)
    return value


def _opposite(c: Expr) -> Expr:
    """A condition's opposite; of x == y it is x != y."""
    match c:
        case Call("equal", (x, y)):
            return x.ne(y)
        case Call("not_equal", (x, y)):
            return x.eq(y)
    return ~c


def _is_penalty(amount: float, frame: Frame) -> bool:
    return amount <= (-6e4 if frame.half else MASKS)


def _penalised(c: Expr, x: Expr, amount: float, frame: Frame) -> Lifted:
    inner = lift(x, frame)
    if amount == -math.inf:
        return Lifted(inner.value, inner.kept, [c, *inner.hard], inner.soft)
    mine = Penalty(c, amount, True)
    if not inner.hard and not inner.soft:
        return Lifted(inner.value, _with(inner.value, [mine]), [], [mine])
    # One within the other: a key that the inner one hides for good is not hidden where the outer one replaces that.
    within = [Penalty(condition, -math.inf, True) for condition in inner.hard]
    return Lifted(inner.value, call("where", c, x, amount), [], [mine, *inner.soft, *within])


def decide(lifted: Lifted, given: list[Expr], frame: Frame, sink: bool, empty: str) -> Score:
    """Which penalties are the mask, and what a row without a key gives, when there are the conditions ``given``
    already; ``empty`` is what a row of -inf alone does."""
    value, soft = lifted.value, lifted.soft
    hard = [*given, *lifted.hard]
    everything = _all([*hard, *(p.condition for p in soft)], frame)
    if is_low(value, -6e4 if frame.half else MASKS):  # a key that a mask leaves may be hidden all the same
        kept, visible = lifted.kept, _all(hard, frame)
        return _masked(kept, visible, empty, frame)
    if not hard and not soft:
        return Score(finished(value, frame), 1.0, None, None, None, "zeros")
    if sink or _keeps_a_key(everything, frame):  # the sink is a key that every row keeps
        return _masked(value, everything, "zeros", frame)
    if len(soft) == 1 and not hard and soft[0].amount <= SWALLOWS:
        return _masked(value, everything, "mean", frame)
    common = None if hard else _hidden_twice(soft, frame)
    if common is not None:
        hard = [common]
        left = [Penalty(_without(p.condition, common, frame), p.amount, p.replaces) for p in soft]
        value = _with(value, [p for p in left if p.condition != Const(True)])
    else:
        value = lifted.kept
    if not hard:
        return Score(finished(value, frame), 1.0, None, None, None, "zeros")
    visible = _all(hard, frame)
    return _masked(value, visible, "zeros" if _keeps_a_key(visible, frame) else empty, frame)


def is_low(value: Expr, least: float = MASKS) -> bool:
    """Whether a number of that size and more is part of a score where it may come out as one, not below a tanh."""
    match value:
        case Const(float() as number):
            return abs(number) >= -least
        case Call("where", (_, x, y)):
            return is_low(x, least) or is_low(y, least)
        case Call("tanh" | "sigmoid" | "erf" | "less" | "less_equal" | "greater" | "greater_equal" | "equal", _):
            return False
        case Call(_, args):
            return any(is_low(part, least) for part in args)
    return False


def _hidden_twice(soft: list[Penalty], frame: Frame) -> Expr | None:
    """Of two penalties that are added, the condition outside of which both apply, when one leaves every row a key.

    That condition is a mask although a row may have no key without a penalty: beside a key with one penalty at most,
    one with both weighs e^(-huge) = 0.
    """
    if len(soft) != 2 or any(p.replaces for p in soft):
        return None
    lower, higher = sorted(p.amount for p in soft)
    if higher > MASKS or higher > lower * _APART:
        return None
    parts = [_all([c for c in _conjuncts(p.condition) if is_affine(c)], frame) for p in soft]
    common = frame.simplify(parts[0] | parts[1])
    if common == Const(True) or not is_affine(common):
        return None
    return common if any(_keeps_a_key(p.condition, frame) for p in soft) else None


def _without(condition: Expr, given: Expr, frame: Frame) -> Expr:
    """A condition where another one holds: without the parts that follow from it."""
    kept = [
        c
        for c in _conjuncts(condition)
        if not (is_affine(c) and frame.domain.always((~given) | c))
    ]  # fmt: skip
    return _all(kept, frame)


def _conjuncts(e: Expr) -> list[Expr]:
    parts: list[Expr] = []
    stack = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Call) and x.fn == "and":
            stack += reversed(x.args)
        else:
            parts.append(x)
    return parts


def _all(conditions: list[Expr], frame: Frame) -> Expr:
    result: Expr = Const(True)
    for c in conditions:
        result = c if result == Const(True) else result & c
    return frame.simplify(result)


def _keeps_a_key(visible: Expr, frame: Frame) -> bool:
    """Proves that every query sees a key, whatever the sizes."""
    if visible == Const(True):
        return True
    if not is_affine(visible) or any(low < 1 for low in frame.analysis.lower.values()):
        return False
    try:
        mask = _mask(visible, frame)
    except (NotAffineError, ParseError):
        return False
    return mask.every_row_has_key(str(frame.sizes["i"]), str(frame.sizes["j"]))


def _mask(condition: Expr, frame: Frame) -> MaskSet:
    """An affine condition as a set of points (b, h, i, j)."""
    points = frame.domain.relaxed(condition)
    return MaskSet(_set_text(points))


def _set_text(points: object) -> str:
    """``[n] -> { : c }`` over parameters b, h, i, j as a set over these dimensions."""
    import re

    text = str(points)
    match = re.fullmatch(r"(?:\[([^\]]*)\] -> )?\{(.*)\}", text, re.DOTALL)
    if match is None:
        raise ParseError(f"not a set of parameters: {text}")
    names = [name.strip() for name in (match[1] or "").split(",") if name.strip() and name.strip() not in _AXES]
    body = match[2].replace(":", "", 1).strip()
    return f"[{', '.join(names)}] -> {{ [b, h, i, j] : {body or 'true'} }}"


def _masked(value: Expr, visible: Expr, empty: str, frame: Frame) -> Score:
    parts = _conjuncts(visible)
    affine = [e for e in parts if is_affine(e)]
    others = [e for e in parts if not is_affine(e)]
    mask: MaskSet | None = None
    condition = _all(affine, frame)
    if condition != Const(True):
        try:
            mask = _mask(finished(condition, frame), frame)
        except (NotAffineError, ParseError):
            others = [condition, *others]
    where = None if not others else finished(_all(others, frame) if len(others) > 1 else others[0], frame)
    if where is not None and not frame.simplify.is_bool(where):
        where = where.ne(0)
    if mask is None and where is None:
        empty = "zeros"
    return Score(finished(value, frame), 1.0, mask, where, None, empty)


def finished(e: Expr, frame: Frame) -> Expr:
    """Sizes by names that an attention understands. Raises ScoreError."""
    back: dict[str, Expr] = {}
    for name in variables(e):
        if name.startswith("size_") and name[5:] in TAKEN:
            lengths = {"n": frame.sizes["i"], "m": frame.sizes["j"]}
            short = next((n for n, d in lengths.items() if d == symbol(name)), None)
            if short is None:
                raise ScoreError(f"it uses the size {name[5:]}, a name that means something else in an attention")
            back[name] = Var(short)
    return substitute(e, back) if back else e
