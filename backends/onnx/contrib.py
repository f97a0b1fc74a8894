"""Operators of ONNX Runtime's own domain, as private operators of the IR: ``cached.py`` puts them into the copy of a
graph that is written, so that use lists and shapes are kept by the IR's means. No other code sees them.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...ir import Attr, Call, DType, Node, Operator, TensorType
from .emitter import Emission, Emitter, Ref
from .kernels import Dialect

__all__ = [
    "BLIND_ROWS",
    "DOMAIN",
    "EMISSIONS",
    "FLAT_ROPE",
    "GROUP_QUERY",
    "MATMUL_TURNED",
    "SKIP_LAYER_NORM",
    "SKIP_RMS_NORM",
    "SPLIT",
]

DOMAIN = "com.microsoft"


class GroupQuery(Operator):
    """Causal attention of q [b, n, heads·d] over a cache that k and v [b, n, kv_heads·d] are appended to. Without k and
    v, q holds all three side by side.

    Query i sees the keys j <= i + past, with ``window`` w only those with i + past - j < w. ``last`` int32[b] is the
    index of the last key of each row, ``total`` int32[] the number of keys, ``bias`` [1 or b, 1 or heads, n, past + n]
    is added to the scores, ``sink`` [heads] takes part in the softmax. Gives the result [b, n, heads·d], and the keys
    and values with the new ones behind, [b, kv_heads, past + n, d]: in the buffers of the two states, or anew where
    ``past_key`` and ``past_value`` are operands. With ``cos`` and ``sin``, tables over all positions from 0 on
    [positions, r/2], queries and new keys are turned first, as ``rope`` does.
    """

    name = "ort.group_query"
    inputs = ("q", "k?", "v?", "last?", "total?", "bias?", "sink?", "past_key?", "past_value?", "cos?", "sin?")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "heads": Attr("int"),
        "kv_heads": Attr("int"),
        "scale": Attr("float"),
        "window": Attr("int", 0),
        "softcap": Attr("float", 0.0),
        "interleaved": Attr("bool", False),
        "key_state": Attr("str", ""),
        "value_state": Attr("str", ""),
    }
    has_effect = True

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        q = call.type(0)
        length = q.shape[1]
        if call.attr("key_state"):
            past = [call.states[call.attr(name)].type for name in ("key_state", "value_state")]
        else:
            past = [call.type(7), call.type(8)]
        whole = [t.with_shape((*t.shape[:2], t.shape[2] + length, t.shape[3])) for t in past]
        width = call.attr("heads") * whole[0].shape[3]
        return (q.with_shape((*q.shape[:2], width)), *whole)


class FlatRope(Operator):
    """``rope`` on x [b, n, heads·d], the heads side by side; cos and sin are [b, n, r/2]."""

    name = "ort.flat_rope"
    inputs = ("x", "cos", "sin")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "heads": Attr("int"),
        "interleaved": Attr("bool", False),
        "rotary_dim": Attr("int", None),
    }

    def infer(self, call: Call) -> TensorType:
        return call.type(0)


class BlindRows(Operator):
    """x [b, n, heads·d] where ``sees`` [1 or b, n, 1] is true, elsewhere the mean over the first ``length`` (int64[1])
    of the keys of ``values`` [b, kv_heads, m, d], each repeated for its query heads."""

    name = "ort.blind_rows"
    inputs = ("x", "sees", "values", "length")
    attributes: ClassVar[Mapping[str, Attr]] = {"heads": Attr("int")}

    def infer(self, call: Call) -> TensorType:
        return call.type(0)


class Split(Operator):
    """x [..., m] cut along its last axis into parts of ``widths``: one node for what would be as many slices."""

    name = "ort.split"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"widths": Attr("int*")}

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        x = call.type(0)
        return tuple(x.with_shape((*x.shape[:-1], width)) for width in call.attr("widths"))


class SkipRmsNorm(Operator):
    """s = x + skip, and its RMSNorm over the last axis times ``weight``; gives (norm, s)."""

    name = "ort.skip_rms_norm"
    inputs: tuple[str, ...] = ("x", "skip", "weight")
    attributes: ClassVar[Mapping[str, Attr]] = {"eps": Attr("float")}

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        return (call.type(0), call.type(0))


class SkipLayerNorm(SkipRmsNorm):
    """s = x + skip, and its LayerNorm over the last axis times ``weight`` plus ``bias``; gives (norm, s)."""

    name = "ort.skip_layer_norm"
    inputs = ("x", "skip", "weight", "bias")


class MatmulTurned(Operator):
    """x [..., k] times the transpose of w [m, k]. ONNX Runtime reads w as it is stored; of a stored matrix behind a
    Transpose it makes a copy when it loads."""

    name = "ort.matmul_turned"
    inputs = ("x", "w")

    def infer(self, call: Call) -> TensorType:
        x = call.type(0)
        return x.with_shape((*x.shape[:-1], call.type(1).shape[0]))


def _matmul_turned(e: Emitter, node: Node) -> Ref:
    return e.node("FusedMatMul", e.operand(node), e.operand(node, 1), domain=DOMAIN, transB=1)


def _split(e: Emitter, node: Node) -> list[Ref]:
    widths = node.attr("widths")
    return e.multi("Split", e.operand(node), e.ints(widths), dtypes=[None] * len(widths), axis=-1)


def _silu(e: Emitter, node: Node) -> Ref:
    """x · sigmoid(alpha x) is called QuickGelu there."""
    return e.node("QuickGelu", e.operand(node), domain=DOMAIN, alpha=float(node.attr("alpha")))


def _has_silu(node: Node, dialect: Dialect) -> bool:
    return dialect.runtime and node.output.dtype is DType.FLOAT32


def _skip_norm(op_type: str) -> Emission:
    def emit(e: Emitter, node: Node) -> list[Ref]:
        given = (e.operand(node, k) for k in range(len(node.inputs)))
        norm, _, _, total = e.multi(op_type, *given, dtypes=[None] * 4, domain=DOMAIN, epsilon=node.attr("eps"))
        made = e.nodes[-1]
        made.output[1] = made.output[2] = ""  # the mean and the deviation, which nobody reads
        return [norm, total]

    return Emission(emit)


def _group_query(e: Emitter, node: Node) -> list[Ref]:
    q, k, v, last, total, bias, sink, *past, cos, sin = e.operands(node)
    attrs: dict[str, Any] = {
        "num_heads": node.attr("heads"),
        "kv_num_heads": node.attr("kv_heads"),
        "scale": node.attr("scale"),
    }
    if node.attr("window"):
        attrs["local_window_size"] = node.attr("window")
    if node.attr("softcap"):
        attrs["softcap"] = node.attr("softcap")
    if node.attr("key_state"):
        past = [e.past[node.attr(name)] for name in ("key_state", "value_state")]
    if cos is not None:
        attrs |= {"do_rotary": 1, "rotary_interleaved": int(node.attr("interleaved"))}
    given = (q, k, v, *past, last, total, cos, sin, None, bias, sink)
    return e.multi("GroupQueryAttention", *given, dtypes=[None] * 3, domain=DOMAIN, **attrs)


def _flat_rope(e: Emitter, node: Node) -> Ref:
    return e.node(
        "RotaryEmbedding",
        *(e.operand(node, k) for k in range(3)),
        interleaved=int(node.attr("interleaved")),
        num_heads=node.attr("heads"),
        rotary_embedding_dim=node.attr("rotary_dim") or 0,
    )


def _blind_rows(e: Emitter, node: Node) -> Ref:
    x, sees, values, length = (e.operand(node, k) for k in range(4))
    heads, groups, width = (int(str(d)) for d in (node.attr("heads"), values.shape[1], values.shape[3]))
    read = e.node("Slice", values, e.ints([0]), length, e.ints([2]))
    mean = e.node("ReduceMean", read, e.ints([2]), keepdims=1)
    # [b, g, 1, d] → [b, 1, heads·d], a group's mean for each of its heads
    wide = e.node("Expand", mean, e.ints([1, groups, heads // groups, width]))
    flat = e.node("Reshape", wide, e.ints([0, 1, heads * width]))
    return e.node("Where", sees, x, flat, dtype=DType.FLOAT32)


GROUP_QUERY, FLAT_ROPE, BLIND_ROWS, SPLIT = GroupQuery(), FlatRope(), BlindRows(), Split()
MATMUL_TURNED = MatmulTurned()
SKIP_RMS_NORM, SKIP_LAYER_NORM = SkipRmsNorm(), SkipLayerNorm()

EMISSIONS: dict[str, Emission] = {
    "silu": Emission(_silu, _has_silu),
    "ort.group_query": Emission(_group_query),
    "ort.flat_rope": Emission(_flat_rope),
    "ort.blind_rows": Emission(_blind_rows),
    "ort.split": Emission(_split),
    "ort.matmul_turned": Emission(_matmul_turned),
    "ort.skip_rms_norm": _skip_norm("SkipSimplifiedLayerNormalization"),
    "ort.skip_layer_norm": _skip_norm("SkipLayerNormalization"),
}
