"""Mixtures of experts against loops over tokens in float64, and what checkpoints need of a model."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.frontends.api import (
    Model,
    Tensor,
    dense,
    embedding,
    gather,
    layer_normed,
    learned_positions,
    mixture_of_experts,
    rms_normed,
    rope,
    routing,
    scaled_dot,
)
from attnc.frontends.api import attention as attend
from attnc.frontends.api.positions import Rope, rope_frequencies, yarn_scaling
from attnc.ir import Array, ModelError, evaluate
from attnc.passes.insert_cache import insert_cache

RNG = np.random.default_rng(11)
X = RNG.normal(size=(2, 5, 4))
WEIGHTS: dict[str, Array] = {
    "moe.gate.weight": RNG.normal(size=(4, 3)),
    "moe.experts.gate.weight": RNG.normal(size=(3, 4, 6)),
    "moe.experts.up.weight": RNG.normal(size=(3, 4, 6)),
    "moe.experts.down.weight": RNG.normal(size=(3, 6, 4)),
}


def mixed(x: Array, used: int, normalise: bool) -> Array:
    """The same token by token, with only the experts that are used."""
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape[:2]):
        scores = np.exp(x[place] @ WEIGHTS["moe.gate.weight"])
        scores /= scores.sum()
        best = sorted(range(3), key=lambda e: -scores[e])[:used]
        total = sum(scores[e] for e in best) if normalise else 1.0
        for e in best:
            gate = x[place] @ WEIGHTS["moe.experts.gate.weight"][e]
            inner = gate / (1 + np.exp(-gate)) * (x[place] @ WEIGHTS["moe.experts.up.weight"][e])
            out[place] += scores[e] / total * (inner @ WEIGHTS["moe.experts.down.weight"][e])
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("used", [1, 2, 3])
def test_mixture_of_experts(used: int, normalise: bool, transposed: bool) -> None:
    weights = {name: np.swapaxes(array, -1, -2) if transposed else array for name, array in WEIGHTS.items()}
    m = Model("mixture", weights, dtype="float64", transposed=transposed)
    x = m.input("x", "float64", ["batch", "seq", 4])
    m.output("y", mixture_of_experts(x, 6, experts=3, used=used, normalise=normalise))
    found = evaluate(m.graph, {"x": X})["y"]
    np.testing.assert_allclose(found, mixed(X, used, normalise), rtol=0, atol=1e-12)


def test_routing_takes_the_best() -> None:
    m = Model("routing", dtype="float64")
    scores = m.input("scores", "float64", ["batch", "seq", 3])
    for name, normalise in (("shares", True), ("softmax", False)):
        places, shares = routing(scores, 2, normalise)
        m.output(f"{name}_places", places)
        m.output(name, shares)
    given = np.log([[[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]]])
    found = evaluate(m.graph, {"scores": given})
    np.testing.assert_allclose(found["shares"], [[[0.625, 0.375], [2 / 3, 1 / 3]]], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["softmax"], [[[0.5, 0.3], [0.6, 0.3]]], rtol=0, atol=1e-12)
    assert found["shares_places"].tolist() == found["softmax_places"].tolist() == [[[0, 2], [1, 2]]]


def test_each_token_keeps_to_itself() -> None:
    """So that the time analysis proves a cache."""
    m = Model("mixture", WEIGHTS)
    x = m.input("x", "float32", ["batch", "seq", 4])
    m.output("y", mixture_of_experts(x, 6, experts=3, used=2))
    assert not insert_cache(m.graph).step.states


def test_weights_of_a_checkpoint() -> None:
    """Matrices of layers that multiply are [out, in], tables are as they are; nothing is copied."""
    stored = {
        "up.weight": RNG.normal(size=(3, 4)),
        "up.bias": RNG.normal(size=3),
        "table.weight": RNG.normal(size=(9, 4)),
    }
    asked: list[tuple[str, tuple[int, ...]]] = []

    def weights(name: str, shape: tuple[int, ...]) -> Array:
        asked.append((name, shape))
        return stored[name]

    m = Model("checkpoint", weights, dtype="float64", transposed=True, lines=False)
    ids = m.input("ids", "int64", ["batch", "seq"])
    with m.scope(""):
        y = dense(embedding(ids, 9, 4, "table"), 3, "up").named("y")
    m.output("out", y)
    assert asked == [("table.weight", (9, 4)), ("up.weight", (3, 4)), ("up.bias", (3,))]
    given = np.array([[1, 8, 0]])
    found = evaluate(m.graph, {"ids": given})["out"]
    wanted = stored["table.weight"][given] @ stored["up.weight"].T + stored["up.bias"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    matrix = next(value.constant for value in m.graph.constants if value.name == "up.weight")
    assert matrix is not None
    assert np.shares_memory(matrix.array, stored["up.weight"])
    assert y.name == "y"
    assert {node.source for node in m.graph.nodes} == {""}


def test_wrong_shapes_are_told_as_they_are_stored() -> None:
    m = Model("wrong", {"up.weight": np.zeros((4, 3)), "up.bias": np.zeros(3)}, transposed=True)
    x = m.input("x", "float32", ["n", 4])
    with pytest.raises(ModelError, match=r"the weight up\.weight is \[4, 3\], not \[3, 4\]"):
        dense(x, 3, "up")


def output(build: object, weights: dict[str, Array] | None = None) -> Array:
    m = Model("one", weights, dtype="float64")
    x = m.input("x", "float64", ["batch", "seq", 4])
    m.output("y", build(x))  # type: ignore[operator]
    return evaluate(m.graph, {"x": X})["y"]


def test_norms_that_store_what_is_above_one_or_no_bias() -> None:
    scale = RNG.normal(size=4)
    found = output(lambda x: rms_normed(x, "norm", 1e-6, offset=1.0), {"norm.weight": scale})
    np.testing.assert_allclose(found, X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale), atol=1e-12)
    found = output(lambda x: layer_normed(x, "norm", 1e-5, bias=False), {"norm.weight": scale})
    centred = X - X.mean(-1, keepdims=True)
    np.testing.assert_allclose(
        found, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale, atol=1e-12
    )


def test_learned_positions_that_begin_later() -> None:
    table = RNG.normal(size=(9, 4))
    found = output(lambda x: learned_positions(x, 9, "wpe", start=2), {"wpe.weight": table})
    np.testing.assert_allclose(found, X + table[2:7], atol=1e-12)


def test_initial_values() -> None:
    m = Model("initial")
    ids = m.input("ids", "int64", ["n"])
    m.output("y", dense(embedding(ids, 3, 4, "table", init="ones"), 2, "up", init="zeros"))
    values = {value.name: value.constant.array for value in m.graph.constants if value.constant is not None}
    assert (values["table.weight"] == 1).all()
    assert (values["up.weight"] == 0).all()


def test_another_scale_than_one_by_the_root() -> None:
    def build(x: Tensor) -> Tensor:
        return attend(x, x, x, score=scaled_dot(0.25))

    weights = np.exp(0.25 * X @ X.swapaxes(1, 2))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(output(build), weights @ X, atol=1e-12)


def test_frequencies_that_the_model_computes() -> None:
    def build(x: Tensor) -> Tensor:
        m = x.model
        y = x.reshape(x.shape[0], 1, x.shape[1], 4)
        slowed = gather(m.constant(np.array([[0.5, 0.25], [1.0, 2.0]])), m.constant(np.array(0)))
        return rope(y, Rope(rope_frequencies(4), computed=slowed))

    def plain(x: Tensor) -> Tensor:
        return rope(x.reshape(x.shape[0], 1, x.shape[1], 4), Rope(np.array([0.5, 0.25])))

    np.testing.assert_allclose(output(build), output(plain), atol=1e-12)


def test_yarn_between_pairs() -> None:
    """Worked by hand: theta = e², 8 features, so that a pair that turns t times in 2π·e is 4 ln(e/t) / 2."""

    def ramp(whole: bool) -> Array:
        scaling = yarn_scaling(2.0, round(2 * np.pi * np.e), fast=np.e**0.25, slow=np.e**-0.25, whole=whole)
        plain = rope_frequencies(8, np.e**2)
        how = scaling(Rope(plain), np.e**2)
        return np.asarray(2 - 2 * how.frequencies / plain)  # 0: kept, 1: slowed by the factor

    first, last = (2 * np.log(17 / (2 * np.pi) / t) for t in (np.e**0.25, np.e**-0.25))
    np.testing.assert_allclose(ramp(False), np.clip((np.arange(4) - first) / (last - first), 0, 1), atol=1e-12)
    np.testing.assert_allclose(ramp(True), np.clip((np.arange(4) - 1) / 2, 0, 1), atol=1e-12)
