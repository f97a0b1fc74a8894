"""What is done to the memory of a session: rows, going back, copies, failures, the encoder half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnc.backends.numpy import NumpyExecutable
from attnc.driver import Program, Session
from attnc.ir import InputError, UsageError
from attnc.tests.driver.decoders import WORDS, Decoder, cached, full_graph, logits, whole

CONFIGS = {
    "plain": Decoder(),
    "masked": Decoder(masked=True, placed=True),
    "window and mask": Decoder(window=4, masked=True, placed=True),
    "sums": Decoder(sums=True),
}
ROWS = [[7, 3, 39], [1, 1, 2], [30, 31, 32]]


def expected(config: Decoder, rows: list[list[int]]) -> np.ndarray:
    full = full_graph(config)
    return np.stack([logits(full, row)[-1] for row in rows])


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max()))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [cached, whole])
def test_reorder(name: str, make: Callable[[Decoder], Program]) -> None:
    session = make(CONFIGS[name]).session()
    session.step(ROWS)
    session.reorder([2, 0, 0, 1])
    got = session.step([[4], [5], [6], [7]])
    rows = [[*ROWS[2], 4], [*ROWS[0], 5], [*ROWS[0], 6], [*ROWS[1], 7]]
    assert close(got, expected(CONFIGS[name], rows))
    session.reorder(np.array([3]))  # type: ignore[arg-type]
    assert close(session.step([8]), expected(CONFIGS[name], [[*ROWS[1], 7, 8]]))


def test_rows_that_are_not_there() -> None:
    session = cached(CONFIGS["plain"]).session()
    with pytest.raises(InputError, match="there is no row 0: the session has no rows"):
        session.reorder([0])
    session.step(ROWS)
    for rows in ([3], [-1]):
        with pytest.raises(InputError, match=f"there is no row {rows[0]}: the session has 3 rows"):
            session.reorder(rows)
    with pytest.raises(InputError, match="no row"):
        session.reorder([])
    fixed = cached(Decoder(batch=1)).session()
    fixed.step([1, 2])
    fixed.reorder([0])
    with pytest.raises(InputError, match="the program takes 1 rows, and 2 are given"):
        fixed.reorder([0, 0])


@pytest.mark.parametrize("name", ["plain", "masked"])
@pytest.mark.parametrize("make", [cached, whole])
def test_truncate(name: str, make: Callable[[Decoder], Program]) -> None:
    session = make(CONFIGS[name]).session()
    session.step([[7, 3, 39, 5], [1, 1, 2, 2]])
    session.truncate(4)
    session.truncate(2)
    assert session.length == 2
    got = session.step([[9, 9], [8, 8]])
    assert close(got, expected(CONFIGS[name], [[7, 3, 9, 9], [1, 1, 8, 8]]))
    session.truncate(0)
    assert close(session.step([[5]]), expected(CONFIGS[name], [[5]]))  # also another number of rows


def test_truncate_repeats_the_type_of_the_token_that_is_last_then() -> None:
    config = Decoder(typed=True)
    session = cached(config).session()
    session.step([1, 2, 3], {"token_type_ids": [0, 1, 0]})
    session.truncate(2)
    wanted = logits(full_graph(config), [1, 2, 4], token_type_ids=np.array([[0, 1, 1]]))[-1:]
    assert close(session.step([4]), wanted)


def test_a_ring_goes_back_until_it_has_dropped_something() -> None:
    config = Decoder(window=5)  # four rows are held
    session = cached(config).session()
    session.step([1, 2, 3, 4])
    session.truncate(3)
    assert close(session.step([9]), expected(config, [[1, 2, 3, 9]]))
    session.step([10])
    before = session.states
    with pytest.raises(UsageError, match=r"cannot go back from 5 to 4 tokens: the state 1\.key .* last 4 of 5 tokens"):
        session.truncate(4)
    assert session.length == 5
    assert all(session.states[name] is before[name] for name in before)
    session.truncate(0)
    assert close(session.step([9, 8]), expected(config, [[9, 8]]))


def test_a_ring_that_holds_more_than_it_needs_goes_back_so_far() -> None:
    """The state keeps four rows, and by its plan two are needed."""
    config = Decoder(window=5)
    program = cached(config)
    assert program.plan is not None
    states = tuple(replace(s, window=2) if s.kind == "ring" else s for s in program.plan.states)
    session = cached(config, states=states).session()
    session.step([1, 2, 3, 4, 5, 6])
    whole_ring = session.states["1.key"]
    session.truncate(4)
    assert np.array_equal(session.states["1.key"], whole_ring[:, :, :2])  # tokens 2 and 3 of 2, 3, 4, 5
    with pytest.raises(UsageError):
        session.truncate(3)


def test_states_that_cannot_go_back() -> None:
    session = cached(CONFIGS["sums"]).session()
    session.step([1, 2, 3])
    with pytest.raises(UsageError, match=r"the state sum .* a running sum .* Keep a session\.clone\(\)"):
        session.truncate(2)
    assert close(session.step([4]), expected(CONFIGS["sums"], [[1, 2, 3, 4]]))
    session.truncate(0)
    assert close(session.step([4]), expected(CONFIGS["sums"], [[4]]))
    for length in (-1, 2, True):
        with pytest.raises(UsageError, match="has seen 1 tokens"):
            session.truncate(length)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [cached, whole])
def test_clones_go_their_own_ways(name: str, make: Callable[[Decoder], Program]) -> None:
    config = CONFIGS[name]
    session = make(config).session()
    session.step([1, 2, 3])
    copies = [session, session.clone(), session.clone()]
    rows = [[1, 2, 3] for _ in copies]
    for count in range(4):
        for k, copy in enumerate(copies):
            rows[k].append((7 * k + 3 * count) % WORDS)
            assert close(copy.step([rows[k][-1]]), expected(config, [rows[k]]))
    copies[1].reset()
    assert [copy.length for copy in copies] == [7, 0, 7]


# -- failures --------------------------------------------------------------------------------------------------


class Stopping(NumpyExecutable):
    """Does all the work, then fails as if it were interrupted."""

    error: BaseException | None = None

    def run(self, feeds: Any, states: Any) -> Any:
        results = super().run(feeds, states)
        if self.error is not None:
            raise self.error
        return results


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_that_fails_changes_nothing(name: str, error: BaseException) -> None:
    program = cached(CONFIGS[name])
    executable = Stopping(program.graph)
    session = Session(program.graph, executable, plan=program.plan)
    session.step([1, 2, 3])
    executable.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            session.step([30, 31])
        assert session.length == 3
    executable.error = None
    assert close(session.step([4]), expected(CONFIGS[name], [[1, 2, 3, 4]]))


def test_a_node_that_fails_half_way_changes_nothing() -> None:
    session = cached(CONFIGS["plain"], max_length=None).session()
    session.step([1, 2, 3])
    with pytest.raises(Exception, match="gather"):
        session.run({"input_ids": np.array([[WORDS + 1]])})  # beyond the table of words
    assert session.length == 3
    assert close(session.step([4]), expected(CONFIGS["plain"], [[1, 2, 3, 4]]))


# -- the encoder half ------------------------------------------------------------------------------------------

ENCODER = Decoder(encoder=True)
ENC: dict[str, Any] = {
    "enc_ids": np.array([[3, 4, 5, 6], [9, 9, 1, 0]]),
    "enc_mask": np.array([[True, True, True, False], [True, False, True, True]]),
}


def crossed(row: list[int], k: int) -> np.ndarray:
    given = {name: array[k : k + 1] for name, array in ENC.items()}
    return np.asarray(logits(full_graph(ENCODER), row, **given)[-1])


class Counting(NumpyExecutable):
    runs = 0

    def run(self, feeds: Any, states: Any) -> Any:
        self.runs += 1
        return super().run(feeds, states)


def encoder_session() -> tuple[Session, Counting]:
    from attnc.driver.half import Half

    program = cached(ENCODER)
    assert program.prepare is not None
    counting = Counting(program.prepare)
    half = Half(program.prepare, counting)
    return Session(program.graph, NumpyExecutable(program.graph), plan=program.plan, prepare=half), counting


def test_the_encoder_runs_once() -> None:
    session, counting = encoder_session()
    given = {name: array.copy() for name, array in ENC.items()}
    got = session.step([[1, 2], [3, 4]], given)
    given["enc_mask"][:] = False  # what the caller does with it later does not matter
    assert close(got, np.stack([crossed([1, 2], 0), crossed([3, 4], 1)]))
    got = session.step([[5], [6]])
    assert close(got, np.stack([crossed([1, 2, 5], 0), crossed([3, 4, 6], 1)]))
    assert counting.runs == 1
    session.reorder([1])
    assert close(session.step([7]), crossed([3, 4, 6, 7], 1)[None])
    session.truncate(0)
    assert close(session.step([8, 9]), crossed([8, 9], 1)[None])
    assert counting.runs == 1


def test_the_encoder_by_itself() -> None:
    session, counting = encoder_session()
    assert session.prepare({"enc_ids": ENC["enc_ids"]}) == {}
    assert sorted(session.states) == ["0.cross.key", "0.cross.value"]
    got = session.step([[1], [2]], {"enc_mask": ENC["enc_mask"]})
    assert close(got, np.stack([crossed([1], 0), crossed([2], 1)]))
    assert counting.runs == 1


def test_the_encoder_is_missing_or_late() -> None:
    session, _ = encoder_session()
    with pytest.raises(InputError, match="the encoder half has not run: give its inputs enc_ids first"):
        session.step([1])
    with pytest.raises(InputError, match="enc_mask"):
        session.step([[1], [2]], {"enc_ids": ENC["enc_ids"]})
    session.step([[1], [2]], ENC)
    with pytest.raises(UsageError, match=r"has seen 1 tokens: reset\(\)"):
        session.step([[1], [2]], ENC)
    session.reset()
    with pytest.raises(InputError, match="has not run"):
        session.step([[1], [2]])
    with pytest.raises(UsageError, match="no encoder half"):
        cached(CONFIGS["plain"]).session().prepare({})


def test_raw_runs_with_an_encoder() -> None:
    session, _ = encoder_session()
    first = session.run({"input_ids": [[1, 2], [3, 4]], **ENC})["logits"][:, 0]
    assert close(first, np.stack([crossed([1, 2], 0), crossed([3, 4], 1)]))
    second = session.run({"input_ids": [[5], [6]]})["logits"][:, 0]
    assert close(second, np.stack([crossed([1, 2, 5], 0), crossed([3, 4, 6], 1)]))
