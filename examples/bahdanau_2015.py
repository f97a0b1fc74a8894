"""The first attention of neural translation: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning
to Align and Translate", ICLR 2015.

A bidirectional GRU reads the source into annotations h_j. At every step the decoder asks where to look, with the state
it has, and reads the annotations there (section 3.1 and appendix A):

    e_ij = v_aᵀ tanh(W_a s_{i-1} + U_a h_j)        α_i = softmax(e_i)        c_i = sum_j α_ij h_j
    s_i  = GRU([E y_{i-1}; c_i], s_{i-1})          s_0 = tanh(W_s ←h_1)
    t_i  = maxout(U_o s_{i-1} + V_o E y_{i-1} + C_o c_i)        p(y_i) = softmax(W_o t_i)

(Our GRU's gate z is 1 - z of the paper's.) Instead of training, ``by_hand`` sets the weights: both encoder directions
turn a small vector by 45° a word, the forward one since <s>, the backward one since </s>. The last tells the decoder
how long the sentence is; it starts there and turns backwards. So it finds "European Economic Area" in the order in
which French says it, as in figure 3 (a) of the paper.

    python examples/bahdanau_2015.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.frontends.api import Model, Tensor, additive, attention, concat, dense, embedding, gru, gru_cell, scan, tanh

Array = NDArray[Any]

ENGLISH = ["<s>", "</s>", "European", "Economic", "Area", "red", "wine"]
FRENCH = ["</s>", "<s>", "européenne", "économique", "zone", "rouge", "vin"]
WORDS = len(ENGLISH)
HIDDEN, STATE, PAIRS = 2 + WORDS, 2, WORDS  # the annotations in each direction, the decoder, the maxout units


def model(weights: Mapping[str, Array] | None = None, steps: int = 4) -> attnc.Graph:
    """source [batch, n] → alignment [batch, steps, n], greedy words [batch, steps], their logits [batch, steps, …]."""
    m = Model("bahdanau", by_hand() if weights is None else weights)
    source = m.input("source", "int64", ["batch", "n"])
    h, _ = gru(embedding(source, WORDS, WORDS, "encoder.embedding"), HIDDEN, "encoder.gru", "bidirectional")
    keys = dense(h, 4, "align.annotations", bias=False)
    s_0 = tanh(dense(h[:, 0, HIDDEN:], STATE, "decoder.start", bias=False))

    def step(s: Tensor, y: Tensor, _: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        query = dense(s, 4, "align.state")[:, None]
        context, alpha = attention(query, keys, h, score=additive(m.parameter("align.v", (4,))), weights=True)
        c, previous = context[:, 0], embedding(y, WORDS, WORDS, "decoder.embedding")
        t = dense(concat([s, previous, c]), 2 * PAIRS, "out.deep")
        logits = dense(t.reshape(t.shape[0], PAIRS, 2).max(2), WORDS, "out.words", bias=False)
        word = logits.op("argmax", axis=-1)
        return [gru_cell(concat([previous, c]), s, "decoder.gru"), word], [alpha[:, 0], word, logits]

    start = m.constant(FRENCH.index("<s>")).expand("batch")
    clock = m.arange(steps).reshape(1, steps).expand("batch", steps)
    _, (alpha, words, logits) = scan(step, [s_0, start], [clock])
    for name, result in {"alignment": alpha, "words": words, "logits": logits}.items():
        m.output(name, result)
    return m.graph


def by_hand() -> dict[str, Array]:
    """Weights that translate word by word from the last to the first."""

    def turn(degrees: float) -> Array:
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        return np.array([[c, s], [-s, c]])  # row vectors times this are turned

    small, closed, opened = 0.1, -20.0, 20.0  # a small vector passes tanh unharmed; a closed and an open gate
    w, r, b = np.zeros((2, 3, HIDDEN, WORDS)), np.zeros((2, 3, HIDDEN, HIDDEN)), np.zeros((2, 6, HIDDEN))
    b[:, 0], b[:, 1] = closed, opened  # no state is kept as it is; the new one sees all of the old one
    r[:, 2, :2, :2] = turn(45).T  # the first two features are the clock,
    w[0, 2, 0, ENGLISH.index("<s>")] = w[1, 2, 0, ENGLISH.index("</s>")] = small  # which these words start;
    w[:, 2, 2:] = np.eye(WORDS)  # the others are the word
    forward, backward = np.eye(2 * HIDDEN)[:2], np.eye(HIDDEN)[:, :2]
    both = np.concatenate([np.eye(2), np.eye(2)], axis=1) * 5 / small  # a bump tanh(x + 1) - tanh(x - 1) for each axis
    word = np.zeros((STATE + WORDS + 2 * HIDDEN, 2 * PAIRS))
    word[STATE + WORDS + 2 : STATE + WORDS + HIDDEN] = np.repeat(np.eye(WORDS), 2, axis=1)
    weights = {
        "encoder.embedding.weight": np.eye(WORDS),
        "encoder.gru.w": w.reshape(2, -1, WORDS),
        "encoder.gru.r": r.reshape(2, -1, HIDDEN),
        "encoder.gru.b": b.reshape(2, -1),
        "decoder.embedding.weight": np.eye(WORDS),
        "decoder.start.weight": backward @ turn(-45),
        "align.annotations.weight": -forward.T @ both,
        "align.state.weight": both,
        "align.state.bias": np.array([1.0, 1, -1, -1]),
        "align.v": np.array([2.0, 2, -2, -2]),
        "out.deep.weight": word,
        "out.deep.bias": np.zeros(2 * PAIRS),
        "out.words.weight": 10 * np.eye(WORDS),
    }
    for gate, bias in {"z": closed, "r": opened, "n": 0.0}.items():
        weights[f"decoder.gru.x{gate}.weight"] = np.zeros((WORDS + 2 * HIDDEN, STATE))
        weights[f"decoder.gru.x{gate}.bias"] = np.full(STATE, bias)
        weights[f"decoder.gru.h{gate}.weight"] = turn(-45) if gate == "n" else np.zeros((STATE, STATE))
    return weights


def main() -> None:
    graph = model()
    for sentence in ("European Economic Area", "red wine"):
        source = ["<s>", *sentence.split(), "</s>"]
        feeds = {"source": np.array([[ENGLISH.index(word) for word in source]])}
        runs = {target: attnc.compile(graph, target=target).session().run(feeds) for target in ("numpy", "ort-cpu")}
        print(f"{'':>12}" + "".join(f"{word:>10}" for word in source) + f"{'sum':>8}")
        for word, row in zip(runs["numpy"]["words"][0], runs["numpy"]["alignment"][0], strict=True):
            print(f"{FRENCH[word]:>12}" + "".join(f"{value:10.3f}" for value in row) + f"{row.sum():8.3f}")
            if FRENCH[word] == "</s>":
                break
        apart = max(np.abs(runs["numpy"][name] - runs["ort-cpu"][name]).max() for name in runs["numpy"])
        print(f"numpy and ort-cpu differ by less than 1e-5: {apart < 1e-5}\n")


if __name__ == "__main__":
    main()
