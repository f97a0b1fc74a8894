"""Beam search against searches that try everything, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attnc.driver.beam import Beam
from attnc.ir import Graph, InputError, UsageError
from attnc.tests.driver.decoders import WORDS, Decoder, cached, full_graph, greedy, logits, whole


def log_probabilities(graph: Graph, row: list[int], **feeds: object) -> np.ndarray:
    x = logits(graph, row, **feeds)[-1]
    return np.asarray(x - np.log(np.exp(x - x.max()).sum()) - x.max())


def everything(graph: Graph, row: list[int], power: float, end: int) -> list[tuple[float, tuple[int, ...]]]:
    """All continuations of at most two tokens that end with ``end`` or have two, by score."""
    first = log_probabilities(graph, row)
    found: list[tuple[float, tuple[int, ...]]] = [(float(first[end]), (end,))]
    for a, b in itertools.product(range(WORDS), repeat=2):
        if b == 0 and a != end:
            second = log_probabilities(graph, [*row, a])
            found += [(float(first[a] + second[t]) / 2**power, (a, t)) for t in range(WORDS)]
    return sorted(found, key=lambda entry: -entry[0])


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_as_many_beams_as_words_find_the_best(power: float) -> None:
    full, row = full_graph(Decoder()), [5, 6, 7]
    end = int(np.argsort(log_probabilities(full, row))[-3])
    expected = everything(full, row, power, end)[:WORDS]
    found = cached(Decoder()).session().beam_search(row, WORDS, 2, length_penalty=power, stop=end)
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    assert np.allclose([beam.score for beam in found], [score for score, _ in expected], rtol=1e-5)
    assert all(np.isclose(beam.score * len(beam.tokens) ** power, beam.log_probability) for beam in found)


def plain_search(graph: Graph, row: list[int], beams: int, count: int, end: int) -> list[tuple[int, ...]]:
    """The same search, without a cache and without ending early: length penalty 1."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for number in range(1, count + 1):
        every = [
            (total + float(p), (*tokens, t))
            for total, tokens in running
            for t, p in enumerate(log_probabilities(graph, [*row, *tokens]))
        ]
        every.sort(key=lambda entry: -entry[0])
        running = []
        for total, tokens in every:
            if len(running) == beams:
                break
            (ended if tokens[-1] == end and number < count else running).append((total, tokens))
    ended += running
    ended.sort(key=lambda entry: -entry[0] / len(entry[1]))
    return [tokens for _, tokens in ended[:beams]]


@pytest.mark.parametrize("config", [Decoder(), Decoder(masked=True, placed=True, window=4), Decoder(sums=True)])
def test_beams_follow_their_parents(config: Decoder) -> None:
    full, row = full_graph(config), [5, 6, 7]
    end = greedy(full, row, 5)[4]
    expected = plain_search(full, row, 3, 6, end)
    assert any(tokens[-1] == end and len(tokens) < 6 for tokens in expected) or len(expected) == 3
    for program in (cached(config), whole(config)):
        session = program.session()
        found = session.beam_search(row, 3, 6, stop=end)
        assert [beam.tokens for beam in found] == expected
        assert session.length == 0


def test_one_beam_is_greedy() -> None:
    full = full_graph(Decoder())
    (beam,) = cached(Decoder(batch=1)).session().beam_search([5, 6, 7], 1, 9)
    assert isinstance(beam, Beam)
    assert list(beam.tokens) == greedy(full, [5, 6, 7], 9)


def test_rows_and_what_was_seen() -> None:
    full, session = full_graph(Decoder()), cached(Decoder()).session()
    session.step([[1, 2], [3, 4]])
    found = session.beam_search([[5], [6, 7]], 2, 4)
    assert [[beam.tokens for beam in beams] for beams in found] == [
        plain_search(full, [1, 2, 5], 2, 4, -1), plain_search(full, [3, 4, 6, 7], 2, 4, -1)
    ]  # fmt: skip
    assert session.length == 2


def test_the_encoder() -> None:
    config = Decoder(encoder=True)
    full = full_graph(config)
    enc = {"enc_ids": np.array([[3, 4, 5], [9, 8, 7]]), "enc_mask": np.array([[True, True, False], [True, True, True]])}
    found = cached(config).session().beam_search([[1], [2]], WORDS, 1, enc)
    for k, row in enumerate([[1], [2]]):
        wanted = log_probabilities(full, row, **{name: array[k : k + 1] for name, array in enc.items()})
        assert np.allclose(sorted(beam.score for beam in found[k]), np.sort(wanted), rtol=1e-5)


def test_wrong_arguments() -> None:
    session = cached(Decoder()).session()
    with pytest.raises(UsageError, match="beams must be"):
        session.beam_search([1], 0)
    with pytest.raises(UsageError, match="max_new_tokens must be"):
        session.beam_search([1], 2, 0)
    with pytest.raises(UsageError, match="the program always takes 1"):
        cached(Decoder(batch=1)).session().beam_search([1], 2)
    with pytest.raises(InputError, match="more than the 64"):
        session.beam_search([1] * 65, 2)
