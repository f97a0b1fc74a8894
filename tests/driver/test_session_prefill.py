"""Long prompts that run in parts, against the decoder over all tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnc
from attnc.backends.numpy import NumpyExecutable
from attnc.driver import Program, Session
from attnc.driver.half import Half
from attnc.ir import AttncError, InputError, UsageError
from attnc.tests.driver.decoders import WORDS, Decoder, cached, full_graph, greedy, logits

CONFIGS = {
    "plain": Decoder(),
    "masked": Decoder(masked=True, placed=True),
    "window": Decoder(window=4),
    "window and mask": Decoder(window=4, masked=True, placed=True),
    "sums": Decoder(sums=True),
    "types": Decoder(typed=True),
}
PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, WORDS, 20)]


class Recording(NumpyExecutable):
    """Knows how many tokens each run had."""

    def __init__(self, graph: attnc.Graph) -> None:
        super().__init__(graph)
        self.counts: list[int] = []

    def run(self, feeds: Any, states: Any) -> Any:
        self.counts.append(feeds["input_ids"].shape[1])
        return super().run(feeds, states)


def recorded(program: Program, chunk: int | None) -> tuple[Session, list[int]]:
    executable = Recording(program.graph)
    return Session(program.graph, executable, plan=program.plan, prefill_chunk=chunk), executable.counts


def extra(config: Decoder) -> dict[str, np.ndarray]:
    return {"token_type_ids": np.arange(20)[None] % 2} if config.typed else {}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_a_prompt_leave_what_the_whole_leaves(name: str) -> None:
    config = CONFIGS[name]
    program, feeds = cached(config), extra(config)
    (parts, counts), (once, _) = recorded(program, 7), recorded(program, None)
    found, expected = parts.step(PROMPT, feeds), once.step(PROMPT, feeds)
    assert counts == [7, 7, 6]
    assert parts.length == 20
    scale = np.abs(expected).max()
    assert np.abs(found - logits(full_graph(config), PROMPT, **feeds)[-1]).max() < 1e-5 * scale
    assert np.abs(found - expected).max() < 1e-5 * scale
    for state, array in once.states.items():
        assert np.abs(parts.states[state] - array).max() < 1e-5 * np.abs(array).max()
    for seen, array in once.memory.seen.items():
        np.testing.assert_array_equal(parts.memory.seen[seen], array)


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("name", ["plain", "masked", "window", "window and mask", "sums"])
def test_generating_behind_a_long_prompt(name: str, target: str) -> None:
    full = full_graph(CONFIGS[name])
    program = attnc.compile(full, target=target, cache=True, threads=1)
    for chunk in (1, 6, 20):
        with program.session(prefill_chunk=chunk) as session:
            assert list(session.generate(PROMPT, 10)) == greedy(full, PROMPT, 10)


def test_behind_tokens_seen_with_padding() -> None:
    config = CONFIGS["window and mask"]
    session, counts = recorded(cached(config), 4)
    mask = np.arange(20)[None] >= 3
    session.step([PROMPT[:5]], {"attention_mask": mask[:, :5].astype(np.int64)})
    found = session.step(PROMPT[5:])
    assert counts == [4, 1, 4, 4, 4, 3]
    expected = logits(full_graph(config), PROMPT[3:])[-1]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_outputs_of_all_tokens_are_not_taken_apart() -> None:
    full = full_graph(CONFIGS["plain"])
    program = attnc.compile(full, cache=True, all_logits=True)
    session, counts = recorded(program, 7)
    assert session.run({"input_ids": [PROMPT]})["logits"].shape[1] == 20
    assert counts == [20]
    session.reset()
    found = session.step(PROMPT)
    assert counts == [20, 7, 7, 6]
    expected = logits(full, PROMPT)[-1]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    last, counts = recorded(attnc.compile(full, cache=True), 7)
    found = last.run({"input_ids": [PROMPT]})["logits"]
    assert found.shape[1] == 1
    assert counts == [7, 7, 6]
    assert np.abs(found[:, 0] - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("change", [{"position_ids": [[*range(25)]]}, {"attention_mask": np.ones((1, 21), np.int64)}])
def test_inputs_of_another_length_are_no_longer_prompt(change: dict[str, Any]) -> None:
    session, _ = recorded(cached(CONFIGS["masked"]), 7)
    feeds = {"input_ids": [PROMPT], "attention_mask": np.ones((1, 20), np.int64), "position_ids": [[*range(20)]]}
    with pytest.raises(InputError, match=f"input {next(iter(change))} must be"):
        session.run({**feeds, **change})
    assert session.length == 0


def test_several_rows_run_at_once() -> None:
    session, counts = recorded(cached(CONFIGS["plain"]), 7)
    session.step([PROMPT, PROMPT[::-1]])
    assert counts == [20]


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
def test_a_part_that_fails_leaves_the_session_as_it_was(target: str) -> None:
    full = full_graph(CONFIGS["window"])
    session = attnc.compile(full, target=target, cache=True, threads=1).session(prefill_chunk=4)
    session.step(PROMPT[:3])
    with pytest.raises(AttncError):
        session.step([*PROMPT[3:13], WORDS + 1])  # beyond the table of words, in the third part
    assert session.length == 3
    found, expected = session.step(PROMPT[3:]), logits(full, PROMPT)[-1]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_room_is_checked_before_the_first_part() -> None:
    program = cached(CONFIGS["plain"])
    executable = Recording(program.graph)
    session = Session(program.graph, executable, plan=program.plan, max_length=10, prefill_chunk=4)
    with pytest.raises(InputError, match="20 tokens are more than the 10"):
        session.step(PROMPT)
    assert not executable.counts


def test_the_option() -> None:
    full = full_graph(CONFIGS["plain"])
    sessions = [attnc.compile(full, target=target, cache=True).session() for target in ("numpy", "ort-cpu")]
    assert [s.prefill_chunk for s in sessions] == [None, 512]
    assert sessions[1].clone().prefill_chunk == 512
    with pytest.raises(UsageError, match="prefill_chunk must be a whole number of at least 1, not 0"):
        cached(CONFIGS["plain"]).session(prefill_chunk=0)


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
def test_shapes_are_checked_at_every_step(target: str) -> None:
    """Also where the states are those that the last run left."""
    full = full_graph(CONFIGS["masked"])
    session = attnc.compile(full, target=target, cache=True, threads=1).session()
    for token in PROMPT[:3]:
        session.step([token])
    feeds = {"input_ids": [[1]], "position_ids": [[3]], "attention_mask": np.ones((1, 4), np.int64)}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("input attention_mask", {"attention_mask": np.ones((1, 5), np.int64)}),
        ("input attention_mask", {"attention_mask": np.ones((2, 4), np.int64)}),
        ("input position_ids", {"position_ids": [[3, 4]]}),
        ("input input_ids", {"input_ids": [1]}),
    ]
    for place, change in wrong:
        with pytest.raises(InputError, match=place):
            session.run({**feeds, **change})
    with pytest.raises(InputError):
        session.step([[1], [2]])
    assert session.length == 3
    found, expected = session.run(feeds)["logits"][:, -1], logits(full, [*PROMPT[:3], 1])[-1]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("name", ["plain", "masked", "window", "sums", "types"])
def test_states_as_they_were_left_are_seen_at_once(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step checks state by state only what another than the last run put there."""
    counted: list[int] = []
    bind = Half._bind

    def counting(self: Half, *args: Any) -> None:
        counted.append(1)
        bind(self, *args)

    monkeypatch.setattr(Half, "_bind", counting)
    full = full_graph(CONFIGS[name])
    session = attnc.compile(full, target=target, cache=True, threads=1).session()
    session.step([PROMPT[:3]] * 2, {k: np.repeat(a[:, :3], 2, 0) for k, a in extra(CONFIGS[name]).items()})
    for token in PROMPT[3:6]:
        session.step([[token]] * 2)
    session.clone().step([[1]] * 2)
    assert counted == [1]
    session.reorder([1, 0])
    session.step([[1]] * 2)
    session.step([[1]] * 2)
    session.reorder([1])
    session.step([1])
    assert counted == [1, 1, 1]


def test_behind_an_encoder() -> None:
    program = cached(Decoder(encoder=True))
    feeds = {"enc_ids": np.array([[3, 4, 5, 6]]), "enc_mask": np.array([[True, True, False, True]])}
    expected = logits(full_graph(Decoder(encoder=True)), PROMPT, **feeds)[-1]
    for chunk in (3, 19, 64):
        found = program.session(prefill_chunk=chunk).step(PROMPT, feeds)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
