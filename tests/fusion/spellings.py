"""The ways in which people write attention: independent choices, which go together, and a sample that covers them."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from itertools import combinations

__all__ = ["CHOICES", "Spelling", "covering", "is_valid"]

CHOICES: dict[str, tuple[str, ...]] = {
    # where the heads come from: given, a projection each, one projection cut up in four ways
    "source": ("heads", "projected", "packed_slices", "packed_five_slice", "packed_five_gather", "head_packed"),
    # how K is turned: once, three times, through merged batch and heads, or given as [b, h, d, m]
    "keys": ("once", "twice", "merged", "given"),
    "repeat": ("none", "expand", "gather", "concat"),
    "scale": ("div_scores", "mul_scores", "mul_q", "div_q", "mul_k", "split", "absent", "per_head", "learned"),
    "softmax": ("last", "positive_axis", "transposed", "written", "written_nomax", "exp2", "late", "log"),
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
        "padding_where_inf",
        "padding_add_min",
        "causal_padding_inf",
        "causal_padding_min",
        "float_b1nm",
        "float_b11m",
        "float_1h1m",
        "float_nm",
    ),
    "bias": ("none", "alibi", "alibi_keys", "buckets", "dense"),
    "softcap": ("none", "tanh"),
    "sink": ("none", "plain", "shifted"),
    "width": ("same", "other"),
    "cross": ("self", "cross"),
    "weights": ("inside", "output"),
}


@dataclass(frozen=True)
class Spelling:
    """One of each of ``CHOICES``; the first of each is the plain one."""

    source: str = "heads"
    keys: str = "once"
    repeat: str = "none"
    scale: str = "div_scores"
    softmax: str = "last"
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
        return self.mask.startswith("float") or "padding" in self.mask or "penalty" in self.mask

    @property
    def ends_in_infinity(self) -> bool:
        """Whether a masked key has the score -inf."""
        return self.mask.endswith("inf") or self.mask.startswith("float")

    @property
    def may_be_refused(self) -> bool:
        """Whether a row may lose all its keys in a way that the original turns into NaN: no fusion, or one that gives
        NaN too, is right then."""
        if not self.data_dependent:
            return False
        if self.softmax == "written_nomax":
            return True
        return self.ends_in_infinity and self.guard == "none" and self.sink == "none"

    @property
    def full_rows(self) -> bool:
        """Whether the original gives numbers when all keys of a row are masked."""
        if self.softmax == "written_nomax":
            return self.ends_in_infinity and self.guard == "nan"
        return not self.ends_in_infinity or self.guard == "nan" or self.sink != "none"

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


def is_valid(s: Spelling) -> bool:
    """Whether the choices go together."""
    packed = s.source not in ("heads", "projected")
    five = packed and s.source != "packed_slices"
    rules = (
        not (packed and s.cross == "cross"),
        not (five and (s.repeat != "none" or s.width == "other")),
        not (s.keys == "given" and s.source != "heads"),
        not (s.sink != "none" and (s.softmax not in ("last", "positive_axis", "written") or s.rank != "four")),
        not (s.softmax == "positive_axis" and s.rank != "four"),
        not (s.softmax == "late" and (s.weights == "output" or s.guard == "nan")),
        # A window of an attention with fewer keys than queries leaves rows without a key.
        not (s.mask.startswith("window") and s.cross == "cross"),
    )
    return all(rules)


def _pairs(values: dict[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(combinations(sorted(values.items()), 2))


def covering(count: int, seed: int = 0) -> list[Spelling]:
    """``count`` or more different spellings that hold every pair of choices that go together, the same for a seed."""
    rng = random.Random(seed)

    def draw(**fixed: str) -> Spelling | None:
        for _ in range(60):
            # Plain choices come often, so that the others are not drowned.
            values = {k: v[0] if rng.random() < 0.3 else rng.choice(v) for k, v in CHOICES.items()} | fixed
            spelling = Spelling(**values)
            if is_valid(spelling):
                return spelling
        return None

    missing = {
        ((a, x), (b, y))
        for a, b in combinations(sorted(CHOICES), 2)
        for x in CHOICES[a]
        for y in CHOICES[b]
    }  # fmt: skip
    found: dict[Spelling, None] = {Spelling(): None}
    for pair in sorted(missing):
        if pair not in missing:
            continue
        drawn = [s for s in (draw(**dict(pair)) for _ in range(6)) if s is not None]
        if not drawn:
            missing.discard(pair)
            continue
        best = max(drawn, key=lambda s: len(missing & _pairs(asdict(s))))
        missing -= _pairs(asdict(best))
        found[best] = None
    while len(found) < count:
        extra = draw()
        if extra is not None:
            found[extra] = None
    return list(found)
