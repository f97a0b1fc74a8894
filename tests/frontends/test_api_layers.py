"""Layers of the graph API against their formulas in plain loops or float64 NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnc.frontends.api import (
    Tensor,
    dense,
    embedding,
    ffn,
    gated_ffn,
    gru,
    gru_cell,
    layer_norm,
    layer_normed,
    linear,
    lstm,
    parallel_block,
    post_norm,
    pre_norm,
    rms_norm,
    rms_normed,
    scan,
)
from attnc.ir import Array
from attnc.tests.frontends.reference import DTYPES, Case, draw

X = draw(2, 3, 4)


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def x_of(case: Case) -> Tensor:
    return case.input("x", X, ["batch", "n", 4])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.reshape(-1)]).reshape(x.shape)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


# -- projections and tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_dense(case: Case, bias: bool) -> None:
    w, b = draw(4, 5, seed=1), draw(5, seed=2)
    case.model.weights = {"up.weight": w, "up.bias": b}
    expected = np.zeros((2, 3, 5))
    for a, i, o in np.ndindex(2, 3, 5):
        expected[a, i, o] = sum(X[a, i, c] * w[c, o] for c in range(4)) + (b[o] if bias else 0)
    case.check((dense(x_of(case), 5, "up", bias), expected))
    assert set(case.model.parameters) == ({"up.weight", "up.bias"} if bias else {"up.weight"})


def test_linear(case: Case) -> None:
    w, b = draw(4, 5, seed=1), draw(5, seed=2)
    x, weight, bias = x_of(case), case.input("w", w), case.input("b", b)
    case.check((linear(x, weight), X @ w), (linear(x, weight, bias), X @ w + b))


def test_embedding_and_tied_head(case: Case) -> None:
    table, ids = draw(6, 4, seed=1), np.array([[5, 0, 0], [1, 2, 3]])
    case.model.weights = {"wte.weight": table}
    x = embedding(case.input("ids", ids, ["batch", "n"]), 6, 4, "wte")
    head = x @ case.model.parameter("wte.weight", (6, 4)).T
    case.check((x, table[ids]), (head, table[ids] @ table.T))
    assert len(case.model.parameters) == 1


# -- norms -----------------------------------------------------------------------------------------------------------


def published_layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    y = np.empty_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        row = x[at]
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        y[at] = (row - mean) / math.sqrt(variance + eps) * weight + bias
    return y


def published_rms_norm(x: Array, weight: Array, eps: float) -> Array:
    y = np.empty_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        y[at] = x[at] / math.sqrt(sum(v * v for v in x[at]) / x.shape[-1] + eps) * weight
    return y


def test_norms(case: Case) -> None:
    weight, bias, one, zero = draw(4, seed=1), draw(4, seed=2), np.ones(4), np.zeros(4)
    x, w, b = x_of(case), case.input("w", weight), case.input("b", bias)
    case.check(
        (layer_norm(x), published_layer_norm(X, one, zero, 1e-5)),
        (layer_norm(x, w), published_layer_norm(X, weight, zero, 1e-5)),
        (layer_norm(x, w, b, 0.1), published_layer_norm(X, weight, bias, 0.1)),
        (layer_norm(x, None, b), published_layer_norm(X, one, bias, 1e-5)),
        (rms_norm(x), published_rms_norm(X, one, 1e-6)),
        (rms_norm(x, w, 0.1), published_rms_norm(X, weight, 0.1)),
    )


def test_norms_with_weights_of_the_model(case: Case) -> None:
    weights = {"ln.weight": draw(4, seed=1), "ln.bias": draw(4, seed=2), "rms.weight": draw(4, seed=3)}
    case.model.weights = weights
    x = x_of(case)
    case.check(
        (layer_normed(x, "ln", 1e-3), published_layer_norm(X, weights["ln.weight"], weights["ln.bias"], 1e-3)),
        (rms_normed(x, "rms", 1e-3), published_rms_norm(X, weights["rms.weight"], 1e-3)),
    )


def test_fresh_norms_change_no_scale(case: Case) -> None:
    """Without weights the scale begins as 1 and the shift as 0."""
    x = x_of(case)
    y, z = case.run(layer_normed(x, "ln"), layer_norm(x))
    assert np.array_equal(y, z)


# -- feed-forward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_ffn(case: Case, activation: str, bias: bool) -> None:
    up, down, b1, b2 = draw(4, 6, seed=1), draw(6, 4, seed=2), draw(6, seed=3), draw(4, seed=4)
    case.model.weights = {"ffn.up.weight": up, "ffn.down.weight": down, "ffn.up.bias": b1, "ffn.down.bias": b2}
    inner = ACTIVATIONS[activation](X @ up + (b1 if bias else 0))
    case.check((ffn(x_of(case), 6, activation, bias), inner @ down + (b2 if bias else 0)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_ffn(case: Case, activation: str, bias: bool) -> None:
    gate, up, down = draw(4, 6, seed=1), draw(4, 6, seed=2), draw(6, 4, seed=3)
    b1, b2, b3 = draw(6, seed=4), draw(6, seed=5), draw(4, seed=6)
    case.model.weights = {
        "mlp.gate.weight": gate,
        "mlp.up.weight": up,
        "mlp.down.weight": down,
        "mlp.gate.bias": b1,
        "mlp.up.bias": b2,
        "mlp.down.bias": b3,
    }
    on = 1 if bias else 0
    expected = (ACTIVATIONS[activation](X @ gate + on * b1) * (X @ up + on * b2)) @ down + on * b3
    case.check((gated_ffn(x_of(case), 6, activation, bias, "mlp"), expected))


# -- residuals -------------------------------------------------------------------------------------------------------


def test_residual_forms(case: Case) -> None:
    x = x_of(case)

    def double(x: Any) -> Any:
        return 2.0 * x

    def square(x: Any) -> Any:
        return x * x

    def shift(x: Any) -> Any:
        return 3.0 * x + 1.0

    case.check(
        (pre_norm(x, shift, square), X + (3 * X + 1) ** 2),
        (post_norm(x, shift, square), 3 * (X + X**2) + 1),
        (parallel_block(x, shift, square, double), X + (3 * X + 1) ** 2 + 2 * (3 * X + 1)),
    )


# -- recurrent -------------------------------------------------------------------------------------------------------


def gru_step(x: Array, h: Array, w: Array, r: Array, b: Array) -> Array:
    """Cho et al. 2014, gates stacked as update, reset, new; b holds the biases of w, then those of r."""
    size = len(h)
    wz, wr, wn = w.reshape(3, size, -1)
    rz, rr, rn = r.reshape(3, size, size)
    wbz, wbr, wbn, rbz, rbr, rbn = b.reshape(6, size)
    z = sigmoid(wz @ x + rz @ h + wbz + rbz)
    reset = sigmoid(wr @ x + rr @ h + wbr + rbr)
    new = np.tanh(wn @ x + rn @ (reset * h) + wbn + rbn)
    return np.asarray((1 - z) * new + z * h)


def lstm_step(x: Array, h: Array, c: Array, w: Array, r: Array, b: Array) -> tuple[Array, Array]:
    """Hochreiter and Schmidhuber 1997, the forget gate of Gers et al. 2000; gates as input, output, forget, cell."""
    size = len(h)
    wi, wo, wf, wc = w.reshape(4, size, -1)
    ri, ro, rf, rc = r.reshape(4, size, size)
    bi, bo, bf, bc = b.reshape(2, 4, size).sum(0)
    cell = sigmoid(wf @ x + rf @ h + bf) * c + sigmoid(wi @ x + ri @ h + bi) * np.tanh(wc @ x + rc @ h + bc)
    return sigmoid(wo @ x + ro @ h + bo) * np.tanh(cell), cell


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent(case: Case, kind: str, direction: str) -> None:
    dirs, hidden, gates = 2 if direction == "bidirectional" else 1, 2, 3 if kind == "gru" else 4
    w, r = draw(dirs, gates * hidden, 4, seed=1), draw(dirs, gates * hidden, hidden, seed=2)
    b = draw(dirs, 2 * gates * hidden, seed=3)
    case.model.weights = {"rnn.w": w, "rnn.r": r, "rnn.b": b}
    results = (gru if kind == "gru" else lstm)(x_of(case), hidden, "rnn", direction)
    states, h, c = np.zeros((2, 3, dirs * hidden)), np.zeros((dirs, 2, hidden)), np.zeros((dirs, 2, hidden))
    for d, batch in np.ndindex(dirs, 2):
        backwards = direction == "reverse" or d == 1
        for t in reversed(range(3)) if backwards else range(3):
            if kind == "gru":
                h[d, batch] = gru_step(X[batch, t], h[d, batch], w[d], r[d], b[d])
            else:
                h[d, batch], c[d, batch] = lstm_step(X[batch, t], h[d, batch], c[d, batch], w[d], r[d], b[d])
            states[batch, t, d * hidden : (d + 1) * hidden] = h[d, batch]
    case.check(*zip(results, (states, h, c), strict=False))


def cell_by_hand(weights: dict[str, Array], x: Array, h: Array) -> Array:
    def gate(what: str, state: Array) -> Array:
        from_x = x @ weights[f"gru.x{what}.weight"] + weights[f"gru.x{what}.bias"]
        return np.asarray(from_x + state @ weights[f"gru.h{what}.weight"])

    z, reset = sigmoid(gate("z", h)), sigmoid(gate("r", h))
    return np.asarray((1 - z) * np.tanh(gate("n", reset * h)) + z * h)


def cell_weights() -> dict[str, Array]:
    weights = {}
    for n, what in enumerate("zrn"):
        weights[f"gru.x{what}.weight"] = draw(4, 3, seed=n)
        weights[f"gru.x{what}.bias"] = draw(3, seed=n)
        weights[f"gru.h{what}.weight"] = draw(3, 3, seed=10 + n)
    return weights


def test_gru_cell(case: Case) -> None:
    weights = cell_weights()
    case.model.weights = weights
    x, h = draw(2, 4), draw(2, 3)
    y = gru_cell(case.input("x", x), case.input("h", h))
    case.check((y, cell_by_hand(weights, x, h)))
    assert set(case.model.parameters) == set(weights)


def test_gru_cell_in_a_scan_is_a_gru(case: Case) -> None:
    """The parameters used within the loop are those of the model around it."""
    weights = cell_weights()
    case.model.weights = weights
    h = draw(2, 3, seed=5)

    def body(state: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        following = gru_cell(x, state)
        return [following], [following]

    (last,), (states,) = scan(body, [case.input("h", h, ["batch", 3])], [x_of(case)])
    expected = []
    for t in range(3):
        h = cell_by_hand(weights, X[:, t], h)
        expected.append(h)
    case.check((last, h), (states, np.stack(expected, 1)))
    assert set(case.model.parameters) == set(weights)
