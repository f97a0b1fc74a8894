"""Operators that work element by element, with NumPy broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..elements import Elements
from ..expr import Expr
from ..graph import Node, Value
from ..indexrules import binary_element, cast_element, power_element, unary_element, where_element
from ..locality import Locality, broadcast_axes
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

_X = np.array([[-2.5, -1.0, -0.3], [0.0, 0.7, 3.25]])
_POSITIVE = np.array([[0.1, 0.5, 1.0], [1.7, 2.0, 9.0]])
_Y = np.array([[1.5, -0.5, 2.0]])


class Unary(Operator):
    """y = f(x), element by element."""

    inputs = ("x",)

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], Any],
        doc: str,
        domain: str = "float",
        *,
        sample: Array = _X,
        to_bool: bool = False,
    ) -> None:
        self.name = name
        self.__doc__ = doc
        self.fn = fn
        self.domain = domain
        self.sample = sample
        self.to_bool = to_bool

    def infer(self, call: Call) -> TensorType:
        x = call.type(0)
        _check_domain(call, x.dtype, self.domain)
        return x.with_dtype(DType.BOOL) if self.to_bool else x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.asarray(self.fn(inputs[0]))

    def index(self, elements: Elements) -> Expr | None:
        return unary_element(self.name, elements)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        x = self.sample
        if self.domain == "bool":
            x = x > 0
        elif self.domain == "bits":
            x = x.astype(np.int64)
        yield Sample((x.astype(np.float32) if x.dtype == np.float64 else x,))


def _check_domain(call: Call, dtype: DType, domain: str) -> None:
    fits = {
        "float": dtype.is_float,
        "number": dtype is not DType.BOOL,
        "int": dtype.is_integer,
        "bool": dtype is DType.BOOL,
        "bits": dtype.is_integer or dtype is DType.BOOL,
        "any": True,
    }[domain]
    if not fits:
        raise call.error(f"needs {domain} operands")


class Binary(Operator):
    """z = f(x, y) with broadcasting; both operands have one dtype."""

    inputs = ("x", "y")

    def __init__(
        self,
        name: str,
        fn: Callable[[Any, Any], Any],
        doc: str,
        domain: str = "number",
        *,
        samples: tuple[Array, Array] = (_X, _Y),
        to_bool: bool = False,
    ) -> None:
        self.name = name
        self.__doc__ = doc
        self.fn = fn
        self.domain = domain
        self._samples = samples
        self.to_bool = to_bool

    def infer(self, call: Call) -> TensorType:
        dtype = call.same_dtype()
        _check_domain(call, dtype, self.domain)
        shape = call.broadcast(call.type(0).shape, call.type(1).shape)
        return TensorType(DType.BOOL if self.to_bool else dtype, shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.asarray(self.fn(inputs[0], inputs[1]))

    def index(self, elements: Elements) -> Expr | None:
        return binary_element(self.name, elements)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        x, y = self._samples
        if self.domain == "bool":
            yield Sample((x > 0, y > 0))
            return
        if self.domain not in ("bits", "int"):
            yield Sample((x.astype(np.float32), y.astype(np.float32)))
        if self.domain != "float":
            yield Sample(((4 * x).astype(np.int64), np.array([3, -2, 5])))


def erf(x: Array) -> Array:
    """The error function in the dtype of ``x`` (half precisions through float32)."""
    from scipy.special import erf as special

    return np.asarray(special(x) if x.dtype.itemsize >= 4 else special(x.astype(np.float32)).astype(x.dtype))


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def divide(x: Array, y: Array) -> Array:
    """True division of floats; of integers the quotient rounded towards zero."""
    if x.dtype.kind in "iu":
        safe = np.where(y == 0, np.ones_like(y), y)
        quotient = x // safe
        inexact = (quotient * safe != x) & ((x < 0) != (safe < 0))
        return np.asarray(quotient + inexact.astype(x.dtype))
    return np.asarray(x / y)


def power(x: Array, y: Array) -> Array:
    """x to the power y in the dtype of x; a small whole exponent by multiplication."""
    if y.size == 1 and float(y.reshape(-1)[0]) == 2.0:
        return np.asarray(np.broadcast_to(x * x, np.broadcast_shapes(x.shape, y.shape)))
    return np.asarray(np.power(x, y)).astype(x.dtype)


_UNARY = (
    Unary("neg", np.negative, "y = -x: the negative", "number"),
    Unary("abs", np.abs, "y = |x|: the absolute value", "number"),
    Unary("sign", np.sign, "y = -1, 0 or 1", "number"),
    Unary("exp", np.exp, "y = e^x: the exponential"),
    Unary("log", np.log, "y = ln x: the natural logarithm", sample=_POSITIVE),
    Unary("sqrt", np.sqrt, "y = the square root of x", sample=_POSITIVE),
    Unary("reciprocal", lambda x: (1 / x).astype(x.dtype), "y = 1 / x: the reciprocal", sample=_POSITIVE),
    Unary("sin", np.sin, "y = sin x, in radians"),
    Unary("cos", np.cos, "y = cos x, in radians"),
    Unary("tan", np.tan, "y = tan x, in radians"),
    Unary("asin", np.arcsin, "y = arcsin x, in radians", sample=_X / 4),
    Unary("acos", np.arccos, "y = arccos x, in radians", sample=_X / 4),
    Unary("atan", np.arctan, "y = arctan x, in radians"),
    Unary("sinh", np.sinh, "y = sinh x: the hyperbolic sine"),
    Unary("cosh", np.cosh, "y = cosh x: the hyperbolic cosine"),
    Unary("asinh", np.arcsinh, "y = arsinh x: the inverse of sinh"),
    Unary("acosh", np.arccosh, "y = arcosh x: the inverse of cosh", sample=_POSITIVE + 1),
    Unary("atanh", np.arctanh, "y = artanh x: the inverse of tanh", sample=_X / 4),
    Unary("tanh", np.tanh, "y = tanh x: the hyperbolic tangent"),
    Unary("sigmoid", sigmoid, "y = 1 / (1 + e^-x)"),
    Unary("erf", erf, "y = 2/sqrt(pi) times the integral of e^(-t^2) from 0 to x"),
    Unary("relu", lambda x: np.maximum(x, x.dtype.type(0)), "y = max(x, 0)", "number"),
    Unary("softplus", lambda x: np.logaddexp(x, x.dtype.type(0)), "y = ln(1 + e^x)"),
    Unary("floor", np.floor, "y = the largest whole number not above x"),
    Unary("ceil", np.ceil, "y = the smallest whole number not below x"),
    Unary("round", np.rint, "y = the nearest whole number, halves to the even one"),
    Unary("not", np.logical_not, "y = not x: the negation", "bool"),
    Unary("bit_not", np.invert, "y = x with every bit flipped", "bits", sample=4 * _X),
    Unary("is_nan", np.isnan, "whether x is not a number", to_bool=True),
    Unary("is_inf", np.isinf, "whether x is plus or minus infinity", to_bool=True),
)

_BINARY = (
    Binary("add", np.add, "z = x + y: the sum"),
    Binary("sub", np.subtract, "z = x - y: the difference"),
    Binary("mul", np.multiply, "z = x * y: the product"),
    Binary("div", divide, "z = x / y; integers round towards zero"),
    Binary("mod", np.mod, "z = x - y * floor(x / y): the remainder with the sign of y"),
    Binary("fmod", np.fmod, "z = x - y * trunc(x / y): the remainder with the sign of x"),
    Binary("min", np.minimum, "z = the smaller of x and y"),
    Binary("max", np.maximum, "z = the larger of x and y"),
    Binary("and", np.logical_and, "z = x and y: both hold", "bool"),
    Binary("or", np.logical_or, "z = x or y: one holds or both", "bool"),
    Binary("xor", np.logical_xor, "z = x or y but not both", "bool"),
    Binary("bit_and", np.bitwise_and, "z = the bits set in x and in y", "bits"),
    Binary("bit_or", np.bitwise_or, "z = the bits set in x or in y", "bits"),
    Binary("bit_xor", np.bitwise_xor, "z = the bits set in one of x and y", "bits"),
    Binary("equal", np.equal, "whether x = y", "any", to_bool=True),
    Binary("less", np.less, "whether x < y", to_bool=True),
    Binary("less_equal", np.less_equal, "whether x <= y", to_bool=True),
    Binary("greater", np.greater, "whether x > y", to_bool=True),
    Binary("greater_equal", np.greater_equal, "whether x >= y", to_bool=True),
)


class Pow(Operator):
    """z = x to the power y, with broadcasting; the result has the dtype of x."""

    name = "pow"
    inputs = ("x", "y")

    def infer(self, call: Call) -> TensorType:
        _check_domain(call, call.type(0).dtype, "number")
        _check_domain(call, call.type(1).dtype, "number")
        return TensorType(call.type(0).dtype, call.broadcast(call.type(0).shape, call.type(1).shape))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return power(inputs[0], inputs[1])

    def index(self, elements: Elements) -> Expr | None:
        return power_element(elements)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_POSITIVE.astype(np.float32), np.array([0.5, 2, -1], np.float32)))
        yield Sample((_X.astype(np.float32), np.array([2], np.float32)))


class Where(Operator):
    """z = x where c holds, else y, with broadcasting."""

    name = "where"
    inputs = ("c", "x", "y")

    def infer(self, call: Call) -> TensorType:
        if call.type(0).dtype is not DType.BOOL:
            raise call.error("the condition must be bool")
        shape = call.broadcast(call.type(0).shape, call.type(1).shape, call.type(2).shape)
        return TensorType(call.same_dtype(1, 2), shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.asarray(np.where(inputs[0], inputs[1], inputs[2]))

    def index(self, elements: Elements) -> Expr | None:
        return where_element(elements)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X > 0, _X.astype(np.float32), np.array([-np.inf], np.float32)))


class Cast(Operator):
    """y = x in another dtype; floats become integers towards zero, anything but 0 becomes true."""

    name = "cast"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"dtype": Attr("dtype")}

    def infer(self, call: Call) -> TensorType:
        return call.type(0).with_dtype(call.attr("dtype"))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(inputs[0]).astype(run.result_dtype())

    def index(self, elements: Elements) -> Expr | None:
        return cast_element(elements)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X.astype(np.float32),), {"dtype": DType.INT64})
        yield Sample((_X > 0,), {"dtype": DType.FLOAT32})
        yield Sample((np.array([0, 1, 2]),), {"dtype": DType.BOOL})


class Gelu(Operator):
    """y = x * Phi(x) = 0.5 x (1 + erf(scale x)), Phi the normal distribution (Hendrycks and Gimpel 2016);
    ``approximate = "tanh"`` is 0.5 x (1 + tanh(scale (x + cubic x^3))).

    ``scale`` is sqrt(1/2), or sqrt(2/pi) for the approximation, and ``cubic`` is 0.044715. A model may hold these
    numbers rounded, as 0.70710677 or as a division by 1.4142135; then the attributes say which it has.
    """

    name = "gelu"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "approximate": Attr("str", "none"),
        "scale": Attr("float", None),
        "cubic": Attr("float", None),
    }

    def infer(self, call: Call) -> TensorType:
        _check_domain(call, call.type(0).dtype, "float")
        if call.attr("approximate") not in ("none", "tanh"):
            raise call.error('approximate is "none" or "tanh"')
        if call.attr("approximate") == "none" and call.attr("cubic") is not None:
            raise call.error('cubic is for approximate = "tanh"')
        return call.type(0)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x = inputs[0]
        scale, cubic = (np.asarray(number, x.dtype) for number in gelu_numbers(run.attrs))
        if run.attrs["approximate"] == "tanh":
            y = 0.5 * x * (1 + np.tanh(scale * (x + cubic * x * x * x)))
        else:
            y = 0.5 * x * (1 + erf(x * scale))
        return np.asarray(y, x.dtype)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        scale, cubic = gelu_numbers(attrs)
        if attrs["approximate"] == "tanh":
            inner = b("tanh", b.mul(b.add(x, b.mul(b.mul(b.mul(x, x), x), cubic)), scale))
        else:
            inner = b("erf", b.mul(x, scale))
        return [b.mul(b.mul(x, 0.5), b.add(inner, 1.0))]

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        x = _X.astype(np.float32)
        yield Sample((x,))
        yield Sample((x,), {"approximate": "tanh"})
        yield Sample((x,), {"scale": 0.7}, (0.5 * x * (1 + erf(x * np.float32(0.7))),))
        rough = {"approximate": "tanh", "scale": 0.8, "cubic": 0.05}
        y = x.astype(np.float64)
        yield Sample((x,), rough, ((y / 2 * (1 + np.tanh(0.8 * (y + 0.05 * y**3)))).astype(np.float32),))


def gelu_numbers(attrs: Mapping[str, Any]) -> tuple[float, float]:
    """``scale`` and ``cubic`` of a gelu, the exact numbers where it names none."""
    exact = np.sqrt(2 / np.pi) if attrs["approximate"] == "tanh" else np.sqrt(0.5)
    scale, cubic = attrs["scale"], attrs["cubic"]
    return float(exact) if scale is None else scale, 0.044715 if cubic is None else cubic


class Silu(Operator):
    """y = x * sigmoid(alpha * x), also called swish (Ramachandran, Zoph and Le 2017); with alpha = 1.702 an
    approximation of gelu (Hendrycks and Gimpel 2016)."""

    name = "silu"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"alpha": Attr("float", 1.0)}

    def infer(self, call: Call) -> TensorType:
        _check_domain(call, call.type(0).dtype, "float")
        return call.type(0)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x = inputs[0]
        return np.asarray(x * sigmoid(x * np.asarray(run.attrs["alpha"], x.dtype)))

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        return [b.mul(x, b("sigmoid", x if attrs["alpha"] == 1 else b.mul(x, attrs["alpha"])))]

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        x = _X.astype(np.float32)
        yield Sample((x,))
        yield Sample((x,), {"alpha": 1.702}, (x / (1 + np.exp(-1.702 * x.astype(np.float64))).astype(np.float32),))


OPS: tuple[Operator, ...] = (*_UNARY, *_BINARY, Pow(), Where(), Cast(), Gelu(), Silu())
