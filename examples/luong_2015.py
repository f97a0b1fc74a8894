"""Global attention after the recurrent step: Luong, Pham and Manning, "Effective Approaches to Attention-based Neural
Machine Translation", EMNLP 2015.

Encoder and decoder are LSTMs. The decoder steps first and then looks, with the state it has now (section 3); what it
found is fed into the next step (3.3, input feeding):

    h_t = LSTM([y_{t-1}; h̃_{t-1}], h_{t-1})
    a_t = softmax(score(h_t, h̄_s))        c_t = sum_s a_t(s) h̄_s
    h̃_t = tanh(W_c [c_t; h_t])            p(y_t) = softmax(W_s h̃_t)

    score(h, h̄) = hᵀ h̄  (dot),   hᵀ W_a h̄  (general),   v_aᵀ tanh(W_a [h; h̄])  (concat)

Instead of training, ``by_hand`` sets the weights: the encoder turns a small vector by 45° a word, the decoder turns it
back, which is the order of a German subordinate clause (… weil er Brot gegessen hat). The states differ little, so that
dot, which has no weights, cannot tell them apart; the other two can.

    python examples/luong_2015.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.frontends.api import (
    Model,
    Tensor,
    additive,
    attention,
    concat,
    dense,
    embedding,
    general,
    log_softmax,
    padding,
    scan,
    sigmoid,
    tanh,
    unscaled_dot,
)

Array = NDArray[Any]

ENGLISH = ["<s>", "</s>", "has", "eaten", "bread", "can", "sing"]
GERMAN = ["</s>", "<s>", "hat", "gegessen", "Brot", "kann", "singen"]
WORDS = len(ENGLISH)
HIDDEN = 3 + WORDS


def lstm(x: Tensor, h: Tensor, c: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """One step (Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000)."""
    i, f, o, g = (dense(concat([x, h]), HIDDEN, f"{name}.{gate}") for gate in "ifog")
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def look(h: Tensor, source: Tensor, lengths: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """The context c_t [batch, hidden] for the state h [batch, hidden], and the weights a_t [batch, n]."""
    m, square = h.model, (HIDDEN, HIDDEN)
    query, keys, how = h[:, None], source, unscaled_dot()
    if score == "general":
        how = general(m.parameter("score.w", square))
    elif score == "concat":  # W_a [h; h̄] is a product with each of the two
        query, keys = query @ m.parameter("score.w_target", square), keys @ m.parameter("score.w_source", square)
        how = additive(m.parameter("score.v", (HIDDEN,)))
    context, weights = attention(query, keys, source, score=how, mask=padding(lengths), weights=True)
    return context[:, 0], weights[:, 0]


def model(score: str = "general", weights: Mapping[str, Array] | None = None) -> attnc.Graph:
    """source [batch, n], its lengths [batch], target [batch, t] → alignment [batch, t, n], and the log-probability of
    every word to follow each word of the target [batch, t, words]."""
    m = Model("luong", by_hand() if weights is None else weights)
    source = m.input("source", "int64", ["batch", "n"])
    lengths = m.input("lengths", "int64", ["batch"])
    target = m.input("target", "int64", ["batch", "t"])

    def read(h: Tensor, c: Tensor, x: Tensor, real: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """An encoder step; behind the end of a sentence the state stays as it is."""
        following = [real * new + (1 - real) * old for new, old in zip(lstm(x, h, c, "encoder"), (h, c), strict=True)]
        return following, following[:1]

    def write(h: Tensor, c: Tensor, fed: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        h, c = lstm(concat([y, fed]), h, c, "decoder")
        context, alignment = look(h, states, lengths, score)
        fed = tanh(dense(concat([context, h]), HIDDEN, "attentional", bias=False))
        return [h, c, fed], [alignment, log_softmax(dense(fed, WORDS, "out", bias=False))]

    zero = m.constant(0.0).expand("batch", HIDDEN)
    real = (m.arange("n") < lengths.reshape("batch", 1)).cast("float32").reshape("batch", "n", 1)
    last, (states,) = scan(read, [zero, zero], [embedding(source, WORDS, WORDS, "encoder.embedding"), real])
    _, results = scan(write, [*last, zero], [embedding(target, WORDS, WORDS, "decoder.embedding")])
    for name, result in zip(("alignment", "log_p"), results, strict=True):
        m.output(name, result)
    return m.graph


def by_hand() -> dict[str, Array]:
    """Weights that translate word by word from the last to the first."""
    c = s = np.sqrt(0.5)
    turn = np.array([[c, s], [-s, c]])  # a row vector times this is turned by 45°, times its transpose back
    small, one = 0.1, np.tanh(1.0)  # a small vector passes tanh unharmed; the feature 2 is always ``one``
    encoder, decoder = np.zeros((WORDS + HIDDEN, HIDDEN)), np.zeros((WORDS + 2 * HIDDEN, HIDDEN))
    encoder[WORDS : WORDS + 2, :2], decoder[-HIDDEN : 2 - HIDDEN, :2] = turn, turn.T
    encoder[ENGLISH.index("<s>"), 0] = small  # starts the turning
    encoder[:WORDS, 3:] = np.eye(WORDS)  # the other features are the word
    closed, opened, constant = np.full(HIDDEN, -20.0), np.full(HIDDEN, 20.0), 20.0 * (np.arange(HIDDEN) == 2)
    weights = {f"{name}.embedding.weight": np.eye(WORDS) for name in ("encoder", "decoder")}
    for name, weight in {"encoder": encoder, "decoder": decoder}.items():
        for gate, bias in {"i": opened, "f": closed, "o": opened, "g": constant}.items():
            weights |= {f"{name}.{gate}.weight": weight if gate == "g" else 0 * weight, f"{name}.{gate}.bias": bias}
    same, axes, bump = np.zeros((HIDDEN, HIDDEN)), np.zeros((HIDDEN, HIDDEN)), np.zeros((HIDDEN, HIDDEN))
    same[0, 0] = same[1, 1] = 12 / small**2  # 12 times the cosine
    axes[0, [0, 2]] = axes[1, [1, 3]] = 5 / small  # tanh(x + 1) - tanh(x - 1) is a bump around x = 0, for each axis
    bump[2, :4] = np.array([1, 1, -1, -1]) / one
    found = np.zeros((2 * HIDDEN, HIDDEN))
    found[3:HIDDEN, 3:] = np.eye(WORDS)
    weights |= {"score.w": same, "score.w_target": axes + bump, "score.w_source": -axes}
    weights |= {"score.v": np.concatenate([[2, 2, -2, -2], np.zeros(HIDDEN - 4)])}
    return weights | {"attentional.weight": found, "out.weight": 10 * np.eye(HIDDEN)[:, 3:]}


def main() -> None:
    pairs = [("<s> has eaten bread </s>", "<s> Brot gegessen hat </s>"), ("<s> can sing </s>", "<s> singen kann </s>")]
    source, target = np.full((2, 5), 1), np.full((2, 5), 1)
    for row, (english, german) in enumerate(pairs):
        source[row, : len(english.split())] = [ENGLISH.index(word) for word in english.split()]
        target[row, : len(german.split())] = [GERMAN.index(word) for word in german.split()]
    lengths = np.array([len(english.split()) for english, _ in pairs])
    feeds = {"source": source, "lengths": lengths, "target": target[:, :-1]}
    for score in ("dot", "general", "concat"):
        graph = model(score)
        runs = [attnc.compile(graph, target=name).session().run(feeds) for name in ("numpy", "ort-cpu")]
        log_p = np.take_along_axis(runs[0]["log_p"], target[:, 1:, None], axis=2)[..., 0]
        apart = max(np.abs(runs[0][name] - runs[1][name]).max() for name in runs[0])
        print(f"{score}: numpy and ort-cpu differ by less than 1e-5: {apart < 1e-5}")
        for row, (english, german) in enumerate(pairs):
            words, probability = german.split()[1:], np.exp(log_p[row, : lengths[row] - 1].sum())
            print(f"{f'p = {probability:.3f}':>12}" + "".join(f"{word:>9}" for word in english.split()))
            for word, weights in zip(words, runs[0]["alignment"][row], strict=False):
                print(f"{word:>12}" + "".join(f"{value:9.3f}" for value in weights[: lengths[row]]))


if __name__ == "__main__":
    main()
