"""Norms taken apart, variances by moments, norms per head and in groups; and what is no norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol, verify
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_norm import fuse_norm

B, N, D = symbol("batch"), symbol("seq"), 8
RNG = np.random.default_rng(5)
GAMMA, BETA = RNG.normal(size=D), RNG.normal(size=D)
EPS = 1e-5


def fused(make: Callable[[Builder, Value], Value], shape: tuple[Any, ...] = (B, N, D)) -> tuple[Graph, PassResult]:
    """A graph after the pass, whose float64 results equal those before."""
    graph = Graph()
    b = Builder(graph, "form")
    graph.add_output(make(b, graph.add_input("x", TensorType(DType.FLOAT64, shape))), "y")
    canonicalise(graph)
    before = graph.copy()
    result = fuse_norm(graph)
    verify(graph)
    for seq in (1, 5):
        sizes = graph.inputs[0].type.concrete({"batch": 2, "seq": seq})
        x = 1 + 2 * np.random.default_rng(seq).normal(size=sizes)
        want, found = (evaluate(g, {"x": x}, precision=DType.FLOAT64)["y"] for g in (before, graph))
        assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()
    canonicalise(graph)
    return graph, result


def average(b: Builder, x: Value, axes: tuple[int, ...] = (-1,)) -> Value:
    return b("reduce_mean", x, axes=axes, keepdims=True)


def variance(b: Builder, x: Value, how: str) -> Value:
    mean = average(b, x)
    if how == "deviation":
        z = b.sub(x, mean)
        return average(b, b.mul(z, z))
    moments = b.sub(average(b, b.mul(x, x)), b("pow", mean, 2.0) if how == "pow" else b.mul(mean, mean))
    return b("max", moments, 0.0) if how == "bounded" else b("relu", moments) if how == "relu" else moments


VARIANCES = ("deviation", "moments", "pow", "bounded", "relu")


@pytest.mark.parametrize("how", VARIANCES)
@pytest.mark.parametrize("form", ["plain", "apart", "apart without bias", "apart without weight", "difference"])
def test_variances_and_products_taken_apart(form: str, how: str) -> None:
    def make(b: Builder, x: Value) -> Value:
        mean, gamma, beta = average(b, x), b.constant(GAMMA), b.constant(BETA)
        r = b("reciprocal", b("sqrt", b.add(variance(b, x, how), EPS)))
        if form == "plain":
            return b.add(b.mul(b.mul(b.sub(x, mean), r), gamma), beta)
        if form != "apart without weight":
            r = b.mul(r, gamma)
        if form == "apart without bias":
            return b.sub(b.mul(x, r), b.mul(r, mean))
        if form == "difference":
            return b.add(b.sub(b.mul(x, r), b.mul(mean, r)), beta)
        return b.add(b.mul(x, r), b.sub(beta, b.mul(mean, r)))

    graph, result = fused(make)
    assert graph.operator_counts() == {"layer_norm": 1}
    (node,) = graph.nodes
    given = [None if v is None else v.constant for v in node.inputs[1:]] + [None] * (3 - len(node.inputs))
    has = [constant is not None for constant in given]
    assert has == [form != "apart without weight", form != "apart without bias"]
    assert not result.refusals
    assert any("E[x²] - E[x]²" in note for note in result.notes) == (how != "deviation")


def test_moments_are_taken_where_the_mean_is_large() -> None:
    """The fused operator is right where E[x²] - E[x]² has lost every digit."""
    graph = Graph()
    b = Builder(graph, "form")
    x = graph.add_input("x", TensorType(DType.FLOAT64, (D,)))
    centred = b.sub(x, average(b, x))
    graph.add_output(b.div(centred, b("sqrt", b.add(variance(b, x, "bounded"), EPS))), "y")
    assert fuse_norm(graph).changed
    small = np.arange(8.0) / 8
    given = {"x": small + 2.0**30}
    want = (small - small.mean()) / np.sqrt(small.var() + EPS)
    np.testing.assert_allclose(evaluate(graph, given)["y"], want, rtol=1e-12)


def refused(make: Callable[[Builder, Value], Value], reason: str, shape: tuple[Any, ...] = (B, N, D)) -> None:
    graph, result = fused(make, shape)
    assert not result.changed
    assert not {"layer_norm", "rms_norm"} & set(graph.operator_counts())
    assert [r.reason for r in result.refusals if reason in r.reason], result.refusals
    assert all(r.node == "form" for r in result.refusals)


def test_eps_outside_of_the_root() -> None:
    def make(b: Builder, x: Value) -> Value:
        z = b.sub(x, average(b, x))
        return b.div(z, b.add(b("sqrt", average(b, b.mul(z, z))), 1e-3))

    refused(make, "add changes the root itself")


def test_a_variance_of_n_minus_1() -> None:
    def make(b: Builder, x: Value) -> Value:
        z = b.sub(x, average(b, x))
        total = b("reduce_sum", b.mul(z, z), axes=(-1,), keepdims=True)
        return b.div(z, b("sqrt", b.add(b.div(total, D - 1.0), EPS)))

    refused(make, "divided by 7, which does not make it the mean")


def test_another_mean_is_taken_off() -> None:
    def make(b: Builder, x: Value) -> Value:
        z = b.sub(x, average(b, x, (1,)))
        root = b("sqrt", b.add(variance(b, x, "moments"), EPS))
        return b.div(z, root)

    refused(make, "is divided by the root of the mean square of the deviation of")


def test_moments_of_two_tensors() -> None:
    def make(b: Builder, x: Value) -> Value:
        other = b("tanh", x)
        square = b.sub(average(b, b.mul(x, x)), b("pow", average(b, other), 2.0))
        return b.div(b.sub(x, average(b, x)), b("sqrt", b.add(b("abs", square), EPS)))

    graph, result = fused(make)
    assert not result.changed
    assert "layer_norm" not in graph.operator_counts()


@pytest.mark.parametrize("wrong", ["other root", "other mean", "sum", "activation"])
def test_taken_apart_in_a_wrong_way(wrong: str) -> None:
    def make(b: Builder, x: Value) -> Value:
        mean = average(b, x)
        r = b("reciprocal", b("sqrt", b.add(variance(b, x, "deviation"), EPS)))
        gamma, beta = b.constant(GAMMA), b.constant(BETA)
        r = b.mul(r, gamma)
        mean = average(b, b("abs", x)) if wrong == "other mean" else mean
        shift = b.mul(mean, b.mul(r, 1.5) if wrong == "other root" else r)
        if wrong == "sum":
            return b.add(b.mul(x, r), b.add(beta, shift))
        if wrong == "activation":  # what is added is no parameter
            beta = b("tanh", x)
        return b.add(b.mul(x, r), b.sub(beta, shift))

    graph, result = fused(make)
    assert not result.changed
    assert result.refusals
    assert "layer_norm" not in graph.operator_counts()


def test_a_norm_per_head() -> None:
    def make(b: Builder, x: Value) -> Value:
        q = b.reshape(x, [B, N, 2, 4])
        y = b.div(q, b("sqrt", b.add(average(b, b.mul(q, q)), EPS)))
        return b.transpose(b.mul(b.add(b.constant(GAMMA[:4]), 1.0), y), [0, 2, 1, 3])

    graph, _ = fused(make)
    assert graph.operator_counts() == {"reshape": 1, "rms_norm": 1, "transpose": 1}


def test_a_group_norm_is_no_layer_norm_with_its_weight() -> None:
    """Groups of channels are normalised on their own axes, where the operator stands for the plain normalisation; the
    weight of each channel stays outside, for it is none over these axes."""

    def make(b: Builder, x: Value) -> Value:  # x [b, 8 channels, n], 2 groups
        groups = b.reshape(x, [B, 2, 4 * N])
        z = b.sub(groups, average(b, groups))
        y = b.div(z, b("sqrt", b.add(average(b, b.mul(z, z)), EPS)))
        y = b.reshape(y, [B, D, N])
        return b.add(b.mul(y, b.constant(GAMMA[:, None])), b.constant(BETA[:, None]))

    graph, _ = fused(make, (B, D, N))
    assert graph.operator_counts() == {"reshape": 2, "layer_norm": 1, "mul": 1, "add": 1}
    (node,) = [n for n in graph.nodes if n.op.name == "layer_norm"]
    assert len(node.operands) == 1


def test_a_weight_of_each_group_stays_outside() -> None:
    def make(b: Builder, x: Value) -> Value:  # x [b, 2 groups, 4 channels, n]
        z = b.sub(x, average(b, x, (2, 3)))
        y = b.div(z, b("sqrt", b.add(average(b, b.mul(z, z), (2, 3)), EPS)))
        return b.mul(y, b.constant(GAMMA.reshape(1, 2, 4, 1)))

    graph, _ = fused(make, (B, 2, 4, N))
    assert graph.operator_counts() == {"layer_norm": 1, "mul": 1}
