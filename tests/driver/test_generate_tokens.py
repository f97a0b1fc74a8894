"""Generating against a loop that reads the whole row anew for every token, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.backends.numpy import NumpyExecutable
from attnc.driver import Program, Session
from attnc.driver.generate import Stops
from attnc.driver.sampling import Sampling, seeded
from attnc.ir import InputError, UsageError
from attnc.tests.driver.decoders import WORDS, Decoder, cached, full_graph, greedy, logits, whole

CONFIGS = {
    "plain": Decoder(),
    "masked": Decoder(masked=True, placed=True),
    "mask without positions": Decoder(masked=True),
    "window": Decoder(window=4),
    "window and mask": Decoder(window=4, masked=True, placed=True),
    "sums and mask": Decoder(sums=True, masked=True, placed=True),
}
RAGGED = [[1, 2, 3], [7], [8, 9, 10, 11, 12, 13], [4, 5, 6]]
Make = Callable[[Decoder], Program]


def columns(stream: Iterator[Any]) -> list[list[int | None]]:
    return [list(row) for row in zip(*stream, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [cached, whole])
def test_greedy(name: str, make: Make) -> None:
    full = full_graph(CONFIGS[name])
    expected = [greedy(full, row, 12) for row in ([5, 6, 7], [1, 30, 2])]
    session = make(CONFIGS[name]).session()
    found = list(session.generate([5, 6, 7], 12))
    assert found == expected[0]
    assert all(type(token) is int for token in found)
    assert session.length == 3 + 11  # all but the last token given
    session.reset()
    assert list(session.generate(np.array([[5, 6, 7]]), max_new_tokens=12)) == expected[0]
    session.reset()
    assert columns(session.generate([[5, 6, 7], [1, 30, 2]], 12)) == expected


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [cached, whole])
def test_rows_of_different_lengths_give_what_each_gives_alone(name: str, make: Make) -> None:
    full = full_graph(CONFIGS[name])
    found = columns(make(CONFIGS[name]).session().generate(RAGGED, 9))
    assert found == [greedy(full, row, 9) for row in RAGGED]


class Recording(NumpyExecutable):
    def __init__(self, graph: attnc.Graph) -> None:
        super().__init__(graph)
        self.shapes: list[tuple[int, ...]] = []

    def run(self, feeds: Any, states: Any) -> Any:
        self.shapes.append(feeds["input_ids"].shape)
        return super().run(feeds, states)


def recorded(program: Program) -> tuple[Session, list[tuple[int, ...]]]:
    executable = Recording(program.graph)
    return Session(program.graph, executable, plan=program.plan), executable.shapes


def test_one_batch_where_padding_is_exact_else_a_batch_for_each_length() -> None:
    session, shapes = recorded(cached(CONFIGS["masked"]))
    list(session.generate(RAGGED, 2))
    assert shapes == [(4, 6), (4, 1)]
    for program in (
        cached(CONFIGS["plain"]),
        cached(CONFIGS["mask without positions"]),
        cached(CONFIGS["sums and mask"]),
    ):
        session, shapes = recorded(program)
        list(session.generate(RAGGED, 2))
        assert sorted(shapes) == [(1, 1), (1, 1), (1, 1), (1, 6), (2, 1), (2, 3)]
        assert session.length == 0  # the batches ran in copies
    # Whatever a plan says: a running sum has the padding in it.
    session, shapes = recorded(cached(CONFIGS["sums and mask"], padding=True))
    list(session.generate(RAGGED, 2))
    assert len(shapes) == 6


def test_a_program_of_one_row_takes_rows_in_turn() -> None:
    config = Decoder(batch=1)
    full = full_graph(config)
    for program in (cached(config), whole(config)):
        assert columns(program.session().generate([[1, 2], [3, 4]], 5)) == [
            greedy(full, r, 5) for r in ([1, 2], [3, 4])
        ]


def test_generating_goes_on_from_what_was_seen() -> None:
    for name in ("masked", "plain"):
        full = full_graph(CONFIGS[name])
        session = cached(CONFIGS[name]).session()
        session.step([[1, 2, 3], [4, 5, 6]])
        found = columns(session.clone().generate([[7], [8]], 5))
        assert found == [greedy(full, [1, 2, 3, 7], 5), greedy(full, [4, 5, 6, 8], 5)]
        found = columns(session.generate([[7], [8, 9]], 5))
        assert found == [greedy(full, [1, 2, 3, 7], 5), greedy(full, [4, 5, 6, 8, 9], 5)]


def test_the_encoders_input_is_given_once() -> None:
    config = Decoder(encoder=True)
    full = full_graph(config)
    ids, mask = np.array([[3, 4, 5, 6], [9, 9, 1, 0]]), np.array([[True, True, True, False], [True, False, True, True]])
    expected = [
        greedy(full, row, 8, enc_ids=ids[k : k + 1], enc_mask=mask[k : k + 1]) for k, row in enumerate([[1, 2], [3]])
    ]
    for program in (cached(config), whole(config)):
        session = program.session()
        assert list(session.generate([1, 2], 8, {"enc_ids": ids[:1], "enc_mask": mask[:1]})) == expected[0]
        found = columns(program.session().generate([[1, 2], [3]], 8, {"enc_ids": ids, "enc_mask": mask}))
        assert found == expected


def test_inputs_along_time_of_ragged_rows() -> None:
    config = Decoder(typed=True)
    full = full_graph(config)
    types = [[0, 1, 1], [0]]

    def repeated(row: list[int]) -> Callable[[int], np.ndarray]:
        return lambda length: np.array([[*row, *[row[-1]] * (length - len(row))]])

    for program in (cached(config), whole(config)):
        found = columns(program.session().generate([[1, 2, 3], [7]], 6, {"token_type_ids": types}))
        assert found == [
            greedy(full, row, 6, token_type_ids=repeated(t)) for row, t in zip([[1, 2, 3], [7]], types, strict=True)
        ]
    with pytest.raises(InputError, match="token_type_ids must have 2 rows"):
        list(cached(config).session().generate([[1, 2, 3], [7]], 6, {"token_type_ids": types[:1]}))


# -- stops -----------------------------------------------------------------------------------------------------


def test_stops() -> None:
    full = full_graph(CONFIGS["plain"])
    one, two = greedy(full, [5, 6, 7], 12), greedy(full, [1, 30, 2], 12)
    pairs = [set(itertools.pairwise(tokens)) for tokens in (one, two)]
    at = next(k for k in range(2, 11) if (one[k - 1], one[k]) not in pairs[1] and one[k] not in one[:k])
    pair, session = one[at - 1 : at + 1], cached(CONFIGS["plain"]).session()
    assert list(session.generate([5, 6, 7], 12, stop=one[at])) == one[: at + 1]
    session.reset()
    assert list(session.generate([5, 6, 7], 12, stop=[99, pair])) == one[: at + 1]
    session.reset()
    found = columns(session.generate([[5, 6, 7], [1, 30, 2]], 12, stop=[pair]))
    assert found == [[*one[: at + 1], *[None] * (11 - at)], two]
    session.reset()
    found = columns(session.generate([[5, 6, 7], [1, 30, 2]], 12, stop=[pair, two[0]]))
    assert found == [one[: at + 1], [two[0], *[None] * at]]  # ends when all rows have


def test_a_sequence_counts_among_generated_tokens_only() -> None:
    full = full_graph(CONFIGS["plain"])
    first = greedy(full, [5, 6, 7], 4)
    assert list(cached(CONFIGS["plain"]).session().generate([5, 6, 7], 4, stop=[[7, first[0]]])) == first
    assert not Stops([[1, 2, 3]]).reached([2, 3])
    assert Stops([[2, 3]]).reached([1, 2, 3])
    assert not Stops(()).reached([1])


# -- drawing ---------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution_of_the_whole_prefix() -> None:
    full, row = full_graph(CONFIGS["masked"]), [5, 6, 7]
    sampling = Sampling(0.8, top_k=12, top_p=0.9, repetition_penalty=1.3)
    rng, expected = seeded(11, 1)[0], list[int]()
    for _ in range(15):
        seen = np.array([*row, *expected])
        expected.append(sampling.choose(logits(full, [*row, *expected])[-1], seen, rng))
    options = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 11}
    for program in (cached(CONFIGS["masked"]), whole(CONFIGS["masked"])):
        assert list(program.session().generate(row, 15, **options)) == expected  # type: ignore[arg-type]
    other = list(cached(CONFIGS["masked"]).session().generate(row, 15, **{**options, "seed": 12}))  # type: ignore[arg-type]
    assert other != expected


def test_draws_of_a_row_do_not_depend_on_how_rows_run() -> None:
    masked = columns(cached(CONFIGS["masked"]).session().generate(RAGGED, 8, temperature=1.0, seed=3))
    plain = columns(cached(CONFIGS["plain"]).session().generate(RAGGED, 8, temperature=1.0, seed=3))
    assert masked == plain  # padded in one batch; in three batches
    assert masked[0] == list(cached(CONFIGS["plain"]).session().generate(RAGGED[0], 8, temperature=1.0, seed=3))


def test_padding_is_not_penalised() -> None:
    """Whether padded by the session or by the caller: token 0 stands there, and has not been said."""
    config = CONFIGS["masked"]
    alone = [list(cached(config).session().generate(row, 8, repetition_penalty=5.0)) for row in RAGGED[:2]]
    assert columns(cached(config).session().generate(RAGGED[:2], 8, repetition_penalty=5.0)) == alone
    ids, mask = [RAGGED[0], [alone[1][0], alone[1][0], 7]], [[1, 1, 1], [0, 0, 1]]
    found = cached(config).session().generate(ids, 8, {"attention_mask": mask}, repetition_penalty=5.0)
    assert columns(found) == alone


# -- arguments and failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        ([1], {"max_new_tokens": 0}, UsageError, "max_new_tokens"),
        ([1], {"max_new_tokens": 1.5}, UsageError, "max_new_tokens"),
        ([1], {"stop": ["x"]}, UsageError, "stop"),
        ([1], {"stop": [[]]}, UsageError, "empty"),
        ([1], {"temperature": -1}, UsageError, "temperature"),
        ([], {}, InputError, "no row|at least one"),
        ([[1], []], {}, InputError, "at least one"),
        ([[1], "ab"], {}, InputError, "whole numbers"),
        ([[1, [2]]], {}, InputError, "whole numbers"),
        (5, {}, InputError, "token ids must be"),
        ([1] * 65, {}, InputError, "65 tokens are more than the 64"),
    ],
)
def test_wrong_arguments_are_named_at_once(
    ids: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        cached(CONFIGS["plain"]).session().generate(ids, **options)


def test_the_end_of_the_table_is_an_error_when_it_is_reached() -> None:
    session = cached(CONFIGS["plain"]).session()
    stream = session.generate([1] * 62, 10)
    assert len([next(stream), next(stream), next(stream)]) == 3
    with pytest.raises(InputError, match="64 tokens seen and 1 new ones"):
        next(stream)
    assert session.length == 64


def test_an_interrupt_leaves_the_session_usable() -> None:
    program = cached(CONFIGS["window and mask"])
    full = full_graph(CONFIGS["window and mask"])

    class Interrupted(NumpyExecutable):
        left = 4

        def run(self, feeds: Any, states: Any) -> Any:
            results = super().run(feeds, states)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return results

    session = Session(program.graph, Interrupted(program.graph), plan=program.plan)
    stream = session.generate([1, 2, 3], 10)
    found: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(stream)
    assert found == greedy(full, [1, 2, 3], 3)
    assert session.length == 3 + 2  # the third token was about to be read
    rest = list(session.generate(found[2:], 4))
    assert rest == greedy(full, [1, 2, 3, *found], 4)


@pytest.mark.parametrize("make", [cached, whole])
@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_a_token_that_is_none_is_an_error_before_the_run(make: Make, wrong: int) -> None:
    session = make(Decoder()).session()
    calls: tuple[Callable[[], object], ...] = (
        lambda: session.step([1, wrong]),
        lambda: session.generate([[1], [wrong, 2]]),
        lambda: session.beam_search([wrong]),
    )
    for call in calls:
        with pytest.raises(InputError, match=f"^{wrong} is no token id of the program: they are 0 to {WORDS - 1}$"):
            call()
    assert session.length == 0
