"""The examples of the papers against the papers' equations, written in plain NumPy loops in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attnc
from attnc import DType, Graph, evaluate

Array = NDArray[Any]
Weights = Mapping[str, Array]
Example = Callable[[str], Mapping[str, Any]]


def drawn(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Random weights under the names of the graph's parameters. They are float32 numbers in float64, so that both sides
    compute with the same ones."""
    rng = np.random.default_rng(seed)
    parameters = {value.name: value.shape for value in graph.constants if "." in value.name}
    return {
        name: rng.normal(scale=0.5, size=shape).astype(np.float32).astype(float) for name, shape in parameters.items()
    }


def check(graph: Graph, feeds: Mapping[str, Array], wanted: Mapping[str, Array], exact: float = 1e-9) -> None:
    """The graph in float64, and what it is compiled to in float32, give what is wanted."""
    wide = evaluate(graph, feeds, DType.FLOAT64)
    assert set(wide) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(wide[name], array, rtol=exact, atol=exact, err_msg=name)
    for target in ("numpy", "ort-cpu"):
        results = attnc.compile(graph, target=target).session().run(feeds)
        for name, array in wanted.items():
            np.testing.assert_allclose(results[name], array, rtol=0, atol=1e-4, err_msg=f"{name} by {target}")


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def test_smoother_of_two_observations(example: Example) -> None:
    """Half way the mean; on the first observation the other weighs e^(-d²/2h²)."""
    feeds = {"points": np.array([[1.0], [0.0]], np.float32), "x": np.array([[0.0], [2.0]], np.float32)}
    feeds["y"] = np.array([[3.0], [7.0]], np.float32)
    far = np.exp(-(2.0**2) / (2 * 0.5**2))
    check(example("smoother_1964")["model"](0.5), feeds, {"estimates": np.array([[5.0], [(3 + 7 * far) / (1 + far)]])})


def gru_step(x: Array, h: Array, w: list[Array], u: list[Array], b: list[Array]) -> Array:
    """Cho et al. 2014; w, u and b are those of the update gate, the reset gate and the new state."""
    z, r = (sigmoid(x @ w[k] + h @ u[k] + b[k]) for k in (0, 1))
    return np.asarray(z * h + (1 - z) * np.tanh(x @ w[2] + (r * h) @ u[2] + b[2]))


def encoder_gru(xs: Array, weights: Weights, backwards: bool) -> Array:
    """All states of one direction; the weights are in ONNX's layout, gates one below the other."""
    d = int(backwards)
    w, u = (np.split(weights[f"encoder.gru.{name}"][d], 3) for name in "wr")
    hidden = u[0].shape[1]
    b = weights["encoder.gru.b"][d].reshape(6, hidden)
    h, states = np.zeros(hidden), []
    for x in xs[::-1] if backwards else xs:
        h = gru_step(x, h, [m.T for m in w], [m.T for m in u], list(b[:3] + b[3:]))
        states.append(h)
    return np.array(states[::-1] if backwards else states)


def bahdanau(weights: Weights, source: Array, start: int, steps: int) -> tuple[Array, Array, Array]:
    """One sentence: the alignment, the greedy words, their logits (Bahdanau, Cho and Bengio 2015, appendix A.2)."""
    xs = weights["encoder.embedding.weight"][source]
    forward, backward = (encoder_gru(xs, weights, backwards) for backwards in (False, True))
    h = np.concatenate([forward, backward], axis=1)
    s = np.tanh(backward[0] @ weights["decoder.start.weight"])
    cell = [
        [weights[f"decoder.gru.{kind}{gate}.{what}"] for gate in "zrn"]
        for kind, what in (("x", "weight"), ("h", "weight"), ("x", "bias"))
    ]
    y, alignments, words, all_logits = start, [], [], []
    for _ in range(steps):
        query = s @ weights["align.state.weight"] + weights["align.state.bias"]
        e = np.array([weights["align.v"] @ np.tanh(query + row @ weights["align.annotations.weight"]) for row in h])
        alpha = softmax(e)
        c = sum(a * row for a, row in zip(alpha, h, strict=True))
        previous = weights["decoder.embedding.weight"][y]
        t = np.concatenate([s, previous, c]) @ weights["out.deep.weight"] + weights["out.deep.bias"]
        logits = np.maximum(t[0::2], t[1::2]) @ weights["out.words.weight"]
        s = gru_step(np.concatenate([previous, c]), s, *cell)
        y = int(logits.argmax())
        alignments.append(alpha)
        words.append(y)
        all_logits.append(logits)
    return np.array(alignments), np.array(words), np.array(all_logits)


def test_bahdanau(example: Example) -> None:
    made = example("bahdanau_2015")
    weights = drawn(made["model"]())
    graph = made["model"](weights, steps=6)
    source = np.random.default_rng(1).integers(0, made["WORDS"], (3, 5))
    rows = [bahdanau(weights, row, made["FRENCH"].index("<s>"), 6) for row in source]
    alignment, words, logits = (np.stack(part) for part in zip(*rows, strict=True))
    check(graph, {"source": source}, {"alignment": alignment, "words": words, "logits": logits})
    np.testing.assert_allclose(alignment.sum(-1), 1)


def test_bahdanau_by_hand_translates_backwards(example: Example) -> None:
    """Any sentence of one to five words comes out in reverse, and then the end."""
    made = example("bahdanau_2015")
    graph = made["model"](steps=6)
    rng = np.random.default_rng(0)
    for length in range(1, 6):
        sentence = rng.integers(2, made["WORDS"], length)
        words = evaluate(graph, {"source": np.array([[0, *sentence, 1]])})["words"][0]
        assert words[: length + 1].tolist() == [*sentence[::-1], 0]


def lstm_step(x: Array, h: Array, c: Array, weights: Weights, name: str) -> tuple[Array, Array]:
    both = np.concatenate([x, h])
    i, f, o, g = (both @ weights[f"{name}.{gate}.weight"] + weights[f"{name}.{gate}.bias"] for gate in "ifog")
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def luong(weights: Weights, score: str, source: Array, target: Array) -> tuple[Array, Array]:
    """One sentence without padding: the alignment and the log-probabilities (Luong, Pham and Manning 2015)."""
    hidden = weights["out.weight"].shape[0]
    h, c, states = np.zeros(hidden), np.zeros(hidden), []
    for word in source:
        h, c = lstm_step(weights["encoder.embedding.weight"][word], h, c, weights, "encoder")
        states.append(h)
    scores: dict[str, Callable[[Array, Array], Any]] = {
        "dot": lambda h, s: h @ s,
        "general": lambda h, s: h @ weights["score.w"] @ s,
        "concat": lambda h, s: (
            weights["score.v"]
            @ np.tanh(np.concatenate([h, s]) @ np.concatenate([weights["score.w_target"], weights["score.w_source"]]))
        ),
    }
    fed, alignments, rows = np.zeros(hidden), [], []
    for word in target:
        h, c = lstm_step(np.concatenate([weights["decoder.embedding.weight"][word], fed]), h, c, weights, "decoder")
        a = softmax(np.array([scores[score](h, s) for s in states]))
        fed = np.tanh(np.concatenate([a @ np.array(states), h]) @ weights["attentional.weight"])
        alignments.append(a)
        rows.append(np.log(softmax(fed @ weights["out.weight"])))
    return np.array(alignments), np.array(rows)


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_luong(example: Example, score: str) -> None:
    made = example("luong_2015")
    weights = drawn(made["model"](score))
    rng = np.random.default_rng(2)
    source, target, lengths = rng.integers(0, 7, (2, 5)), rng.integers(0, 7, (2, 3)), np.array([5, 3])
    alignment, log_p = np.zeros((2, 3, 5)), np.zeros((2, 3, 7))
    for row, length in enumerate(lengths):
        alignment[row, :, :length], log_p[row] = luong(weights, score, source[row, :length], target[row])
    graph = made["model"](score, weights)
    check(graph, {"source": source, "lengths": lengths, "target": target}, {"alignment": alignment, "log_p": log_p})


def positions(length: int, width: int) -> Array:
    """Vaswani et al. 2017, section 3.5, entry by entry."""
    table = np.zeros((length, width))
    for p in range(length):
        for k in range(width // 2):
            table[p, 2 * k] = np.sin(p / 10000 ** (2 * k / width))
            table[p, 2 * k + 1] = np.cos(p / 10000 ** (2 * k / width))
    return table


class Reference:
    """The Transformer for one sentence without padding, head by head."""

    def __init__(self, weights: Weights, heads: int, layers: int) -> None:
        self.weights, self.heads, self.layers = weights, heads, layers

    def linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def add_and_norm(self, x: Array, y: Array, name: str) -> Array:
        z = x + y
        z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        return np.asarray(z * self.weights[f"{name}.norm.weight"] + self.weights[f"{name}.norm.bias"])

    def attend(self, x: Array, memory: Array, name: str, causal: bool = False) -> Array:
        q, k, v = (
            self.linear(source, f"{name}.{what}") for source, what in ((x, "query"), (memory, "key"), (memory, "value"))
        )
        width = q.shape[1] // self.heads
        found = []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / np.sqrt(width)
            if causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            found.append(softmax(scores) @ v[:, part])
        return self.add_and_norm(x, self.linear(np.concatenate(found, axis=1), f"{name}.out"), name)

    def feed_forward(self, x: Array, name: str) -> Array:
        return self.add_and_norm(x, self.linear(np.maximum(self.linear(x, f"{name}.up"), 0), f"{name}.down"), name)

    def embed(self, ids: Array) -> Array:
        table = self.weights["embedding.weight"]
        return np.asarray(table[ids] * np.sqrt(table.shape[1]) + positions(len(ids), table.shape[1]))

    def logits(self, source: Array, target: Array) -> Array:
        x, y = self.embed(source), self.embed(target)
        for layer in range(self.layers):
            x = self.feed_forward(self.attend(x, x, f"encoder.{layer}.attn"), f"encoder.{layer}.ffn")
        for layer in range(self.layers):
            y = self.attend(y, y, f"decoder.{layer}.attn", causal=True)
            y = self.feed_forward(self.attend(y, x, f"decoder.{layer}.cross"), f"decoder.{layer}.ffn")
        return np.asarray(y @ self.weights["embedding.weight"].T)


def test_transformer(example: Example) -> None:
    made = example("transformer_2017")
    config = made["TINY"]
    weights = drawn(made["model"](config))
    reference = Reference(weights, config.heads, config.layers)
    rng = np.random.default_rng(3)
    source, target, lengths = rng.integers(0, 50, (2, 6)), rng.integers(0, 50, (2, 4)), np.array([4, 6])
    logits = np.stack([reference.logits(source[k, : lengths[k]], target[k]) for k in range(2)])
    graph = made["model"](config, weights)
    feeds = {"source": source, "lengths": lengths, "target": target}
    # The graph's constants sqrt(d_model) and 10000^(-2k/d_model) are float32 numbers.
    check(graph, feeds, {"logits": logits}, exact=1e-6)
