"""What the inputs of a program's products are like on a text: for rounding weights with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..backends.base import Executable
from ..ir import Graph, InputError, Node, UsageError, Value, evaluate
from ..ir.cacheplan import CachePlan
from ..ir.evaluate import Observer
from ..ir.operator import Array
from .perplexity import random_context
from .session import Session
from .words import Words

__all__ = ["MOST_TOKENS", "calibration_ids", "second_moments"]

MOST_TOKENS = 2048
"""So many tokens of a text are read."""

_ROW = 256
"""The tokens of one run, each run from the beginning."""


def calibration_ids(text: str | os.PathLike[str] | Sequence[int], words: Words | None) -> list[int]:
    """The first ``MOST_TOKENS`` token ids of a text file, or the ids given. Raises UsageError without a tokenizer and
    InputError for a file that cannot be read or has too few tokens."""
    if isinstance(text, str | os.PathLike):
        if words is None:
            raise UsageError(f"{os.fspath(text)}: a text takes the model's tokenizer; name it with --tokenizer")
        try:
            ids = list(words.encode(Path(text).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{os.fspath(text)}: cannot be read as text: {error}") from error
    else:
        ids = [int(token) for token in text]
    if len(ids) < 2:
        raise InputError("a text to calibrate with needs two tokens or more")
    return ids[:MOST_TOKENS]


def second_moments(graph: Graph, plan: CachePlan | None, ids: Sequence[int]) -> dict[Value, Array]:
    """For every value that meets stored weights in a product, the mean of x xᵀ over the tokens, float32[k, k].

    The graph is evaluated in NumPy. Raises UsageError for a graph that takes no token ids.
    """
    wanted = {v for node in graph.walk() if node.op.name == "matmul" for v in node.operands[:1] if v.constant is None}
    sums: dict[Value, Array] = {}
    seen: dict[Value, int] = {}

    def observer(node: Node, results: Sequence[Array]) -> None:
        for value, array in zip(node.outputs, results, strict=True):
            if value in wanted and array.dtype.kind == "f" and array.ndim > 1:
                x = array.reshape(-1, array.shape[-1]).astype(np.float32)
                sums[value] = sums.get(value, np.float32(0)) + x.T @ x
                seen[value] = seen.get(value, 0) + len(x)

    session = Session(graph, _Observed(graph, observer), plan=plan)
    time = session.time
    row = np.asarray(ids, np.int64)
    _, others = random_context(graph, time, min(_ROW, row.size), 0)
    own = {name: value for name, value in others.items() if session.input_type(name) is not None}
    length = _ROW if time.plan.max_length is None else min(_ROW, time.plan.max_length)
    for start in range(0, row.size, length):
        session.reset()
        session.step(row[None, start : start + length], own)
    return {value: total / seen[value] for value, total in sums.items()}


class _Observed(Executable):
    """A graph in NumPy, every node watched."""

    def __init__(self, graph: Graph, observer: Observer) -> None:
        self._graph = graph
        self._observer = observer

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        return evaluate(self._graph, feeds, None, states, self._observer)
