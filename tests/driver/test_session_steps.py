"""Steps of a cached program against the decoder over all tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnc
from attnc.backends.base import Options
from attnc.ir import InputError, UsageError
from attnc.tests.driver.decoders import SIZE, TABLE, WORDS, Decoder, cached, full_graph, logits, whole

CONFIGS = {
    "plain": Decoder(),
    "masked": Decoder(masked=True, placed=True),
    "window": Decoder(window=4),
    "window and mask": Decoder(window=4, masked=True, placed=True),
    "sums": Decoder(sums=True),
}
ROWS = [[7, 3, 39, 0, 12, 5, 30], [1, 1, 2, 20, 9, 9, 9]]


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """float32 against float64: some hundred sums of numbers of this size."""
    return (
        found.shape == expected.shape and float(np.abs(found - expected).max()) < 2e-6 * np.abs(expected).max() + 1e-6
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("split", [(7,), (3, 4), (1,) * 7, (2, 1, 1, 3), (5, 2)])
def test_any_split_gives_the_same(name: str, split: tuple[int, ...]) -> None:
    full = full_graph(CONFIGS[name])
    expected = [logits(full, row) for row in ROWS]
    for program in (cached(CONFIGS[name]), whole(CONFIGS[name])):
        session, at = program.session(), 0
        for count in split:
            got = session.step(np.array(ROWS)[:, at : at + count])
            at += count
            assert close(got, np.stack([e[at - 1] for e in expected]))
            assert session.length == at


def test_states_are_those_of_the_tokens_seen() -> None:
    session = cached(CONFIGS["window"]).session()
    assert dict(session.states) == {}
    session.step(ROWS)
    assert {name: a.shape for name, a in session.states.items()} == {
        "0.key": (2, 2, 7, SIZE), "0.value": (2, 2, 7, SIZE), "1.key": (2, 2, 3, SIZE), "1.value": (2, 2, 3, SIZE),
    }  # fmt: skip
    session.reset()
    assert (session.length, dict(session.states)) == (0, {})


def test_ids_in_one_row() -> None:
    session, expected = cached(CONFIGS["plain"]).session(), logits(full_graph(CONFIGS["plain"]), ROWS[0])
    assert close(session.step(ROWS[0][:6]), expected[5:6])
    assert close(session.step(np.array(ROWS[0][6:], np.int32)), expected[6:])


def test_raw_runs_take_what_the_graph_takes() -> None:
    expected = logits(full_graph(CONFIGS["masked"]), ROWS[0])
    session = cached(CONFIGS["masked"]).session()
    ids, ones = np.array([ROWS[0]]), np.ones((1, 7), np.int64)
    feeds = {"input_ids": ids[:, :3], "attention_mask": ones[:, :3], "position_ids": [[0, 1, 2]]}
    assert close(session.run(feeds)["logits"][:, 0], expected[2:3])
    short = {"input_ids": ids[:, 3:], "attention_mask": ones[:, 3:], "position_ids": [[3, 4, 5, 6]]}
    with pytest.raises(InputError, match=r"attention_mask must be .* where past = 3, seq = 4"):
        session.run(short)
    assert session.length == 3
    assert close(session.run(short | {"attention_mask": ones})["logits"][:, 0], expected[6:])
    assert session.length == 7
    with pytest.raises(InputError, match="input_ids holds no new token"):
        session.run({"input_ids": ids[:, :0], "attention_mask": ones, "position_ids": ids[:, :0]})


def test_left_padding_masked() -> None:
    """Positions count what the mask shows, so that a padded row gives what it gives alone."""
    full = full_graph(CONFIGS["masked"])
    short, long = [4, 8, 15], [16, 23, 3, 1, 2]
    for program in (cached(CONFIGS["masked"]), whole(CONFIGS["masked"])):
        session = program.session()
        mask = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
        got = session.step([[99 % WORDS, 0, *short], long], {"attention_mask": mask})
        assert close(got, np.stack([logits(full, short)[-1], logits(full, long)[-1]]))
        got = session.step([[5, 6], [7, 8]])
        assert close(got, np.stack([logits(full, [*short, 5, 6])[-1], logits(full, [*long, 7, 8])[-1]]))


def test_right_padding_and_positions_given() -> None:
    full = full_graph(CONFIGS["masked"])
    session = cached(CONFIGS["masked"]).session()
    session.step([[4, 8, 15, 0, 0]], {"attention_mask": [[1, 1, 1, 0, 0]]})
    assert close(session.step([[5]]), logits(full, [4, 8, 15, 5])[-1:])
    moved = session.clone()
    got = moved.step([6], {"position_ids": [20], "attention_mask": [1]})
    expected = logits(full, [4, 8, 15, 5, 6], position_ids=np.array([[0, 1, 2, 3, 20]]))
    assert close(got, expected[-1:])
    whole_mask = session.step([6], {"position_ids": [20], "attention_mask": [[1, 1, 1, 0, 0, 1, 1]]})
    assert np.array_equal(got, whole_mask)


def test_types_of_tokens_repeat_the_last() -> None:
    config = Decoder(typed=True)
    full = full_graph(config)
    for program in (cached(config), whole(config)):
        session = program.session()
        with pytest.raises(InputError, match=r"token_type_ids: .* give it"):
            session.step([1, 2, 3])
        assert session.length == 0
        session.step([1, 2, 3], {"token_type_ids": [0, 0, 1]})
        got = session.step([4, 5])
        assert close(got, logits(full, [1, 2, 3, 4, 5], token_type_ids=np.array([[0, 0, 1, 1, 1]]))[-1:])
        got = session.step([6], {"token_type_ids": [[0]]})
        assert close(got, logits(full, [1, 2, 3, 4, 5, 6], token_type_ids=np.array([[0, 0, 1, 1, 1, 0]]))[-1:])


def test_feeds_that_do_not_fit() -> None:
    session = cached(CONFIGS["masked"]).session()
    session.step(ROWS)
    before = session.states
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([[1, 2], [3]], {}, "differ in length"),
        ([[1, 2], [3, 4]], {"mask": [[1]]}, "no input is called mask; the inputs are input_ids, attention_mask"),
        ([[1, 2], [3, 4]], {"input_ids": [[1]]}, "given twice"),
        ([[1, 2], [3, 4]], {"attention_mask": [[1] * 3] * 2}, "one entry for each of the 2 new tokens"),
        ([[1, 2], [3, 4]], {"position_ids": [[0.5, 1.0]] * 2}, "position_ids"),
        ([[1, 2]], {}, "attention_mask"),
        ([], {}, "no row"),
        ([[]], {}, "at least one"),
        ([[1.5]], {}, "whole numbers"),
        ("text", {}, "token ids must be"),
        (np.zeros((1, 2, 3), int), {}, "token ids must be"),
    ]
    for ids, feeds, words in cases:
        with pytest.raises(InputError, match=words):
            session.step(ids, feeds)
        assert session.length == 7
        assert all(session.states[name] is before[name] for name in before)


def test_lengths_beyond_the_table() -> None:
    session = cached(CONFIGS["plain"]).session()
    session.step(np.ones((1, TABLE - 1), np.int64))
    before = session.states
    with pytest.raises(InputError, match=f"63 tokens seen and 2 new ones are more than the {TABLE} that the model's"):
        session.step([1, 2])
    assert session.length == TABLE - 1
    assert all(session.states[name] is before[name] for name in before)
    session.step([1])
    with pytest.raises(InputError, match="66 tokens are more"):
        cached(CONFIGS["plain"]).session().step([0] * 66)


def test_max_length_is_an_option() -> None:
    for session in (
        cached(CONFIGS["plain"]).session(max_length=4),
        cached(CONFIGS["plain"], Options(extra={"max_length": 4})).session(),
        whole(CONFIGS["plain"]).session(max_length=4),
    ):
        session.step([1, 2, 3, 4])
        with pytest.raises(
            InputError, match="4 tokens seen and 1 new ones are more than the 4 of the option max_length"
        ):
            session.step([5])
    with pytest.raises(UsageError, match="max_length must be a whole number"):
        cached(CONFIGS["plain"]).session(max_length=0)


def test_batch_is_an_option() -> None:
    session = cached(CONFIGS["masked"]).session(batch=2)
    with pytest.raises(InputError, match="input_ids has 1 rows, and the session was made for 2"):
        session.step([1, 2])
    session.step(ROWS)
    with pytest.raises(InputError, match="3 rows are given, and the session was made for 2"):
        session.reorder([0, 1, 1])
    session.reorder([1, 0])


def test_a_program_of_one_row() -> None:
    config = Decoder(batch=1)
    for program in (cached(config), whole(config)):
        with program.session() as session:
            assert close(session.step(ROWS[0]), logits(full_graph(config), ROWS[0])[-1:])
            with pytest.raises(InputError, match="takes 1 rows of token ids, and 2 are given"):
                session.step(ROWS)


def test_programs_that_cannot_be_stepped(graph: attnc.Graph) -> None:
    session = attnc.compile(attnc.parse("graph @g(%x: float32[n]) {\n  %y = neg(%x): float32[n]\n  return y = %y\n}\n"))
    with pytest.raises(UsageError, match="no input of token ids"):
        session.session().step([1, 2])
    with pytest.raises(InputError, match=r"keep: .* give it for the new ones"):
        attnc.compile(graph).session().step([1, 2])


def test_closed() -> None:
    session = cached(CONFIGS["plain"]).session()
    copy = session.clone()
    session.close()
    session.close()
    for one in (session, copy):
        with pytest.raises(UsageError, match="closed"):
            one.step([1])


def two_inputs_of_ids() -> attnc.Graph:
    """Logits of a token and of a sum over another sequence; each input has sizes of its own, as exporters give them."""
    graph = attnc.Graph("two")
    sizes = {name: attnc.symbol(name) for name in ("batch", "src", "seq", "rows")}
    types = {"input_ids": ("batch", "src"), "decoder_mask": ("rows", "seq"), "decoder_input_ids": ("batch", "seq")}
    values = {
        name: graph.add_input(name, attnc.TensorType(attnc.DType.INT64, tuple(sizes[d] for d in dims)))
        for name, dims in types.items()
    }
    b = attnc.Builder(graph)
    table = b.constant(np.random.default_rng(0).standard_normal((7, 7)).astype(np.float32), "table")
    total = b("reduce_sum", b("gather", table, values["input_ids"], axis=0), axes=(1,), keepdims=True)
    graph.add_output(b.add(b("gather", table, values["decoder_input_ids"], axis=0), total), "out")
    graph.add_output(b("reduce_sum", values["decoder_mask"], axes=(1,)), "shown")
    return graph


def test_the_ids_are_those_of_the_logits() -> None:
    """The encoder's ids have the batch in common with the logits, and look up the same table."""
    graph = two_inputs_of_ids()
    session = attnc.compile(graph).session()
    assert {t.name: t.role for t in session.time.plan.inputs} == {"decoder_input_ids": "ids", "decoder_mask": "mask"}
    table = next(v.constant for v in graph.constants if v.name == "table")
    assert table is not None
    feeds = {"input_ids": [[5, 6, 0], [1, 1, 1]], "decoder_mask": [[0, 1], [1, 1]]}
    got = session.step([[1, 2], [3, 4]], feeds)
    sums = np.stack([table.array[[5, 6, 0]].sum(0), table.array[[1, 1, 1]].sum(0)])
    assert close(got, table.array[[2, 4]] + sums)
    session.reorder([1, 1, 0])  # the mask, whose rows have another name, comes along
    assert close(session.step([[6], [5], [0]]), table.array[[6, 5, 0]] + sums[[1, 1, 0]])
    assert session.memory.seen["decoder_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]
