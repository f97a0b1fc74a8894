"""A model run step by step beside the same model over all tokens, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnc.ir import Builder, Dim, DType, Graph, TensorType, Value, evaluate, parse, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.causal_forms import causal_forms
from attnc.passes.insert_cache import CachedGraphs, insert_cache

Array = NDArray[Any]


def cached(graph: Graph, **options: Any) -> CachedGraphs:
    """The step of a graph, verified before and after tidying, and as text. The graph itself stays as it is."""
    prepared = causal_forms(graph.copy()).graph
    verify(prepared, after="causal-forms")
    found = insert_cache(prepared, **options)
    for half in (found.step, found.prepare):
        if half is not None:
            verify(half, after="insert-cache")
            canonicalise(half)
            verify(half, after="tidy-cache")
            assert str(parse(str(half))) == str(half)
    return found


def run_steps(found: CachedGraphs, feeds: Mapping[str, Array], splits: Sequence[int]) -> list[dict[str, Array]]:
    """The outputs of each step, for as many new tokens each as ``splits`` says."""
    states: dict[str, Array] = {}
    if found.prepare is not None:
        own = {v.name: feeds[v.name] for v in found.prepare.inputs}
        evaluate(found.prepare, own, states=states, precision=DType.FLOAT64)
    results = []
    at = 0
    for n in splits:
        given = {v.name: feeds[v.name] for v in found.step.inputs}
        for timed in found.plan.inputs:
            start = 0 if timed.whole else at
            given[timed.name] = np.take(feeds[timed.name], range(start, at + n), axis=timed.axis)
        states = dict(states)
        results.append(evaluate(found.step, given, states=states, precision=DType.FLOAT64))
        at += n
    return results


def compare(graph: Graph, feeds: Mapping[str, Array], splits: Sequence[int], **options: Any) -> CachedGraphs:
    """Checks every output of the step, at all new tokens, with the full model's, and that the full model's do not
    change when tokens are added. Returns the cached graphs."""
    found = cached(graph, all_logits=True, **options)
    want = evaluate(graph, feeds, precision=DType.FLOAT64)
    steps = run_steps(found, feeds, splits)
    along = {o.name: o.axis for o in found.plan.outputs}
    for name, whole in want.items():
        got = [step[name] for step in steps]
        same(np.concatenate(got, axis=along[name]) if name in along else got[-1], whole)
    if splits[0] < sum(splits):
        axes = {t.name: t.axis for t in found.plan.inputs}
        first = {n: np.take(x, range(splits[0]), axis=axes[n]) if n in axes else x for n, x in feeds.items()}
        for name, begun in evaluate(causal_forms(graph.copy()).graph, first, precision=DType.FLOAT64).items():
            same(begun, np.take(want[name], range(splits[0]), axis=along[name]) if name in along else steps[0][name])
    last = run_steps(cached(graph, **options), feeds, splits)[-1]
    for name, whole in want.items():
        end = [whole.shape[along[name]] - 1] if name in along else None
        same(last[name], whole if end is None else np.take(whole, end, axis=along[name]))
    return found


def same(got: Array, want: Array) -> None:
    """Equality but for the last bits of float64."""
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11 * max(1.0, float(np.abs(want).max())))


SPLITS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
"""Numbers of new tokens, step by step."""


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def takes(*names: Dim) -> tuple[Graph, Value, Builder]:
    """A graph with one float32 input x of this shape."""
    graph = Graph("model")
    return graph, graph.add_input("x", TensorType(DType.FLOAT32, names)), Builder(graph)
