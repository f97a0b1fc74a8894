"""Operators of ONNX Runtime's own domain, as private operators of the IR: ``cached.py`` puts them into the copy of a
graph that is written, so that use lists and shapes are kept by the IR's means. No other code sees them.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...ir import Attr, Call, DType, Node, Operator, TensorType
from .emitter import Emission, Emitter, Ref

__all__ = ["BLIND_ROWS", "DOMAIN", "EMISSIONS", "FLAT_ROPE", "GROUP_QUERY"]

DOMAIN = "com.microsoft"


class GroupQuery(Operator):
    """Causal attention of q [b, n, heads·d] over a cache that k and v [b, n, kv_heads·d] are appended to.

    Query i sees the keys j <= i + past, with ``window`` w only those with i + past - j < w. ``last`` int32[b] is the
    index of the last key of each row, ``total`` int32[] the number of keys, ``bias`` [1 or b, 1 or heads, n, past + n]
    is added to the scores, ``sink`` [heads] takes part in the softmax. Gives the result [b, n, heads·d] and the two
    states, which lie in the buffers that hold them.
    """

    name = "ort.group_query"
    inputs = ("q", "k", "v", "last", "total", "bias?", "sink?")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "heads": Attr("int"),
        "kv_heads": Attr("int"),
        "scale": Attr("float"),
        "window": Attr("int", 0),
        "softcap": Attr("float", 0.0),
        "key_state": Attr("str"),
        "value_state": Attr("str"),
    }
    has_effect = True

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        length = call.type(1).shape[1]
        states = (call.states[call.attr(name)].type for name in ("key_state", "value_state"))
        whole = [t.with_shape((*t.shape[:2], t.shape[2] + length, t.shape[3])) for t in states]
        return (call.type(0), *whole)


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


def _group_query(e: Emitter, node: Node) -> list[Ref]:
    q, k, v, last, total, bias, sink = e.operands(node)
    attrs: dict[str, Any] = {
        "num_heads": node.attr("heads"),
        "kv_num_heads": node.attr("kv_heads"),
        "scale": node.attr("scale"),
    }
    if node.attr("window"):
        attrs["local_window_size"] = node.attr("window")
    if node.attr("softcap"):
        attrs["softcap"] = node.attr("softcap")
    past = (e.past[node.attr(name)] for name in ("key_state", "value_state"))
    # Between total and bias: tables of rotary positions, and positions, which it is not asked to apply.
    given = (q, k, v, *past, last, total, None, None, None, bias, sink)
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
    heads, groups, width = node.attr("heads"), values.shape[1], values.shape[3]
    read = e.node("Slice", values, e.ints([0]), length, e.ints([2]))
    mean = e.node("ReduceMean", read, e.ints([2]), keepdims=1)
    # [b, g, 1, d] → [b, 1, heads·d], a group's mean for each of its heads
    wide = e.node("Expand", mean, e.ints([1, groups, int(heads) // int(str(groups)), width]))
    flat = e.node("Reshape", wide, e.ints([0, 1, int(heads) * int(str(width))]))
    return e.node("Where", sees, x, flat, dtype=DType.FLOAT32)


GROUP_QUERY, FLAT_ROPE, BLIND_ROWS = GroupQuery(), FlatRope(), BlindRows()

EMISSIONS: dict[str, Emission] = {
    "ort.group_query": Emission(_group_query),
    "ort.flat_rope": Emission(_flat_rope),
    "ort.blind_rows": Emission(_blind_rows),
}
