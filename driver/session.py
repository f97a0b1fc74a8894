"""A program while it runs: feeds checked, states kept from run to run, tokens generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from ..backends.base import Executable
from ..ir import Graph, InputError, TensorType, UsageError, Value
from ..ir.cacheplan import CachePlan, TimeOutput
from ..ir.evaluate import check_feeds
from ..ir.operator import Array
from .beam import search
from .generate import Stop, check_whole, generate, token_array
from .half import Half
from .memory import Memory, take, truncated
from .sampling import Sampling
from .timefeeds import TimeFeeds
from .timeplan import whole_plan

__all__ = ["Session"]


class Session:
    """Runs a program. A context manager; not thread-safe.

    A program with a cache remembers the tokens that it has seen: ``run``, ``step`` and ``generate`` take the new ones
    and go on from there, until ``reset``. A program without one is stepped by running all tokens again. A run that
    fails or is interrupted leaves the session as it was.
    """

    def __init__(
        self,
        graph: Graph,
        executable: Executable,
        *,
        plan: CachePlan | None = None,
        prepare: Half | None = None,
        batch: int | None = None,
        max_length: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """``prepare`` is the encoder half of a program with two. ``batch`` fixes how many rows a run has;
        ``max_length`` how many tokens the session may see, where the plan does not allow fewer. More new tokens than
        ``prefill_chunk`` of one row run in turns, where only what follows the last of them is asked for."""
        for name, number in (("batch", batch), ("max_length", max_length), ("prefill_chunk", prefill_chunk)):
            if number is not None:
                check_whole(name, number)
        self.graph = graph
        self.plan = plan
        self.batch = batch
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self._main = Half(graph, executable)
        self._prepare = prepare
        self.memory = Memory()
        self._feeds: TimeFeeds | None = None
        self._open = [True]  # shared with clones: the program is freed once, for all

    # -- what it knows ---------------------------------------------------------------------------------------

    @property
    def states(self) -> Mapping[str, Array]:
        """The states by name, as they are now; empty before the first run. Not to be written to."""
        return dict(self.memory.states)

    @property
    def length(self) -> int:
        """How many tokens the session has seen, padding included."""
        return self.memory.length

    @property
    def time(self) -> TimeFeeds:
        """The inputs along time. Raises UsageError for a program that cannot be stepped."""
        if self._feeds is None:
            self._feeds = TimeFeeds(self.graph, self.plan if self.plan is not None else whole_plan(self.graph))
        return self._feeds

    def bandwidth(self) -> float | None:
        """Bytes a second that reading the memory of the program's device reaches; None for the processor's."""
        return self._main.executable.bandwidth()

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs by name, in the graph's order. Raises InputError for feeds that do not fit; a run that fails
        leaves the states as they were.

        For a program with a cache the feeds are those of the new tokens; inputs without time are remembered, so that
        they need to be given once. The inputs of an encoder half may be among them: then it is run first.
        """
        if self.plan is None:
            results, states = self._execute(self._main, check_feeds(self.graph, feeds), self.memory, {})
            self.memory = replace(self.memory, states=states)
            return results
        return self._advance(feeds)

    def prepare(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Runs the encoder half, of which all later steps read the states; gives its outputs. Raises UsageError when
        there is none, or when the session has seen tokens."""
        self.memory, results = self._prepared(self.memory, feeds)
        return results

    def step(self, ids: Any, feeds: Mapping[str, Any] | None = None) -> Array:
        """The logits after the last of the new tokens, [batch, vocabulary].

        ``ids`` are token ids [batch, n] or [n], n ≥ 1. ``feeds`` holds other inputs. What is left out: a mask is all
        ones, positions count the tokens that the mask shows (from 0), other inputs along time repeat their last
        entry, inputs without time stay what they were. Raises InputError.
        """
        new, given, time = token_array(ids), dict(feeds or {}), self.time
        time.check_ids(new)
        if time.rows is not None and time.rows != len(new):
            raise InputError(f"the program takes {time.rows} rows of token ids, and {len(new)} are given")
        if given:
            names = [*time.types, *(v.name for v in self._encoder_inputs)]
            unknown = sorted(set(given) - set(names))
            if unknown:
                raise InputError(f"no input is called {', '.join(unknown)}; the inputs are {', '.join(names)}")
            if time.ids.name in given:
                raise InputError(f"input {time.ids.name} is given twice: as ids and among the feeds")
        others = {name: value for name, value in given.items() if name not in time.timed}
        return self._logits(self._advance({**time.feeds(self.memory, new, given), **others}, last=True))

    def _advance(self, feeds: Mapping[str, Any], last: bool = False) -> dict[str, Array]:
        """Runs new tokens, and remembers them. With ``last`` only what follows the last of them is wanted."""
        time, memory, given = self.time, self.memory, dict(feeds)
        encoder = {v.name for v in self._encoder_inputs}
        if encoder & set(given):
            both = encoder | set(time.types)
            memory, _ = self._prepared(memory, {n: v for n, v in given.items() if n in both and n not in time.timed})
            given = {name: value for name, value in given.items() if name not in encoder}
        if self._prepare is not None and not memory.prepared:
            raise InputError(f"the encoder half has not run: give its inputs {', '.join(sorted(encoder))} first")
        arrays = check_feeds(self.graph, {**memory.kept, **given})
        count = time.new_tokens(memory, arrays)
        if count < 1:
            raise InputError(f"input {time.counted.name} holds no new token")
        self.check_room(count)
        results: dict[str, Array] = {}
        for part in time.parts(memory, arrays, self._chunk(count, last)):
            sizes = {time.plan.past: memory.length} if self.plan is not None else {}
            results, states = self._execute(self._main, part, memory, sizes)
            memory = time.remember(memory, part, states)
        self.memory = memory
        return results

    def _chunk(self, count: int, last: bool) -> int:
        """How many of ``count`` new tokens run at once."""
        chunk, plan = self.prefill_chunk, self.plan
        if chunk is None or plan is None or count <= chunk:
            return count
        only_last = {output.name for output in plan.outputs if output.last}
        return chunk if last or all(output.name in only_last for output in self.graph.outputs) else count

    def _execute(
        self, half: Half, arrays: Mapping[str, Array], memory: Memory, sizes: dict[str, int]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs, and the states as the run leaves them."""
        if not self._open[0]:
            raise UsageError("the session is closed")
        if self.batch is not None:
            self._check_batch(half.graph, arrays)
        return half.run(arrays, memory.states, sizes)

    def _prepared(self, memory: Memory, feeds: Mapping[str, Any]) -> tuple[Memory, dict[str, Array]]:
        if self._prepare is None:
            raise UsageError("the program has no encoder half that would be run first")
        if memory.length:
            raise UsageError(f"the session has seen {memory.length} tokens: reset() it before it gets another input")
        own = {v.name for v in self._prepare.graph.inputs}
        arrays = check_feeds(self._prepare.graph, {n: v for n, v in {**memory.kept, **feeds}.items() if n in own})
        results, states = self._execute(self._prepare, arrays, replace(memory, states={}), {})
        shared = {name: np.array(arrays[name]) for name in arrays if name in self.time.types}
        return replace(memory, states=states, kept={**memory.kept, **shared}, prepared=True), results

    def input_type(self, name: str) -> TensorType | None:
        """The type of an input of the program or its encoder half; None when neither has it."""
        return next((v.type for v in [*self.graph.inputs, *self._encoder_inputs] if v.name == name), None)

    @cached_property
    def _encoder_inputs(self) -> list[Value]:
        """The inputs that the encoder half alone has."""
        return [] if self._prepare is None else [v for v in self._prepare.graph.inputs if v.name not in self.time.types]

    @cached_property
    def logits_output(self) -> TimeOutput:
        """The output of logits [batch, n, vocabulary]: the one of that name, else that of the most words. Raises
        UsageError when there is none."""
        types = {output.name: output.value.type for output in self.graph.outputs}
        rank = len(self.time.types[self.time.ids.name].shape) + 1
        fitting = [o for o in self.time.plan.outputs if types[o.name].dtype.is_float and types[o.name].rank == rank]
        if not fitting:
            raise UsageError("the program has no output of logits [batch, n, vocabulary]: call session.run(feeds)")
        words = {o.name: d if isinstance(d := types[o.name].shape[-1], int) else 0 for o in fitting}
        return max(fitting, key=lambda o: (o.name == "logits", words[o.name]))

    def _logits(self, results: Mapping[str, Array]) -> Array:
        chosen = self.logits_output
        array = results[chosen.name]
        place: tuple[Any, ...] = (*(slice(None),) * chosen.axis, -1)
        last = array[place]
        if array.shape[chosen.axis] > 1:
            last = last.copy()  # so that the logits of the others go
        return np.asarray(last if last.ndim == 2 else last[None])

    def check_room(self, count: int) -> None:
        """Raises InputError when ``count`` more tokens are too many."""
        for limit, whose in (
            (self.time.plan.max_length, "that the model's table of positions holds"),
            (self.max_length, "of the option max_length"),
        ):
            if limit is not None and self.length + count > limit:
                seen = f"{self.length} tokens seen and {count} new ones" if self.length else f"{count} tokens"
                raise InputError(f"{seen} are more than the {limit} {whose}")

    def _check_batch(self, graph: Graph, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            type = next(v.type for v in graph.inputs if v.name == name)
            timed = self.time.timed.get(name)
            axis = self.time.batch_axis(type, timed.axis if timed else None)
            if axis is not None and axis < array.ndim and array.shape[axis] != self.batch:
                found = array.shape[axis]
                raise InputError(f"input {name} has {found} rows, and the session was made for {self.batch}")

    # -- generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        ids: Any,
        max_new_tokens: int = 64,
        feeds: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Stop = (),
        seed: int | None = None,
    ) -> Iterator[Any]:
        """Streams tokens: ints for one row (``ids`` [n] or [1, n]), for several a list with an int for each.

        The most probable token is taken unless ``temperature`` is above 0; see ``Sampling`` for the other numbers.
        ``seed`` makes the draws repeatable. A row ends with a stop token, or with the last of a sequence of them;
        that token is given, and None for the row from then on. The stream ends when all rows have.

        ``ids`` may be a list of rows of different lengths. They are padded on the left and masked where the plan
        says that this changes nothing; else rows of one length make a batch, and the batches take turns,
        each in a copy of the session. Either way every row gives what it gives alone.

        ``feeds`` are the program's other inputs, for the prompt: [batch, n] along time, the encoder's once. The
        session goes on from what it has seen. Afterwards it has seen all but the last token given; after batches
        that took turns, it is as before. Options and token ids are checked at once and raise UsageError or
        InputError; the feeds are checked when the first token is asked for, and a length above ``max_length``
        raises InputError when it is reached.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        return generate(self, ids, max_new_tokens, feeds or {}, sampling, stop, seed)

    def beam_search(
        self,
        ids: Any,
        beams: int = 4,
        max_new_tokens: int = 64,
        feeds: Mapping[str, Any] | None = None,
        length_penalty: float = 1.0,
        stop: Stop = (),
    ) -> list[Any]:
        """The best continuations found, best first: a list of ``Beam`` for one row, a list of such lists for several.

        At each step the ``beams`` most probable beginnings stay. A continuation ends with a stop token or after
        ``max_new_tokens``; its score is its log-probability divided by its length to the power ``length_penalty``
        (Wu et al. 2016 divide by ((5 + length) / 6)^α instead). The rows are searched in turn, in a copy of the
        session, which itself stays as it is.
        """
        return search(self, ids, beams, max_new_tokens, feeds or {}, length_penalty, stop)

    # -- the cache -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets what was seen: the next run is a first one."""
        self.memory = Memory()

    def clone(self) -> Session:
        """A session that has seen the same and goes its own way. It shares the program, not what it will remember;
        closing either frees the program for both."""
        copy = Session(self.graph, self._main.executable, plan=self.plan, prepare=self._prepare, batch=self.batch)
        copy.max_length, copy.prefill_chunk = self.max_length, self.prefill_chunk
        copy.memory, copy._feeds, copy._open = self.memory, self._feeds, self._open
        copy._main = self._main
        return copy

    def part(self, rows: Sequence[int], count: int) -> Session:
        """A clone for some of ``count`` rows, with what has been seen of them."""
        one = self.clone()
        one.batch = None
        if one._rows() is not None and list(rows) != list(range(count)):
            one.reorder(rows)
        return one

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row k what row ``rows[k]`` was; rows may be left out or repeated, also to other numbers of rows.
        Raises InputError for a row that is not there."""
        chosen = [int(row) for row in rows]
        memory, time = self.memory, self.time
        if self.batch is not None and len(chosen) != self.batch:
            raise InputError(f"{len(chosen)} rows are given, and the session was made for {self.batch}")
        if not chosen:
            raise InputError("no row is given")
        axes = {state.name: state.batch_axis for state in time.plan.states}
        count = self._rows()
        wrong = [row for row in chosen if not 0 <= row < (count if count is not None else 0)]
        if wrong:
            raise InputError(f"there is no row {wrong[0]}: the session has {count or 'no'} rows")
        if time.rows is not None and len(chosen) != time.rows:
            raise InputError(f"the program takes {time.rows} rows, and {len(chosen)} are given")
        if chosen == list(range(count or 0)):
            return
        states = {name: take(array, axes.get(name), chosen) for name, array in memory.states.items()}
        seen, kept = time.reordered(memory, chosen)
        self.memory = replace(memory, states=states, seen=seen, kept=kept)

    def _rows(self) -> int | None:
        """How many rows have been seen, None before the first run."""
        memory, time = self.memory, self.time
        axes = {state.name: state.batch_axis for state in time.plan.states}
        for name, array in memory.states.items():
            axis = axes.get(name)
            if axis is not None:
                return int(array.shape[axis])
        for name, array in {**memory.seen, **memory.kept}.items():
            axis = time.batch_axis_of(name)
            if axis is not None:
                return int(array.shape[axis])
        return 1 if memory.length else None

    def truncate(self, length: int) -> None:
        """Goes back to the first ``length`` tokens. Raises UsageError, and leaves the session as it is, when a state
        cannot go back: a running sum, a hidden state, rows of a convolution, or a ring that has dropped what it would
        need. Going back to 0 is always possible and keeps the encoder's results."""
        memory, time = self.memory, self.time
        if isinstance(length, bool) or not 0 <= length <= memory.length:
            raise UsageError(f"the session has seen {memory.length} tokens: it cannot be truncated to {length}")
        if length == memory.length:
            return
        plans = {state.name: state for state in time.plan.states}
        states = {}
        for name, array in memory.states.items():
            found = truncated(plans[name], array, memory.length, length) if name in plans else array
            if found is not None:
                states[name] = found
        self.memory = replace(memory, states=states, seen=time.truncated(memory, length), length=length)

    # -- closing ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees what the session holds. Closing twice is allowed."""
        was_open, self._open[0] = self._open[0], False
        self.memory = Memory()
        if was_open:
            self._main.executable.close()
            if self._prepare is not None:
                self._prepare.executable.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _width(type: TensorType) -> int:
    """The last axis, where it is a number."""
    return type.shape[-1] if isinstance(type.shape[-1], int) else 0
