"""The step as a file: its names, what ONNX Runtime makes of it by itself, and padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from attnc.backends.onnx import export
from attnc.backends.onnx.writer import STATES_KEY
from attnc.driver.export_decoder import decoder_step
from attnc.driver.export_inputs import add_attention_mask, add_padding_inputs, name_inputs
from attnc.ir import UsageError, evaluate, parse
from attnc.ir.cacheplan import CachePlan, CacheState, TimeInput, TimeOutput
from attnc.tests.interop.files import PADDING, ZOO, Exported, exported

Array = npt.NDArray[Any]

LAYERS = 2


class Runner:
    """A file in ONNX Runtime, fed by its names as others do."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.caches: dict[str, Array] = {}

    def step(self, ids: Array, mask: Array | None = None, positions: Array | None = None) -> Array:
        """The logits [batch, tokens, vocabulary]; the caches go round."""
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        feeds = {name: array for name, array in feeds.items() if name in self.inputs}
        for name, declared in self.inputs.items():
            if name.startswith("past_key_values."):
                empty = np.zeros([len(ids), declared.shape[1], 0, declared.shape[3]], np.float32)
                feeds[name] = self.caches.get(name, empty)
        results = dict(zip(self.outputs, self.session.run(None, feeds), strict=True))
        self.caches = {n.replace("present.", "past_key_values."): a for n, a in results.items() if n != "logits"}
        logits: Array = results["logits"]
        return logits


def names(values: Any) -> list[str]:
    return [value.name for value in values]


@pytest.mark.parametrize("padding", [False, True])
def test_the_names_are_those_of_others(tmp_path: Path, padding: bool) -> None:
    model = onnx.load(exported("llama.dynamo", tmp_path / "out", padding).folder / "model.onnx")
    kept = [f"{n}.{what}" for n in range(LAYERS) for what in ("key", "value")]
    added = ["attention_mask", "position_ids"] if padding else []
    assert names(model.graph.input) == ["input_ids", *added, *(f"past_key_values.{k}" for k in kept)]
    assert names(model.graph.output) == ["logits", *(f"present.{k}" for k in kept)]
    shapes = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    batch, time = shapes["input_ids"]
    assert shapes["past_key_values.0.key"] == [batch, 2, "past", 8]
    if padding:
        assert shapes["attention_mask"] == [batch, f"past + {time}"]
        assert shapes["position_ids"] == [batch, time]


def test_other_states_are_described() -> None:
    graph = parse("""
        graph @sums(%x: float32[batch, seq]) {
          state 0.key: float32[batch, 1, past, 2]
          state total: float32[batch, 1]  # the sum of all that was fed
          %keys = state_read() {state = "0.key"}: float32[batch, 1, past, 2]
          %before = state_read() {state = "total"}: float32[batch, 1]
          %sum = reduce_sum(%x) {axes = [1], keepdims = true}: float32[batch, 1]
          %after = add(%before, %sum): float32[batch, 1]
          %written = state_write(%after) {state = "total"}: float32[batch, 1]
          return y = %after, keys = %keys
        }""")
    model = export(graph)
    described = json.loads({p.key: p.value for p in model.metadata_props}[STATES_KEY])
    by_name = {entry["name"]: entry for entry in described}
    assert by_name["total"]["input"] == "past_total"
    assert by_name["total"]["output"] == "present_total"
    assert by_name["total"]["description"] == "the sum of all that was fed"
    assert by_name["0.key"]["input"] == "past_key_values.0.key"
    assert "output" not in by_name["0.key"]
    assert names(model.graph.input) == ["x", "past_key_values.0.key", "past_total"]


@pytest.mark.parametrize("name", ["llama.dynamo", "gpt2.script", "gemma2.dynamo", "gpt_neo.script"])
@pytest.mark.parametrize("padding", [False, True])
def test_all_greedy_tokens_in_chunks(tmp_path: Path, name: str, padding: bool) -> None:
    model = exported(name, tmp_path / "out", padding)
    runner, seen = Runner(model.folder / "model.onnx"), 0
    tokens: list[int] = []
    chunks = [model.prompt[:, :3], model.prompt[:, 3:]]
    while len(tokens) < len(model.greedy):
        ids = chunks.pop(0)
        positions = np.arange(seen, seen + ids.shape[1])[None]
        seen += ids.shape[1]
        logits = runner.step(ids, np.ones((1, seen), np.int64), positions)
        if not chunks:
            tokens.append(int(logits[0, -1].argmax()))
            chunks.append(np.array([tokens[-1:]]))
    assert tokens == model.greedy


def alone(model: Exported, ids: Array) -> Array:
    """The logits of the last of ``ids``, by a file that knows no padding, and of one token more."""
    runner = Runner(model.folder / "model.onnx")
    n = ids.shape[1]
    first = runner.step(ids, np.ones((1, n), np.int64), np.arange(n)[None])
    more = runner.step(ids[:, :1], np.ones((1, n + 1), np.int64), np.array([[n]]))
    return np.stack([first[0, -1], more[0, -1]])


@pytest.mark.parametrize("name", ["llama.dynamo", "gpt2.dynamo", "gpt2.script", "gemma2.script", "bloom.dynamo"])
def test_rows_padded_on_the_left(tmp_path: Path, name: str) -> None:
    """Bloom has no positions but in its attention's bias, where they may be shifted."""
    plain = exported(name, tmp_path / "plain")
    runner = Runner(exported(name, tmp_path / "padded", True).folder / "model.onnx")
    n = plain.prompt.shape[1]
    rows = [plain.prompt, plain.other(n + PADDING)]
    ids = np.concatenate([np.pad(rows[0], ((0, 0), (PADDING, 0))), rows[1]])
    mask = np.pad(np.ones((2, n), np.int64), ((0, 0), (PADDING, 0)))
    mask[1] = 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    first = runner.step(ids, mask, positions)[:, -1]
    next_ids = np.stack([row[0, :1] for row in rows])
    more = runner.step(next_ids, np.pad(mask, ((0, 0), (0, 1)), constant_values=1), positions[:, -1:] + 1)[:, -1]
    for row in range(2):
        np.testing.assert_allclose(np.stack([first[row], more[row]]), alone(plain, rows[row]), rtol=1e-4, atol=1e-5)


def test_rows_padded_on_the_right(tmp_path: Path) -> None:
    plain = exported("gpt2.dynamo", tmp_path / "plain")
    runner = Runner(exported("gpt2.dynamo", tmp_path / "padded", True).folder / "model.onnx")
    n = plain.prompt.shape[1]
    rows = [plain.prompt, plain.other(n + PADDING)]
    ids = np.concatenate([np.pad(rows[0], ((0, 0), (0, PADDING))), rows[1]])
    mask = np.ones_like(ids)
    mask[0, n:] = 0
    first = runner.step(ids, mask, np.where(mask != 0, np.arange(n + PADDING), 0))
    next_ids = np.stack([row[0, :1] for row in rows])
    ends = np.array([[n], [n + PADDING]])
    more = runner.step(next_ids, np.pad(mask, ((0, 0), (0, 1)), constant_values=1), ends)[:, -1]
    for row in range(2):
        found = np.stack([first[row, ends[row, 0] - 1], more[row]])
        np.testing.assert_allclose(found, alone(plain, rows[row]), rtol=1e-4, atol=1e-5)


def test_positions_that_are_fed_are_used(tmp_path: Path) -> None:
    """Tokens from position 5 on are what the model computes with a table of positions that begins there."""
    model = onnx.load(ZOO / "gpt2.dynamo.onnx")
    table = next(t for t in model.graph.initializer if "wpe" in t.name)
    table.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(table), -5, 0), table.name))
    ours = exported("gpt2.dynamo", tmp_path / "out", True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {model.graph.input[0].name: ours.prompt})
    n = ours.prompt.shape[1]
    found = Runner(ours.folder / "model.onnx").step(ours.prompt, np.ones((1, n), np.int64), np.arange(5, 5 + n)[None])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_what_was_done_is_told() -> None:
    assert decoder_step(ZOO / "llama.dynamo.onnx", padding=False).notes == []
    mistral = decoder_step(ZOO / "mistral.masked.onnx", True, 64).notes
    assert [note.split(":")[0] for note in mistral] == ["pad on the left only", "position_ids added"]
    bloom = decoder_step(ZOO / "bloom.script.onnx", True, 64)
    assert [i.name for i in bloom.plan.inputs] == ["input_ids", "attention_mask"]
    assert bloom.notes[-1].startswith("position_ids not added")


def test_a_table_of_positions_needs_a_length() -> None:
    with pytest.raises(UsageError, match="context length"):
        decoder_step(ZOO / "llama.dynamo.onnx", padding=True)
    step = decoder_step(ZOO / "gpt2.dynamo.onnx", padding=True)  # its own table ends
    assert step.plan.max_length == 128


def test_an_encoder_is_refused() -> None:
    with pytest.raises(UsageError, match="several files"):
        decoder_step(ZOO / "t5.script.onnx")


HEAD = """
    graph @m(%ids: int64[batch, seq]) {
      state 0.key: float32[batch, 1, past, 4]
      state 0.value: float32[batch, 1, past, 4]
      const %table: float32[5, 4] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
      %e = gather(%table, %ids): float32[batch, seq, 4]
"""
SHIFTED = "%x = add(%e, float32(0.5)): float32[batch, seq, 4]"
NEGATED = "%y = neg(%o): float32[batch, 1, seq, 4]"
ATTENTION = """
      %x4 = reshape(%x) {shape = [batch, 1, seq, 4]}: float32[batch, 1, seq, 4]
      %k = state_append(%x4) {state = "0.key", axis = 2}: float32[batch, 1, past + seq, 4]
      %v = state_append(%x4) {state = "0.value", axis = 2}: float32[batch, 1, past + seq, 4]
      %o = attention(%x4, %k, %v) {mask = "[past] -> { [b, h, i, j] : j <= past + i }"}: float32[batch, 1, seq, 4]
"""
END = """
      %out = reshape(%y) {shape = [batch, seq, 4]}: float32[batch, seq, 4]
      return scores = %out
    }"""
PLAN = CachePlan(
    "seq",
    (TimeInput("ids", 1, "ids"),),
    tuple(CacheState(f"0.{what}", "append", 0, 2, "layer", "", "") for what in ("key", "value")),
    (TimeOutput("scores", 1),),
    batch="batch",
)


def test_inputs_and_outputs_are_renamed() -> None:
    text = (
        HEAD
        + "%x = add(%e, float32(0.5)): float32[batch, seq, 4]"
        + ATTENTION
        + "%y = neg(%o): float32[batch, 1, seq, 4]"
    )
    graph, plan = name_inputs(parse(text + END), PLAN)
    assert [v.name for v in graph.inputs] == ["input_ids"]
    assert [o.name for o in graph.outputs] == ["logits"]
    assert (plan.inputs[0].name, plan.outputs[0].name) == ("input_ids", "logits")


def test_keys_that_are_read_outside_an_attention_cannot_be_masked() -> None:
    text = HEAD + SHIFTED + ATTENTION
    text += """
      %mean = reduce_mean(%k) {axes = [2], keepdims = true}: float32[batch, 1, 1, 4]
      %y = add(%o, %mean): float32[batch, 1, seq, 4]"""
    with pytest.raises(UsageError, match=r"reduce_mean.*brings the tokens of %k together"):
        add_attention_mask(parse(text + END), PLAN)


def test_a_sum_over_all_tokens_cannot_be_masked() -> None:
    plan = CachePlan("seq", PLAN.inputs, (CacheState("s", "sum", 0, None, "CumSum_3", "", ""),), (), batch="batch")
    with pytest.raises(UsageError, match=r"state s of CumSum_3 has taken all tokens in \(sum\)"):
        add_attention_mask(parse(HEAD + "%y = neg(%e): float32[batch, seq, 4]" + END), plan)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ('score = "s * log(1.0 + i + past)"', r"its score is s \* log"),
        ('score = "s + 0.5 * j * j"', "its score is"),
        ('score = "s + 0.5 * j", sink = "0.0"', "its score is"),
        ('score = "s + 0.5 * j", normalise = "sum"', "its score is"),
        ('where = "j < 4"', "its where is j < 4"),
        ('empty = "nan"', "NaN"),
    ],
)
def test_attention_that_padding_would_change(attributes: str, reason: str) -> None:
    text = HEAD + SHIFTED + ATTENTION.replace('past + i }"', f'past + i }}", {attributes}') + NEGATED + END
    with pytest.raises(UsageError, match=reason):
        add_padding_inputs(parse(text), PLAN, 16)


def test_a_mask_that_counts_from_the_first_token_is_refused() -> None:
    """Attention sinks: the first token stays visible behind the window."""
    sinks = "j <= past + i and (j < 1 or past + i - 3 < j)"
    with pytest.raises(UsageError, match="its mask is"):
        add_padding_inputs(parse(HEAD + SHIFTED + ATTENTION.replace("j <= past + i", sinks) + NEGATED + END), PLAN, 16)


@pytest.mark.parametrize("score", ["s + 0.5 * j", "s - (past + i - j) / 8.0", "s + where(past + i - j > 3, 1.0, 2.0)"])
def test_attention_that_moves_with_its_tokens(score: str) -> None:
    text = HEAD + SHIFTED + ATTENTION.replace('past + i }"', f'past + i }}", score = "{score}"') + NEGATED + END
    graph, plan, notes = add_padding_inputs(parse(text), PLAN, 16)
    assert [i.role for i in plan.inputs] == ["ids", "mask"]
    assert notes[1].startswith("pad on the left only: 1 of the attentions")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (1, 6))
    (alone,) = evaluate(parse(text), {"ids": ids}).values()
    padded = {"ids": np.pad(ids, ((0, 0), (4, 0))), "attention_mask": np.array([[0] * 4 + [1] * 6])}
    (found,) = evaluate(graph, padded).values()
    np.testing.assert_allclose(found[:, 4:], alone, rtol=1e-5)


def test_what_depends_on_the_number_of_tokens_is_no_position() -> None:
    counted = """
      %count = size() {value = past + seq}: int64[]
      %length = cast(%count) {dtype = float32}: float32[]
      %places = iota() {shape = [seq, 1], start = past, dtype = float32}: float32[seq, 1]
      %share = div(%places, %length): float32[seq, 1]
      %x = add(%e, %share): float32[batch, seq, 4]"""
    text = HEAD + counted + ATTENTION + NEGATED
    with pytest.raises(UsageError, match=r"%share .* depends on more than the position"):
        add_padding_inputs(parse(text + END), PLAN, 16)
