"""The ways in which people write attention: independent choices, which go together, and a sample that covers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import combinations

__all__ = ["APART", "CHOICES", "Pair", "Spelling", "covering", "is_valid", "pairs_of", "possible_pairs"]

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two dimensions, in the order of their names, and a value of each."""

CHOICES: dict[str, tuple[str, ...]] = {
    # where the heads come from: given, a projection each, one projection cut up in four ways
    "source": ("heads", "projected", "packed_slices", "packed_five_slice", "packed_five_gather", "head_packed"),
    # how K is turned: once, three times, through merged batch and heads, or given as [b, h, d, m]
    "keys": ("once", "twice", "merged", "given"),
    "repeat": ("none", "expand", "gather", "concat"),
    "scale": ("div_scores", "mul_scores", "mul_q", "div_q", "mul_k", "split", "absent", "per_head", "learned"),
    "softmax": (
        "last",
        "positive_axis",
        "transposed",
        "written",
        "written_nomax",
        "reciprocal",
        "flat_sum",
        "exp2",
        "late",
        "log",
        "log_written",
        # as our own export writes it: rows without a key get zeros
        "safe",
        "late_safe",
    ),
    "rope": ("none", "half", "interleaved", "partial", "complex"),
    # the dtype of the model, and of the softmax where it differs
    "casts": ("none", "double", "half", "half_float", "bfloat_float", "float_products"),
    "guard": ("none", "nan"),
    "rank": ("four", "three_back", "three_merged"),
    "mask": (
        "none",
        "causal_where_inf",
        "causal_add_inf",
        "causal_where_min",
        "causal_add_min",
        "triangle_where_min",
        "triangle_add_inf",
        "window_add_inf",
        "window_where_min",
        "prefix_where_inf",
        "penalty",
        "causal_penalty",
        "penalty_twice",
        "twice_add_min",
        "padding_where_inf",
        "padding_add_min",
        "causal_padding_inf",
        "causal_padding_min",
        "float_b1nm",
        "float_b11m",
        "float_1h1m",
        "float_nm",
    ),
    "bias": ("none", "alibi", "alibi_keys", "buckets", "dense", "relative"),
    "softcap": ("none", "tanh"),
    # a column of scores behind or before the others, one more term of the sum, and a term of 1
    "sink": ("none", "plain", "shifted", "first", "summed", "one"),
    "width": ("same", "other"),
    "cross": ("self", "cross", "prefix"),
    "weights": ("inside", "output", "two_values"),
}


@dataclass(frozen=True)
class Spelling:
    """One of each of ``CHOICES``; the first of each is the plain one."""

    source: str = "heads"
    keys: str = "once"
    repeat: str = "none"
    scale: str = "div_scores"
    softmax: str = "last"
    rope: str = "none"
    casts: str = "none"
    guard: str = "none"
    rank: str = "four"
    mask: str = "none"
    bias: str = "none"
    softcap: str = "none"
    sink: str = "none"
    width: str = "same"
    cross: str = "self"
    weights: str = "inside"

    def __str__(self) -> str:
        plain = Spelling()
        chosen = [(getattr(self, f.name), getattr(plain, f.name)) for f in fields(self)]
        return "-".join(mine for mine, usual in chosen if mine != usual) or "plain"

    @property
    def data_dependent(self) -> bool:
        """Whether the mask arrives as an input."""
        return any(word in self.mask for word in ("float", "padding", "penalty", "twice"))

    @property
    def ends_in_infinity(self) -> bool:
        """Whether a masked key has the score -inf."""
        return self.mask.endswith("inf") or self.mask.startswith("float")

    @property
    def full_rows(self) -> bool:
        """Whether the original gives numbers when all keys of a row are masked."""
        if self.softmax == "written_nomax":
            return self.ends_in_infinity and self.guard == "nan"
        safe = self.softmax in ("safe", "late_safe") or self.guard == "nan" or self.sink != "none"
        return not self.ends_in_infinity or safe

    @property
    def is_half(self) -> bool:
        return self.casts not in ("none", "double")

    @property
    def words(self) -> str | None:
        """What the mask is called, where it is a function of the positions alone and masks for certain: -65504 in
        float16 may not be the lowest score, and is a penalty."""
        kind = self.mask.split("_")[0]
        if kind not in ("causal", "triangle", "window", "prefix") or self.data_dependent:
            return None
        if self.mask.endswith("min") and self.casts in ("half", "half_float"):
            return None
        return {"window": "causal, window 3", "prefix": "causal or prefix 2"}.get(kind, "causal")

    @property
    def reads_nothing(self) -> bool:
        """Whether nothing but q, k and v goes into the attention."""
        learned = self.scale in ("per_head", "learned") or self.bias != "none" or self.sink != "none"
        return not learned and not self.data_dependent


_FIVE = ("packed_five_slice", "packed_five_gather", "head_packed")
_WRITTEN = ("last", "positive_axis", "written")

APART: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    ("source", ("packed_slices", *_FIVE), "cross", ("cross", "prefix")),
    ("source", _FIVE, "repeat", ("expand", "gather", "concat")),
    ("source", _FIVE, "width", ("other",)),
    ("keys", ("given",), "source", ("projected", "packed_slices", *_FIVE)),
    ("keys", ("given",), "rope", ("half", "interleaved", "partial", "complex")),
    ("keys", ("given",), "cross", ("prefix",)),
    ("keys", ("given",), "bias", ("relative",)),
    ("sink", ("plain", "shifted", "first"), "softmax", tuple(v for v in CHOICES["softmax"] if v not in _WRITTEN)),
    ("sink", ("summed", "one"), "softmax", tuple(v for v in CHOICES["softmax"] if v not in ("last", "written"))),
    ("sink", CHOICES["sink"][1:], "rank", ("three_back", "three_merged")),
    ("softmax", ("positive_axis",), "rank", ("three_back", "three_merged")),
    ("softmax", ("late", "late_safe"), "weights", ("output", "two_values")),
    ("softmax", ("late", "late_safe"), "guard", ("nan",)),
    # A window of an attention with fewer keys than queries leaves rows without a key.
    ("mask", ("window_add_inf", "window_where_min"), "cross", ("cross",)),
)
"""Which values of two dimensions do not go together. None is the first of its dimension, so that every other pair can
be completed by the first values of the rest."""


def is_valid(s: Spelling) -> bool:
    """Whether the choices go together."""
    return not any(getattr(s, a) in first and getattr(s, b) in second for a, first, b, second in APART)


def pairs_of(values: dict[str, str]) -> set[Pair]:
    """Every pair of values in a choice of some dimensions."""
    return set(combinations(sorted(values.items()), 2))


def possible_pairs() -> set[Pair]:
    """Every pair of values of two dimensions that go together."""
    found = {
        ((a, x), (b, y)) for a, b in combinations(sorted(CHOICES), 2) for x in CHOICES[a] for y in CHOICES[b]
    }  # fmt: skip
    apart = {
        tuple(sorted(((a, x), (b, y)))) for a, first, b, second in APART for x in first for y in second
    }  # fmt: skip
    return {pair for pair in found if pair not in apart}


def covering(count: int) -> list[Spelling]:
    """``count`` or more different spellings that hold every pair of values that go together, always the same.

    Greedy (Cohen et al. 1997, AETG): each starts from a pair that is missing, and takes for one dimension after the
    other the value that adds most missing pairs.
    """
    possible = possible_pairs()
    missing = sorted(possible)
    left = set(missing)
    found: dict[Spelling, None] = {Spelling(): None}
    left -= pairs_of(asdict(Spelling()))
    for pair in missing:
        if pair in left:
            _add(found, _completed(dict(pair), possible, left), left)
    turn = 0
    while len(found) < count:  # pairs for a second time
        pair = missing[(turn * 7919) % len(missing)]
        turn += 1
        _add(found, _completed(dict(pair), possible, set(missing[turn % 7 :: 7])), left)
    return list(found)


def _add(found: dict[Spelling, None], spelling: Spelling, left: set[Pair]) -> None:
    left -= pairs_of(asdict(spelling))
    found[spelling] = None


def _completed(values: dict[str, str], possible: set[Pair], left: set[Pair]) -> Spelling:
    """A spelling with these values and others that go together with them and hold many pairs of ``left``."""
    rest = sorted((name for name in CHOICES if name not in values), key=lambda name: (-len(CHOICES[name]), name))
    for name in rest:
        best, most = CHOICES[name][0], -1
        for value in CHOICES[name]:
            new = _new_pairs(values, name, value)
            gain = sum(pair in left for pair in new) if all(pair in possible for pair in new) else -1
            if gain > most:
                best, most = value, gain
        values[name] = best
    return Spelling(**values)


def _new_pairs(values: dict[str, str], name: str, value: str) -> Iterable[Pair]:
    mine = (name, value)
    return [(mine, other) if mine < other else (other, mine) for other in values.items()]
