"""Functions of tensors without parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import Dim, ShapeError
from .tensor import Number, Operand, Tensor

__all__ = [
    "concat",
    "cos",
    "cumsum",
    "exp",
    "gather",
    "gelu",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "maximum",
    "merge_heads",
    "minimum",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "split_heads",
    "sqrt",
    "tanh",
    "where",
]


def _unary(name: str, formula: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x.op(name)

    function.__name__ = name
    function.__doc__ = f"{formula}, element by element."
    return function


exp = _unary("exp", "e^x")
log = _unary("log", "ln x")
sqrt = _unary("sqrt", "the square root of x")
sin = _unary("sin", "sin x")
cos = _unary("cos", "cos x")
tanh = _unary("tanh", "tanh x")
sigmoid = _unary("sigmoid", "1 / (1 + e^-x)")
softplus = _unary("softplus", "ln(1 + e^x)")
relu = _unary("relu", "max(x, 0)")
silu = _unary("silu", "x sigmoid(x), also called swish (Ramachandran, Zoph and Le 2017)")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Phi(x) with the normal distribution Phi, or its ``"tanh"`` approximation (Hendrycks and Gimpel 2016)."""
    return x.op("gelu", approximate=approximate)


def maximum(x: Tensor, y: Operand) -> Tensor:
    """The larger of x and y, element by element."""
    return x.op("max", y)


def minimum(x: Tensor, y: Operand) -> Tensor:
    """The smaller of x and y, element by element."""
    return x.op("min", y)


def where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    """x where the condition holds, else y; one of x and y may be a number."""
    model = condition.model
    if not isinstance(x, Tensor):
        x = _number_like(x, y)
    if not isinstance(y, Tensor):
        y = _number_like(y, x)
    return model.op("where", condition, x, y)


def _number_like(number: Number, other: Operand) -> Tensor:
    if not isinstance(other, Tensor):
        raise ShapeError("where needs a tensor among its two branches")
    return other.model.constant(number, other.dtype)


def concat(tensors: Sequence[Tensor], axis: int = -1) -> Tensor:
    """The tensors one behind the other along ``axis``."""
    if not tensors:
        raise ShapeError("concat needs at least one tensor")
    return tensors[0].model.op("concat", *tensors, axis=axis)


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """The entries ``indices`` along ``axis``: an embedding look-up for axis 0."""
    return x.op("gather", indices, axis=axis)


def cumsum(x: Tensor, axis: int) -> Tensor:
    """Running sums along ``axis``."""
    return x.op("cumsum", axis=axis)


def softmax(x: Tensor, axis: int = -1, temperature: float = 1.0) -> Tensor:
    """e^(x/T) normalised along ``axis`` (Bridle 1990); T is the temperature."""
    return (x if temperature == 1.0 else x / temperature).op("softmax", axis=axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of the softmax along ``axis``."""
    return x.op("log_softmax", axis=axis)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W + b with W of shape [in, out]."""
    y = x @ weight
    return y if bias is None else y + bias


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba, Kiros and Hinton 2016)."""
    return x.op("layer_norm", weight, bias, eps=eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x.op("rms_norm", weight, eps=eps)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, n, heads * d] → [batch, heads, n, d]."""
    if x.ndim != 3:
        raise ShapeError(f"split_heads takes [batch, n, width], not {x!r}, at {x.model.place()}")
    batch, n, width = x.shape
    if not isinstance(width, int) or width % heads:
        raise ShapeError(f"a width of {width} does not split into {heads} heads at {x.model.place()}")
    return x.reshape(batch, n, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, n, d] → [batch, n, heads * d]."""
    if x.ndim != 4:
        raise ShapeError(f"merge_heads takes [batch, heads, n, d], not {x!r}, at {x.model.place()}")
    batch, heads, n, d = x.shape
    width: Dim = heads * d
    return x.transpose(0, 2, 1, 3).reshape(batch, n, width)
