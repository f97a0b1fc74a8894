"""How convolutions and Fourier transforms are written."""

from __future__ import annotations

from typing import Any

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref
from .kernels import Dialect, type_for

__all__ = ["EMISSIONS"]


def _conv(e: Emitter, node: Node) -> Ref:
    dtype = node.output.dtype
    wide = DType.FLOAT32 if dtype.bits == 16 else dtype  # half precisions are computed in float32
    operands = [e.cast(ref, wide) for ref in e.operands(node) if ref is not None]
    attrs: dict[str, Any] = {name: list(node.attr(name)) for name in ("strides", "dilations") if node.attr(name)}
    if node.attr("groups") != 1:
        attrs["group"] = node.attr("groups")
    if node.attr("before") or node.attr("after"):
        none = (0,) * (node.output.type.rank - 2)
        attrs["pads"] = [*(node.attr("before") or none), *(node.attr("after") or none)]
    return e.cast(e.compute("Conv", *operands, **attrs), dtype)


def _has_dft(node: Node, dialect: Dialect) -> bool:
    return dialect.opset >= 17 and type_for("DFT", node.output.dtype, dialect) is not None


def _dft(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    axis, inverse = node.attr("axis") % len(x.shape), int(node.attr("inverse"))
    if e.dialect.opset < 20:
        return e.compute("DFT", x, axis=axis, inverse=inverse)
    used = type_for("DFT", x.dtype, e.dialect) or x.dtype
    made = e.node("DFT", e.cast(x, used), None, e.number(axis, DType.INT64), inverse=inverse)
    return e.cast(made, x.dtype)


EMISSIONS: dict[str, Emission] = {"conv": Emission(_conv), "dft": Emission(_dft, _has_dft)}
