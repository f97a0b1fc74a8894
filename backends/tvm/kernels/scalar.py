"""What operators compute of scalars, as TensorIR expressions that vectorise: no branches, and polynomials for the
transcendental functions of float32 that models spend time on. Half precisions are computed in float32 and rounded
after every operator, as NumPy rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from .emit import differs, kind_of, same

__all__ = [
    "HALF", "OPERATORS", "Rule", "apply", "convert", "exp", "exp_nonpositive", "is_nan", "rounded", "stored", "wide",
]  # fmt: skip

HALF = ("float16", "bfloat16")

Rule = Callable[[Sequence[Any], str], Any]
"""What an operator computes of its operands, and in which dtype."""


def wide(dtype: str) -> str:
    """The dtype in which values of ``dtype`` are computed."""
    return "float32" if dtype in HALF else dtype


def stored(value: Any, dtype: str) -> Any:
    """A value of ``wide(dtype)`` as it is stored."""
    return tirx.Cast(dtype, value) if dtype in HALF else value


def _c(value: float, dtype: str) -> Any:
    return tirx.const(value, dtype)


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def is_nan(x: Any) -> Any:
    """Whether a float32 or float64 is NaN, by its bits: TVM takes x = x for true where it compares one by one."""
    integer, mask, infinity = {
        "float32": ("int32", 0x7FFFFFFF, 0x7F800000),
        "float64": ("int64", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    }[kind_of(x)]
    bits = tirx.bitwise_and(tirx.reinterpret(integer, x), tirx.const(mask, integer))
    return bits > tirx.const(infinity, integer)


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial with the highest coefficient first."""
    total = _c(coefficients[0], "float32")
    for c in coefficients[1:]:
        total = total * x + _c(c, "float32")
    return total


_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of (e^r - 1 - r) / r² for |r| <= ln(2)/2 (Cephes, expf)."""


def _exp_parts(x: Any) -> tuple[Any, Any]:
    """n and e^(x - n ln 2) for a float32 that is neither large nor infinite."""
    n = tirx.floor(x * _c(1.44269504088896341, "float32") + _c(0.5, "float32"))
    r = x - n * _c(0.693359375, "float32")
    r = r - n * _c(-2.12194440e-4, "float32")
    return n, _horner(r, _EXP) * (r * r) + r + _c(1.0, "float32")


def _two_to(n: Any) -> Any:
    bits = (tirx.Cast("int32", n) + tirx.const(127, "int32")) << tirx.const(23, "int32")
    return tirx.reinterpret("float32", bits)


def exp_nonpositive(x: Any, dtype: str) -> Any:
    """e^x for x <= 0, exactly 0 below the range of normal numbers, -inf too. NaN gives NaN."""
    if dtype != "float32":
        return tirx.exp(x)
    low = _c(-87.3, "float32")
    n, y = _exp_parts(tirx.Select(x < low, low, x))
    return tirx.Select(x < low, _c(0.0, "float32"), y * _two_to(n))


def exp(x: Any, dtype: str) -> Any:
    """e^x."""
    if dtype != "float32":
        return tirx.exp(x)
    low, high = _c(-87.3, "float32"), _c(89.0, "float32")
    n, y = _exp_parts(tirx.Select(x < low, low, tirx.Select(x > high, high, x)))
    value = y * _two_to(n - _c(1.0, "float32")) * _c(2.0, "float32")
    return tirx.Select(x < low, _c(0.0, "float32"), tirx.Select(same(x, x), value, x))


_TANH = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def _tanh(x: Any, dtype: str) -> Any:
    """A rational approximation of 7th degree in x² (Eigen)."""
    if dtype != "float32":
        return tirx.tanh(x)
    bound = _c(7.90531110763549805, "float32")
    y = tirx.Select(x > bound, bound, tirx.Select(x < -bound, -bound, x))
    square = y * y
    return y * _horner(square, _TANH) / _horner(square, _TANH_DENOMINATOR)


_ERF = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def _erf(x: Any, dtype: str) -> Any:
    """A rational approximation in x² (Eigen)."""
    if dtype != "float32":
        return tirx.call_pure_extern(dtype, "erf", x)
    bound = _c(4.0, "float32")
    y = tirx.Select(x > bound, bound, tirx.Select(x < -bound, -bound, x))
    square = y * y
    return y * _horner(square, _ERF) / _horner(square, _ERF_DENOMINATOR)


def _libm(name: str, x: Any, dtype: str) -> Any:
    """A function of C's library."""
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), x)


def _same(x: Any, y: Any) -> Any:
    """x = y, of truth values too."""
    if kind_of(x) == "bool":
        return tirx.Or(tirx.And(x, y), tirx.And(tirx.Not(x), tirx.Not(y)))
    return same(x, y)


def _sigmoid(x: Any, dtype: str) -> Any:
    return _c(1.0, dtype) / (_c(1.0, dtype) + exp(-x, dtype))


def _softplus(x: Any, dtype: str) -> Any:
    zero = _c(0.0, dtype)
    return _max(x, zero) + tirx.log1p(exp(-tirx.abs(x), dtype))


def _gelu(x: Any, dtype: str, attrs: Mapping[str, Any], operators: Mapping[str, Rule]) -> Any:
    half, one = _c(0.5, dtype), _c(1.0, dtype)
    if attrs["approximate"] == "tanh":
        inner = _c(attrs["scale"], dtype) * (x + _c(attrs["cubic"], dtype) * x * x * x)
        return half * x * (one + operators["tanh"]([inner], dtype))
    return half * x * (one + operators["erf"]([x * _c(attrs["scale"], dtype)], dtype))


def _max(x: Any, y: Any) -> Any:
    """The larger; NaN where one of them is NaN, as NumPy has it."""
    return tirx.Select(tirx.any(x > y, is_nan(x)), x, y) if _is_float(kind_of(x)) else tirx.max(x, y)


def _min(x: Any, y: Any) -> Any:
    return tirx.Select(tirx.any(x < y, is_nan(x)), x, y) if _is_float(kind_of(x)) else tirx.min(x, y)


def _sign(x: Any, dtype: str) -> Any:
    zero, one, minus = (tirx.const(n, dtype) for n in (0, 1, -1))
    found = tirx.Select(x > zero, one, tirx.Select(x < zero, minus, zero))
    return tirx.Select(is_nan(x), x, found) if _is_float(dtype) else found


def _div(x: Any, y: Any, dtype: str) -> Any:
    if _is_float(dtype):
        return x / y
    one, zero = tirx.const(1, dtype), tirx.const(0, dtype)
    return tirx.truncdiv(x, tirx.Select(same(y, zero), one, y))


def _mod(x: Any, y: Any, dtype: str, floored: bool) -> Any:
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
    if _is_float(dtype):
        r = tirx.call_pure_extern(dtype, "fmodf" if dtype == "float32" else "fmod", x, y)
        return (
            tirx.Select(
                tirx.all(differs(r, zero), differs(tirx.Select(r < zero, one, zero), tirx.Select(y < zero, one, zero))),
                r + y,
                r,
            )
            if floored
            else r
        )
    safe = tirx.Select(same(y, zero), tirx.const(1, dtype), y)
    return tirx.floormod(x, safe) if floored else tirx.truncmod(x, safe)


def _pow(x: Any, y: Any, dtype: str) -> Any:
    if isinstance(y, tirx.FloatImm | tirx.IntImm) and y.value == 2:
        return x * x
    if not _is_float(dtype):
        return tirx.Cast(dtype, tirx.pow(tirx.Cast("float64", x), tirx.Cast("float64", y)))
    return tirx.pow(x, tirx.Cast(dtype, y))


def _unary(fn: Callable[[Any], Any]) -> Rule:
    return lambda args, dtype: fn(args[0])


def _typed(fn: Callable[[Any, str], Any]) -> Rule:
    return lambda args, dtype: fn(args[0], dtype)


def _binary(fn: Callable[[Any, Any], Any]) -> Rule:
    return lambda args, dtype: fn(args[0], args[1])


OPERATORS: dict[str, Rule] = {
    "neg": _unary(lambda x: -x),
    "abs": _unary(tirx.abs),
    "sign": _typed(_sign),
    "exp": _typed(exp),
    "log": _unary(tirx.log),
    "sqrt": _unary(tirx.sqrt),
    "reciprocal": _typed(lambda x, dtype: _c(1.0, dtype) / x),
    "sin": _unary(tirx.sin),
    "cos": _unary(tirx.cos),
    "tan": _typed(lambda x, dtype: _libm("tan", x, dtype)),
    "asin": _typed(lambda x, dtype: _libm("asin", x, dtype)),
    "acos": _typed(lambda x, dtype: _libm("acos", x, dtype)),
    "atan": _typed(lambda x, dtype: _libm("atan", x, dtype)),
    "sinh": _typed(lambda x, dtype: _libm("sinh", x, dtype)),
    "cosh": _typed(lambda x, dtype: _libm("cosh", x, dtype)),
    "asinh": _typed(lambda x, dtype: _libm("asinh", x, dtype)),
    "acosh": _typed(lambda x, dtype: _libm("acosh", x, dtype)),
    "atanh": _typed(lambda x, dtype: _libm("atanh", x, dtype)),
    "tanh": _typed(_tanh),
    "sigmoid": _typed(_sigmoid),
    "erf": _typed(_erf),
    "relu": _typed(lambda x, dtype: _max(x, tirx.const(0, dtype))),
    "softplus": _typed(_softplus),
    "floor": _unary(tirx.floor),
    "ceil": _unary(tirx.ceil),
    "round": _unary(tirx.nearbyint),
    "not": _unary(tirx.Not),
    "bit_not": _typed(lambda x, dtype: tirx.Not(x) if dtype == "bool" else tirx.bitwise_not(x)),
    "is_nan": _unary(is_nan),
    "is_inf": _unary(lambda x: same(tirx.abs(x), tirx.infinity(kind_of(x)))),
    "add": _binary(lambda x, y: x + y),
    "sub": _binary(lambda x, y: x - y),
    "mul": _binary(lambda x, y: x * y),
    "div": lambda args, dtype: _div(args[0], args[1], dtype),
    "mod": lambda args, dtype: _mod(args[0], args[1], dtype, True),
    "fmod": lambda args, dtype: _mod(args[0], args[1], dtype, False),
    "pow": lambda args, dtype: _pow(args[0], args[1], dtype),
    "min": _binary(_min),
    "max": _binary(_max),
    "and": _binary(tirx.And),
    "or": _binary(tirx.Or),
    "xor": _binary(lambda x, y: tirx.Not(_same(x, y))),
    "bit_and": lambda args, dtype: tirx.And(*args) if dtype == "bool" else tirx.bitwise_and(*args),
    "bit_or": lambda args, dtype: tirx.Or(*args) if dtype == "bool" else tirx.bitwise_or(*args),
    "bit_xor": lambda args, dtype: tirx.Not(_same(*args)) if dtype == "bool" else tirx.bitwise_xor(*args),
    "equal": _binary(_same),
    "less": _binary(lambda x, y: x < y),
    "less_equal": _binary(lambda x, y: x <= y),
    "greater": _binary(lambda x, y: x > y),
    "greater_equal": _binary(lambda x, y: x >= y),
    "where": lambda args, dtype: tirx.Select(args[0], args[1], args[2]),
}
"""The operators that work element by element, but ``cast``, ``gelu`` and ``silu``, which have attributes."""


def convert(x: Any, source: str, target: str) -> Any:
    """``cast`` of a value that is computed in ``wide(source)``, to be computed in ``wide(target)``."""
    have, want = wide(source), wide(target)
    if target == "bool":
        return x if source == "bool" else differs(x, tirx.const(0, have))
    if source == "bool":
        return tirx.Select(x, tirx.const(1, want), tirx.const(0, want))
    return x if have == want else tirx.Cast(want, x)


def rounded(x: Any, dtype: str) -> Any:
    """A value of ``wide(dtype)`` after it was stored as ``dtype``."""
    return tirx.Cast("float32", tirx.Cast(dtype, x)) if dtype in HALF else x


def apply(
    op: str,
    args: Sequence[Any],
    dtypes: Sequence[str],
    dtype: str,
    attrs: dict[str, Any],
    operators: Mapping[str, Rule] = OPERATORS,
) -> Any:
    """The value of an operator, computed and given in ``wide(dtype)``."""
    computed = wide(dtype)
    if op == "cast":
        return rounded(convert(args[0], dtypes[0], dtype), dtype)
    if op == "gelu":
        return rounded(_gelu(args[0], computed, attrs, operators), dtype)
    if op == "silu":
        x = args[0] if attrs["alpha"] == 1 else args[0] * _c(attrs["alpha"], computed)
        return rounded(args[0] * operators["sigmoid"]([x], computed), dtype)
    of_operands = computed if dtype != "bool" else wide(dtypes[-1])
    return rounded(operators[op](args, of_operands), dtype)
