"""Cached step graphs on ONNX Runtime: every way to split a sequence gives what the whole sequence gives in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnc.backends.base import Executable, Options
from attnc.backends.onnx import export
from attnc.backends.onnx.writer import write
from attnc.backends.ort import OrtCpuBackend
from attnc.ir import AttncError, DType, Graph, InputError, evaluate, verify
from attnc.ir.evaluate import begin
from attnc.passes.canonicalise import canonicalise
from attnc.passes.lower import lower
from attnc.passes.pack_matmuls import pack_matmuls
from attnc.tests.backends.step_models import Decoder, reference, step_graph

BACKEND = OrtCpuBackend()
SPLITS = ([12], [3, 4, 5], [1] * 12, [5, 1, 1, 5])


def lowered(graph: Graph, options: Options) -> Graph:
    graph = graph.copy()
    canonicalise(graph)
    lower(graph, lambda node: BACKEND.supports(node, options))
    pack_matmuls(graph)
    verify(graph)
    return graph


def loaded(graph: Graph, **extra: Any) -> Executable:
    options = Options(threads=1, extra=extra)
    return BACKEND.load(lowered(graph, options), None, options)


def written(graph: Graph) -> onnx.ModelProto:
    options = Options(threads=1)
    return write(lowered(graph, options), BACKEND._dialect(options)).model


def operators(graph: Graph) -> list[str]:
    return [node.op_type for node in written(graph).graph.node]


def ids_of(batch: int = 1, length: int = 12) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 50, (batch, length))


def feed(graph: Graph, ids: np.ndarray, start: int, stop: int, seen: np.ndarray | None) -> dict[str, np.ndarray]:
    feeds = {"input_ids": ids[:, start:stop]}
    return feeds if seen is None else feeds | {"attention_mask": seen[:, :stop]}


def stepped(
    graph: Graph, run: Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], dict[str, np.ndarray]],
    ids: np.ndarray, split: list[int], seen: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
    """The logits of all tokens, run by run, and the states at the end."""
    states: dict[str, np.ndarray] = {}
    parts, at = [], 0
    for count in split:
        feeds = feed(graph, ids, at, at + count, seen)
        begin(graph, feeds, states)
        parts.append(run(feeds, states)["logits"].copy())
        at += count
    return np.concatenate(parts, 1), states


def alibi(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.asarray(-0.25 * (i - j))


SLOPES = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]
CASES: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "plain": (Decoder(), {}),
    "multi-head": (Decoder(kv_heads=6), {}),
    "wider heads": (Decoder(head_width=16), {}),
    "multi-query": (Decoder(kv_heads=1, head_width=16), {}),
    "mask by m": (Decoder(mask="[n, m] -> { [b, h, i, j] : j <= m - n + i }"), {}),
    "window": (Decoder(mask="j <= i + past and i + past - j < 4"), {"window": 4}),
    "window of less than or equal": (Decoder(mask="j <= i + past and i + past - j <= 4"), {"window": 5}),
    "softcap": (Decoder(attrs={"score": "2 * tanh(s / 2)"}), {"cap": 2.0}),
    "bias": (Decoder(attrs={"score": "s - (i + past - j) / 4"}), {"bias": alibi}),
    "the cap's factors apart": (Decoder(attrs={"score": "tanh(s) * 3", "scale": 0.25}), {"cap": 3.0, "scale": 0.75}),
    "no cap but a factor": (Decoder(attrs={"score": "2 * tanh(s * 0.25)"}), {"cap": 2.0, "scale": 8**-0.5 / 2}),
    "sinks": (Decoder(sinks=True), {}),
    "a ring": (Decoder(ring=4), {}),
    "a ring of sinks and caps": (Decoder(ring=3, sinks=True, attrs={"score": "2 * tanh(s / 2)"}), {"cap": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_split_gives_the_whole(case: str) -> None:
    config, score = CASES[case]
    config = Decoder(**{**vars(config), "every": True})
    graph = step_graph(config)
    assert operators(graph).count("GroupQueryAttention") == config.layers
    ids = ids_of()
    want = reference(config, graph, ids, **score)
    executable = loaded(graph)
    for split in SPLITS:
        got, states = stepped(graph, executable.run, ids, split)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
        exact, held = stepped(graph, lambda f, s: evaluate(graph, f, DType.FLOAT64, s), ids, split)
        np.testing.assert_allclose(exact, want, rtol=0, atol=1e-7)  # the tables of positions are float32
        assert states.keys() == held.keys()
        for name, array in held.items():
            np.testing.assert_allclose(states[name], array, rtol=0, atol=2e-5)


@pytest.mark.parametrize("empty", ["zeros", "mean"])
def test_padded_rows(empty: str) -> None:
    config = Decoder(padded=True, every=True, attrs={"empty": empty})
    graph = step_graph(config)
    assert "GroupQueryAttention" in operators(graph)
    ids, seen = ids_of(3), np.ones((3, 12), np.int64)
    seen[0, :2] = 0
    seen[1, :7] = 0
    want = reference(config, graph, ids, seen)
    executable = loaded(graph)
    for split in ([12], [8, 1, 1, 1, 1], [1] * 12, [3, 4, 5]):
        got, _ = stepped(graph, executable.run, ids, split, seen)
        exact, _ = stepped(graph, lambda f, s: evaluate(graph, f, DType.FLOAT64, s), ids, split, seen)
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5)
        # A padded query's mean is over the keys there are, so only rows of tokens do not depend on the split.
        tokens = seen > 0
        np.testing.assert_allclose(got[tokens], want[tokens], rtol=0, atol=2e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_the_last_query_alone(padded: bool) -> None:
    config = Decoder(last_query=True, padded=padded)
    graph = step_graph(config)
    assert operators(graph).count("GroupQueryAttention") == config.layers
    ids, seen = ids_of(2), None
    if padded:
        seen = np.ones((2, 12), np.int64)
        seen[1, :2] = 0
    want = reference(config, graph, ids, seen)
    executable = loaded(graph)
    for split in SPLITS:
        got, _ = stepped(graph, executable.run, ids, split, seen)
        ends = np.cumsum(split) - 1
        shown = [(row, k) for row in range(2) for k in range(len(ends)) if seen is None or seen[row, ends[k]]]
        for row, k in shown:
            np.testing.assert_allclose(got[row, k], want[row, ends[k]], rtol=0, atol=2e-5)


TURNED: dict[str, tuple[Decoder, int]] = {
    "whole heads": (Decoder(head_width=16, every=True), 2),
    "pairs side by side": (Decoder(head_width=16, interleaved=True, every=True), 2),
    "half of each head": (Decoder(head_width=32, partial=0.5, every=True), 2),
    "too few features": (Decoder(head_width=16, partial=0.5, every=True), 0),
    "positions that begin anew": (Decoder(head_width=16, places="i", every=True), 0),
    "every other position": (Decoder(head_width=16, places="2 * i", every=True), 0),
    "a ring, whose places are others": (Decoder(head_width=16, ring=4, every=True), 1),
}


@pytest.mark.parametrize("case", TURNED)
def test_rotary_positions_in_the_kernel(case: str) -> None:
    config, count = TURNED[case]
    graph = step_graph(config)
    nodes = [node for node in written(graph).graph.node if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == config.layers
    assert sum(any(a.name == "do_rotary" for a in node.attribute) for node in nodes) == count
    executable, ids = loaded(graph), ids_of()
    for split in SPLITS:
        got, _ = stepped(graph, executable.run, ids, split)
        want, _ = stepped(graph, lambda f, s: evaluate(graph, f, DType.FLOAT64, s), ids, split)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_tables_of_positions_grow_with_the_buffers() -> None:
    config = Decoder(head_width=16)
    graph = step_graph(config)
    executable, states = loaded(graph), empty()
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, 50, 600)]
    one(graph, executable, states, tokens[:250])
    one(graph, executable, states, tokens[250:300])
    close(one(graph, executable, states, tokens[300:]), fresh(graph, tokens))


def empty() -> dict[str, np.ndarray]:
    return {}


def one(graph: Graph, executable: Executable, states: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    feeds = {"input_ids": np.array([tokens])}
    begin(graph, feeds, states)
    return executable.run(feeds, states)["logits"]


def fresh(graph: Graph, tokens: list[int]) -> np.ndarray:
    """What the definition gives for the last of these tokens."""
    return evaluate(graph, {"input_ids": np.array([tokens])}, DType.FLOAT64)["logits"]


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_a_step_appends_in_place() -> None:
    graph = step_graph(Decoder())
    executable, states = loaded(graph), empty()
    one(graph, executable, states, [1, 2, 3])
    where = {name: array.ctypes.data for name, array in states.items()}
    for token in (4, 5):
        before = dict(states)
        one(graph, executable, states, [token])
        assert {name: array.ctypes.data for name, array in states.items()} == where
        for name, array in before.items():
            np.testing.assert_array_equal(states[name][:, :, :-1], array)
    assert states["0.key"].shape == (1, 2, 5, 8)


def test_a_buffer_grows() -> None:
    graph = step_graph(Decoder())
    executable, states = loaded(graph), empty()
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, 50, 600)]
    one(graph, executable, states, tokens[:255])
    for k in range(255, 259):
        got = one(graph, executable, states, [tokens[k]])
    close(got, fresh(graph, tokens[:259]))
    close(one(graph, executable, states, tokens[259:]), fresh(graph, tokens))
    assert states["1.value"].shape[2] == 600


def test_max_length() -> None:
    graph = step_graph(Decoder())
    executable, states = loaded(graph, max_length=6), empty()
    one(graph, executable, states, [1, 2, 3, 4])
    kept = dict(states)
    with pytest.raises(InputError, match=r"room for 6 tokens \(max_length\); 4 are in them and 3 more"):
        one(graph, executable, states, [5, 6, 7])
    assert states == kept or all(states[name] is kept[name] for name in kept)
    close(one(graph, executable, states, [5, 6]), fresh(graph, [1, 2, 3, 4, 5, 6]))


def test_states_that_the_caller_changes() -> None:
    graph = step_graph(Decoder())
    executable, states = loaded(graph), empty()
    one(graph, executable, states, [1, 2, 3, 4])
    other = dict(states)  # another row of generation from the same start
    close(one(graph, executable, states, [5]), fresh(graph, [1, 2, 3, 4, 5]))
    close(one(graph, executable, other, [6]), fresh(graph, [1, 2, 3, 4, 6]))
    close(one(graph, executable, states, [7]), fresh(graph, [1, 2, 3, 4, 5, 7]))
    close(one(graph, executable, other, [8, 9]), fresh(graph, [1, 2, 3, 4, 6, 8, 9]))
    back = {name: array[:, :, :2] for name, array in states.items()}
    close(one(graph, executable, back, [3]), fresh(graph, [1, 2, 3]))
    close(one(graph, executable, states, [8]), fresh(graph, [1, 2, 3, 4, 5, 7, 8]))
    close(one(graph, executable, {}, [1, 2]), fresh(graph, [1, 2]))


def test_rows_in_another_order_and_number() -> None:
    graph = step_graph(Decoder())
    executable = loaded(graph)
    states: dict[str, np.ndarray] = {}
    first, then = ids_of(3, 5), ids_of(4, 2)
    feeds = {"input_ids": first}
    begin(graph, feeds, states)
    executable.run(feeds, states)
    rows = [2, 0, 0, 1]
    states = {name: array[rows] for name, array in states.items()}
    for column in range(2):
        got = executable.run({"input_ids": then[:, column : column + 1]}, states)["logits"]
    whole = np.concatenate([first[rows], then], 1)
    close(got, evaluate(graph, {"input_ids": whole}, DType.FLOAT64)["logits"])


def test_a_failed_run_leaves_the_states() -> None:
    graph = step_graph(Decoder())
    executable, states = loaded(graph), empty()
    one(graph, executable, states, [1, 2, 3])
    with pytest.raises(AttncError, match="step"):
        one(graph, executable, states, [999])
    other = empty()
    with pytest.raises(AttncError, match="step"):
        one(graph, executable, other, [7, 8, 999])
    close(one(graph, executable, states, [4]), fresh(graph, [1, 2, 3, 4]))


def test_from_a_folder(tmp_path: Path) -> None:
    options = Options(threads=1)
    graph = step_graph(Decoder())
    BACKEND.build(lowered(graph, options), tmp_path, options)
    executable, states = BACKEND.load(lowered(graph, options), tmp_path, options), empty()
    one(graph, executable, states, [1, 2, 3])
    close(one(graph, executable, states, [4]), fresh(graph, [1, 2, 3, 4]))


REFUSED: dict[str, Decoder] = {
    "another mask": Decoder(mask="j <= i + past - 1 or j = 0"),
    "all keys": Decoder(mask="true"),
    "a dilated window": Decoder(mask="j <= i + past and (i + past - j) mod 2 = 0"),
    "heads of 4 features": Decoder(head_width=4),
    "another normalisation": Decoder(attrs={"score": "abs(s) + 1", "normalise": "sum"}),
    "another score": Decoder(attrs={"score": "s * s / 4"}),
    "a score that may be infinite": Decoder(attrs={"score": "s + log(j)"}),
    "where by head": Decoder(padded=True, attrs={"where": "shown[b, j] > h - 1"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_lacks_is_said_otherwise(case: str) -> None:
    config = REFUSED[case]
    graph = step_graph(config)
    assert "GroupQueryAttention" not in operators(graph)
    executable, ids = loaded(graph), ids_of()
    seen = np.ones((1, 12), np.int64) if config.padded else None
    for split in SPLITS:
        got, _ = stepped(graph, executable.run, ids, split, seen)
        want, _ = stepped(graph, lambda f, s: evaluate(graph, f, DType.FLOAT64, s), ids, split, seen)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_the_default_export_has_no_operators_of_onnxruntime() -> None:
    assert {i.domain for i in export(step_graph(Decoder())).opset_import} == {""}
