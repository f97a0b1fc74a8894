"""What a mask is called: words for a set, found by exact comparison and never by its spelling."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import islpy as isl
from .dims import least
from .maskset import band, block, heads
from .presburger import TUPLE, involves, load_isl, parameters, read_set


def _bound(points: isl.Set, side: str) -> isl.Aff | None:
    """The ``dim_min`` or ``dim_max`` of a set of one dimension, when it is one affine form of the parameters."""
    try:
        pieces = getattr(points, side)(0).get_pieces()
    except load_isl().Error:
        return None
    return pieces[0][1] if len(pieces) == 1 and _show(pieces[0][1]) is not None else None


def _show(form: isl.Aff) -> str | None:
    """``m - n + 1``; None unless all coefficients are whole and there is no division."""
    isl = load_isl()
    if form.dim(isl.dim_type.div):
        return None
    count = form.dim(isl.dim_type.param)
    terms = [
        (form.get_coefficient_val(isl.dim_type.param, k), form.get_dim_name(isl.dim_type.param, k))
        for k in range(count)
    ]
    terms.append((form.get_constant_val(), ""))
    if not all(value.is_int() for value, _ in terms):
        return None
    whole = [(int(value.to_python()), name) for value, name in terms]
    text = ""
    for value, name in sorted((t for t in whole if t[0]), key=lambda t: (not t[1], t[0] < 0)):
        size = name if abs(value) == 1 and name else f"{abs(value)}{'*' if name else ''}{name}"
        sign = ("-" if value < 0 else "") if not text else (" - " if value < 0 else " + ")
        text += sign + size
    return text or "0"


def _line(points: isl.Set, condition: str) -> isl.Set:
    """A set of one dimension d, with the parameters of ``points``."""
    result: isl.Set = load_isl().Set(f"[{', '.join(parameters(points))}] -> {{ [d] : {condition} }}")
    return result


def _ordinal(k: int) -> str:
    return f"{k}{'th' if k % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(k % 10, 'th')}"


def _causal_words(low: isl.Aff) -> str:
    offset = _show(low.neg())
    return "causal" if offset == "0" else f"causal with offset {offset}"


def _difference_words(line: isl.Set, low: isl.Aff | None) -> str | None:
    """Words for a set of d = i - j; with ``low``, within d >= low, of which the caller has told."""
    parts: list[str] = []
    if low is None:
        low = _bound(line, "dim_min")
        parts = [_causal_words(low)] if low is not None else []
    high = _bound(line, "dim_max")
    ends = [f"d {sign} {_show(end)}" for sign, end in ((">=", low), ("<=", high)) if end is not None]
    run = " and ".join(ends) or "true"

    def width(end: isl.Aff, inclusive: int) -> str:
        length = _show((end if low is None else end.sub(low)).add_constant_val(load_isl().Val(inclusive)))
        return "later keys only" if low is None and length == "0" else f"window {length}"

    tail = [width(high, 1)] if high is not None else []
    if line.is_equal(_line(line, run)):
        return ", ".join(parts + tail)
    step = line.get_stride(0).to_python()
    if step > 1 and line.is_equal(_line(line, f"{run} and d mod {step} = 0")):
        return ", ".join([*parts, f"every {_ordinal(step)} key", *tail])
    gap = _bound(_line(line, run).subtract(line), "dim_min")
    if gap is None:
        return None
    step = line.intersect(_line(line, f"d > {_show(gap)}")).get_stride(0).to_python()
    if step > 1 and line.is_equal(_line(line, f"{run} and (d < {_show(gap)} or d mod {step} = 0)")):
        return ", ".join([*parts, f"({width(gap, 0)} or every {_ordinal(step)} key)", *tail])
    return None


def _column_words(line: isl.Set, size: int | None) -> str | None:
    """Words for a set of keys j that every query reads; ``size`` is a block's."""
    high = _bound(line, "dim_max")
    if high is not None and line.is_equal(_line(line, f"d <= {_show(high)}")):
        return f"prefix {_show(high.add_constant_val(load_isl().Val(1)))}"
    if size is None:
        return None
    first = _bound(line.intersect(_line(line, f"0 <= d < {size}")), "dim_min")
    if first is not None and line.is_equal(_line(line, f"d mod {size} >= {_show(first)}")):
        return f"the last {size - _constant(first)} of every {size} keys"
    return None


def set_words(points: isl.Set) -> str | None:
    """Words for a set; None when there are none. What holds of the positions i + past instead of i is said so:
    ``causal, window 128, after past tokens``."""
    for name in parameters(points):
        if least(name) == 0:
            isl = load_isl()
            moved = points.apply(isl.Map(f"[{name}] -> {{ {TUPLE} -> [b, h, i + {name}, j] }}"))
            at = moved.find_dim_by_name(isl.dim_type.param, name)
            words = None if moved.involves_dims(isl.dim_type.param, at, 1) else _words(moved)
            if words is not None:
                return f"{words}, after {name} tokens"
    return _words(points)


def _words(points: isl.Set) -> str | None:
    isl = load_isl()
    if points.is_empty():
        return "no key"
    if points.complement().is_empty():
        return "all keys"
    if involves(points, "h"):
        return _head_words(points)
    if involves(points, "b"):
        return None
    minus, column = isl.Map(f"{{ {TUPLE} -> [i - j] }}"), isl.Map(f"{{ {TUPLE} -> [j] }}")
    line = points.apply(minus)
    low, high = _bound(line, "dim_min"), _bound(line, "dim_max")
    if low is not None and high is not None and _show(high.add(low)) == "0" and _show(high) != "0":
        side = _show(high)
        if points.is_equal(read_set(band(str(side), str(side)).text)):
            return f"band of {side} on both sides"
        if high.is_cst() and points.is_equal(read_set(block(_constant(high) + 1).text)):
            return f"blocks of {_constant(high) + 1}"
    # The rest is an intersection with a causal set, of a union of: a set of differences, columns, blocks.
    beyond = points.subtract(points)
    if low is not None:
        beyond = _line(line, f"d < {_show(low)}").apply(minus.reverse())
    lacking = points.union(beyond).complement()
    if lacking.is_empty():
        return _causal_words(low) if low is not None else None
    core = line.subtract(lacking.apply(minus))
    columns = lacking.apply(column).complement()
    reach = _bound(points.subtract(columns.apply(column.reverse())).apply(minus), "dim_max")
    size = _constant(reach) + 1 if reach is not None and reach.is_cst() else None
    parts: list[tuple[Any, str | None]] = []
    if not core.is_empty():
        parts.append((core.apply(minus.reverse()), _difference_words(core, low)))
    if size is not None and size > 1:
        parts.append((read_set(block(size).text), f"blocks of {size}"))
    if not columns.is_empty():
        parts.append((columns.apply(column.reverse()), _column_words(columns, size)))
    known = [(part, words) for part, words in parts if words]
    for some in [[k] for k in known] + [list(pair) for pair in combinations(known, 2)]:
        union = beyond
        for part, _ in some:
            union = union.union(part)
        if union.intersect(lacking).is_empty() and union.union(lacking).complement().is_empty():
            words = [w for _, w in some]
            inner = words[0] if len(words) == 1 else " or ".join(f"({w})" if "," in w else w for w in words)
            if low is None:
                return inner
            return f"{_causal_words(low)}, {inner if len(words) == 1 else f'({inner})'}"
    return None


def _constant(form: isl.Aff) -> int:
    return int(form.get_constant_val().to_python())


def _head_words(points: isl.Set) -> str | None:
    """A mask of a range of heads, alike for each of them."""
    isl = load_isl()
    which = points.apply(isl.Map(f"{{ {TUPLE} -> [h] }}"))
    low, high = _bound(which, "dim_min"), _bound(which, "dim_max")
    each = points.apply(isl.Map(f"{{ {TUPLE} -> [b, other, i, j] }}"))
    if (
        low is None
        or high is None
        or not points.is_equal(each.intersect(read_set(heads(str(_show(low)), str(_show(high))).text)))
    ):
        return None
    inner = _words(each)
    return f"heads {_show(low)} to {_show(high)}: {inner}" if inner else None
