"""ONNX Runtime's attentions against ONNX Runtime on models of one node, over their options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnc.frontends.onnx import load_onnx
from attnc.ir import UnsupportedError, evaluate
from attnc.tests.frontends.runtime import Array, agree, compare, draw, integers, node_model, runtime_results

BATCH, LENGTH, HEADS, WIDTH = 2, 5, 3, 4
HIDDEN = HEADS * WIDTH


# -- Attention -----------------------------------------------------------------------------------------------------


def projected(past: int = 0, values: int = HIDDEN) -> list[Array | None]:
    """input, weights, bias, mask_index, past, attention_bias."""
    return [
        draw(BATCH, LENGTH, 7), draw(7, 2 * HIDDEN + values, scale=0.5), draw(2 * HIDDEN + values), None,
        draw(2, BATCH, HEADS, past, WIDTH) if past else None, None,
    ]  # fmt: skip


DIMS = {0: ["batch", "seq", 7]}


def masks(keys: int) -> dict[str, Array]:
    """One of each kind; every row keeps a key, so that no score is shifted by -10000 as a whole."""
    padded = np.ones((BATCH, keys), np.int32)
    padded[0, 3:] = 0
    rows = integers(0, 1, BATCH, LENGTH, keys, dtype="int32")
    rows[:, :, 0] = 1
    return {
        "lengths": np.array([3, keys], np.int32),
        "lengths and starts": np.array([4, keys, 0, 2], np.int32),
        "beyond": np.array([keys + 3, keys], np.int32),
        "keys": padded,
        "rows": rows,
    }


@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask", [None, *masks(9)])
def test_attention(mask: str | None, past: int, unidirectional: int) -> None:
    inputs = projected(past)
    if mask is not None:
        inputs[3] = masks(LENGTH + past)[mask]
    for bias in (False, True) if not past else (False,):  # ONNX Runtime does not take a past and a bias together
        inputs[5] = draw(1, HEADS, LENGTH, LENGTH) if bias else None
        agree("Attention", inputs, 2 if past else 1, num_heads=HEADS, unidirectional=unidirectional)


@pytest.mark.parametrize("mask", ["lengths", "keys", "rows"])
def test_attention_with_symbolic_sizes(mask: str) -> None:
    inputs = projected()
    inputs[3] = masks(LENGTH)[mask]
    shape = {"lengths": ["batch"], "keys": ["batch", "seq"], "rows": ["batch", "seq", "seq"]}[mask]
    graph = agree("Attention", inputs, num_heads=HEADS, dims=DIMS | {3: shape}, unidirectional=1)
    assert graph.operator_counts()["attention"] == 1
    node = next(n for n in graph.nodes if n.op.name == "attention")
    assert str(node.attr("mask")) == "j <= i" or "j <= i" in str(node.attr("mask"))


@pytest.mark.parametrize("fill", [-10000.0, -3.0, -3.4028234663852886e38])
def test_the_mask_adds_its_filter_value(fill: float) -> None:
    """A row without a key is a softmax of the shifted scores, whose last bits -10000 takes."""
    inputs = projected()
    mask = masks(LENGTH)["keys"]
    mask[1] = 0
    inputs[3] = mask
    inputs = inputs[:4]
    agree("Attention", inputs, num_heads=HEADS, mask_filter_value=fill, tolerance=1e-5 if fill == -3.0 else 2e-3)


def test_attention_with_other_sizes_scales_and_biases() -> None:
    inputs = projected(values=9)
    agree("Attention", inputs[:3], num_heads=HEADS, qkv_hidden_sizes=[HIDDEN, HIDDEN, 9], scale=0.3)
    for shape in ((BATCH, HEADS, LENGTH, LENGTH), (1, 1, LENGTH, LENGTH), (BATCH, 1, LENGTH, LENGTH)):
        agree("Attention", [*projected()[:5], draw(*shape)], num_heads=HEADS)
    no_bias = projected()[:3]
    no_bias[2] = None
    agree("Attention", no_bias[:2], num_heads=HEADS)


@pytest.mark.parametrize(
    ("attributes", "what"),
    [({"do_rotary": 1}, "do_rotary"), ({"past_present_share_buffer": 1}, "past_present_share_buffer")],
)
def test_attention_refusals(attributes: dict[str, Any], what: str) -> None:
    model, _ = node_model("Attention", projected()[:3], num_heads=HEADS, **attributes)
    with pytest.raises(UnsupportedError, match=rf"the_node .*{what}"):
        load_onnx(model)


def test_masks_that_are_refused() -> None:
    for mask in (np.zeros(3 * BATCH + 2, np.int32), np.zeros((BATCH, 1, 8, 8), np.int32)):
        inputs = projected()[:4]
        inputs[3] = mask
        model, _ = node_model("Attention", inputs, num_heads=HEADS)
        with pytest.raises(UnsupportedError, match=r"the_node .*mask"):
            load_onnx(model)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("past", [0, 3])
def test_qattention(past: int, zeros: bool, signed: bool) -> None:
    weight = (
        integers(-100, 100, 7, 3 * HIDDEN, dtype="int8") if signed else integers(0, 255, 7, 3 * HIDDEN, dtype="uint8")
    )
    inputs = [
        integers(0, 255, BATCH, LENGTH, 7, dtype="uint8"), weight, draw(3 * HIDDEN),
        np.float32(0.01), np.float32(0.02), masks(LENGTH + past)["keys"],
        np.uint8(120) if zeros else None, weight.dtype.type(7) if zeros else None,
        draw(2, BATCH, HEADS, past, WIDTH) if past else None,
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    agree("QAttention", inputs, 2 if past else 1, num_heads=HEADS, unidirectional=1, constants=(1, 3, 4, 6, 7))


# -- MultiHeadAttention --------------------------------------------------------------------------------------------


def given(keys: int, values: int = WIDTH, past: int = 0) -> list[Array | None]:
    """query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value."""
    return [
        draw(BATCH, LENGTH, HIDDEN), draw(BATCH, keys, HIDDEN, seed=1), draw(BATCH, keys, HEADS * values, seed=2), None,
        None, None, draw(BATCH, HEADS, past, WIDTH, seed=3) if past else None,
        draw(BATCH, HEADS, past, WIDTH, seed=4) if past else None,
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [None, *masks(9)])
@pytest.mark.parametrize("keys", [5, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention(mask: str | None, keys: int, bias: bool) -> None:
    if mask == "lengths and starts":
        mask = None
    inputs = given(keys, values=6)
    if mask is not None:
        inputs[4] = masks(keys)[mask]
    inputs[3] = draw(2 * HIDDEN + HEADS * 6) if bias else None
    for added in (None, draw(BATCH, HEADS, LENGTH, keys), draw(1, 1, LENGTH, keys)):
        inputs[5] = added
        agree("MultiHeadAttention", inputs[:6], num_heads=HEADS, mask_filter_value=-1000.0)


@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_with_a_past(unidirectional: int, bias: bool) -> None:
    inputs = given(LENGTH, past=3)
    inputs[3] = draw(3 * HIDDEN) if bias else None
    for mask in (None, "keys"):
        inputs[4] = None if mask is None else masks(LENGTH + 3)[mask]
        dims = {0: ["batch", "seq", HIDDEN], 1: ["batch", "seq", HIDDEN], 2: ["batch", "seq", HIDDEN]}
        dims |= {6: ["batch", HEADS, "past", WIDTH], 7: ["batch", HEADS, "past", WIDTH]}
        if mask:
            dims[4] = ["batch", "total"]
        agree("MultiHeadAttention", inputs, 3, num_heads=HEADS, unidirectional=unidirectional, scale=0.2, dims=dims)


def test_multi_head_attention_on_keys_of_four_axes() -> None:
    inputs = [draw(BATCH, LENGTH, HIDDEN), draw(BATCH, HEADS, 7, WIDTH), draw(BATCH, HEADS, 7, WIDTH, seed=1)]
    agree("MultiHeadAttention", inputs, num_heads=HEADS)


def test_packed_operands_are_the_parts() -> None:
    """ONNX Runtime has packed q, k, v on other devices only: compared with its results for the parts."""
    q, k, v = (draw(BATCH, LENGTH, HEADS, WIDTH, seed=s) for s in range(3))
    flat = [x.reshape(BATCH, LENGTH, HIDDEN) for x in (q, k, v)]
    wanted = runtime_results(*node_model("MultiHeadAttention", flat, num_heads=HEADS))[0]
    for inputs in ([np.stack([q, k, v], 3)], [flat[0], np.stack([k, v], 3)]):
        model, feeds = node_model("MultiHeadAttention", inputs, num_heads=HEADS)
        compare(evaluate(load_onnx(model), feeds)["y0"], wanted)


def test_scores_as_a_result_and_beams_are_refused() -> None:
    model, _ = node_model("MultiHeadAttention", given(LENGTH)[:3], [True, False, False, True], num_heads=HEADS)
    with pytest.raises(UnsupportedError, match=r"the_node .*qk"):
        load_onnx(model)
    inputs = [*given(LENGTH, past=3), np.array([3], np.int32), np.zeros((BATCH, 1, 8), np.int32)]
    model, _ = node_model("MultiHeadAttention", inputs, num_heads=HEADS)
    with pytest.raises(UnsupportedError, match=r"the_node .*past_sequence_length"):
        load_onnx(model)


# -- GroupQueryAttention -------------------------------------------------------------------------------------------

GROUPS, HEAD = 2, 32
QUERIES = 4


def grouped(
    length: int,
    held: int,
    total: int,
    ends: list[int],
    packed: bool = False,
    rotary: bool = False,
    half: int = HEAD // 2,
) -> list[Array | None]:
    """query, key, value, past_key, past_value, seqlens_k, total, cos, sin, position_ids, attention_bias, head_sink."""
    batch = len(ends)
    q, k, v = (draw(batch, length, n * HEAD, seed=s) for s, n in enumerate((QUERIES, GROUPS, GROUPS)))
    past = [draw(batch, GROUPS, held, HEAD, seed=s) if held else None for s in (3, 4)]
    angle = draw(32, half)
    qkv: list[Array | None] = [np.concatenate([q, k, v], -1), None, None] if packed else [q, k, v]
    tables: list[Array | None] = [np.cos(angle), np.sin(angle)] if rotary else [None, None]
    return [
        *qkv, *past, np.array(ends, np.int32) - 1, np.array(total, np.int32), *tables, None, None, None,
    ]  # fmt: skip


def check_grouped(inputs: list[Array | None], length: int, ends: list[int], **attributes: Any) -> None:
    """The outputs of real positions, and the rows of the cache that are filled."""
    attributes = {"num_heads": QUERIES, "kv_num_heads": GROUPS} | attributes
    while inputs[-1] is None:
        inputs = inputs[:-1]
    model, feeds = node_model("GroupQueryAttention", inputs, 3, constants=(6,), **attributes)
    found = evaluate(load_onnx(model), feeds)
    wanted = runtime_results(model, feeds)
    for b, end in enumerate(ends):
        rows = min(length, end)
        compare(found["y0"][b, :rows], wanted[0][b, :rows])
        for name, cache in zip(("y1", "y2"), wanted[1:], strict=True):
            assert found[name].shape == cache.shape
            compare(found[name][b, :, :end], cache[b, :, :end])


CALLS = {
    "first prompt": (5, 0, 5, [5, 5]),
    "first prompt, padded": (5, 0, 5, [5, 3]),
    "first prompt into a buffer": (5, 9, 5, [5, 4]),
    "a token": (1, 4, 5, [5, 5]),
    "a token, ragged": (1, 4, 5, [5, 3]),
    "a token into a buffer": (1, 9, 6, [6, 4]),
    "some tokens": (3, 4, 7, [7]),
    "some tokens into a buffer": (3, 12, 7, [7]),
}
"""length, rows of the cache given, total length, keys of each row afterwards."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("window", [-1, 2, 4])
def test_group_query_attention(call: str, packed: bool, rotary: bool, window: int) -> None:
    length, held, total, ends = CALLS[call]
    inputs = grouped(length, held, total, ends, packed, rotary)
    check_grouped(inputs, length, ends, do_rotary=int(rotary), local_window_size=window)


@pytest.mark.parametrize("call", CALLS)
def test_group_query_attention_scores(call: str) -> None:
    length, held, total, ends = CALLS[call]
    inputs = grouped(length, held, total, ends)
    check_grouped(inputs, length, ends, softcap=1.5, scale=0.7)
    check_grouped(inputs, length, ends, smooth_softmax=1)
    inputs[10] = draw(len(ends), QUERIES, length, total)
    check_grouped(inputs, length, ends, softcap=1.5)
    inputs[11] = draw(QUERIES)
    check_grouped(inputs, length, ends)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("half", [8, 16])
def test_group_query_attention_rotation(interleaved: int, half: int) -> None:
    for call in ("first prompt", "some tokens", "a token, ragged"):
        length, held, total, ends = CALLS[call]
        inputs = grouped(length, held, total, ends, rotary=True, half=half)
        check_grouped(inputs, length, ends, do_rotary=1, rotary_interleaved=interleaved)
        inputs[9] = integers(0, 31, len(ends), length)
        check_grouped(inputs, length, ends, do_rotary=1, rotary_interleaved=interleaved)


def test_group_query_attention_without_causality() -> None:
    for call in ("first prompt", "a token", "some tokens"):
        length, held, total, ends = CALLS[call]
        check_grouped(grouped(length, held, total, ends), length, ends, causal=0)


def test_group_query_attention_with_symbolic_sizes() -> None:
    """As the exporters for generation write it: the lengths come from the attention mask and its shape."""
    import onnx.parser
    import onnxruntime

    text = f"""
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[batch, seq, {QUERIES * HEAD}] q, float[batch, seq, {GROUPS * HEAD}] k,
       float[batch, seq, {GROUPS * HEAD}] v, float[batch, {GROUPS}, past, {HEAD}] pk,
       float[batch, {GROUPS}, past, {HEAD}] pv, int64[batch, total] mask,
       float[32, 16] cos, float[32, 16] sin) => (float y, float nk, float nv)
    <int64[1] last = {{1}}, int64 one = {{1}}, int64 index = {{1}}>
    {{
      sums = ReduceSum (mask, last)
      less = Sub (sums, one)
      ends = Cast <to = 6> (less)
      shape = Shape (mask)
      size = Gather <axis = 0> (shape, index)
      total_length = Cast <to = 6> (size)
      y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = {QUERIES}, kv_num_heads = {GROUPS}, do_rotary = 1>
        (q, k, v, pk, pv, ends, total_length, cos, sin)
    }}
    """
    model = onnx.parser.parse_model(text)
    graph = load_onnx(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    angle = draw(32, 16)
    for length, past, batch in ((1, 4, 2), (3, 4, 1), (1, 1, 3)):
        total = length + past
        feeds = {
            name: draw(batch, length, n * HEAD, seed=s)
            for s, (name, n) in enumerate(zip("qkv", (4, 2, 2), strict=True))
        }
        feeds |= {name: draw(batch, GROUPS, past, HEAD, seed=s) for s, name in ((5, "pk"), (6, "pv"))}
        feeds |= {"mask": np.ones((batch, total), np.int64), "cos": np.cos(angle), "sin": np.sin(angle)}
        for found, wanted in zip(evaluate(graph, feeds).values(), session.run(None, feeds), strict=True):
            compare(found, wanted)


@pytest.mark.parametrize(
    ("attributes", "what"),
    [
        ({"sliding_window_cache": 1, "local_window_size": 4}, "sliding_window_cache"),
        ({"qk_output": 1}, "qk_output"),
        ({"k_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}, "kv_cache_bit_width|k_quant_type"),
    ],
)
def test_group_query_attention_refusals(attributes: dict[str, Any], what: str) -> None:
    inputs = grouped(5, 0, 5, [5, 5])[:7]
    model, _ = node_model(
        "GroupQueryAttention", inputs, 3, constants=(6,), num_heads=QUERIES, kv_num_heads=GROUPS, **attributes
    )
    with pytest.raises(UnsupportedError, match=rf"the_node .*({what})"):
        load_onnx(model)


def test_a_total_length_that_is_data_is_refused() -> None:
    model, _ = node_model(
        "GroupQueryAttention", grouped(5, 0, 5, [5, 5])[:7], 3, num_heads=QUERIES, kv_num_heads=GROUPS
    )
    with pytest.raises(UnsupportedError, match=r"the_node .*total_sequence_length"):
        load_onnx(model)
