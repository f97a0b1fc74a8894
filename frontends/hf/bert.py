"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: encoders of blocks norm(x + attention(x)), norm(x + ffn(x))."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..api import (
    Model,
    Tensor,
    cumsum,
    dense,
    embedding,
    ffn,
    gather,
    gelu,
    layer_normed,
    learned_positions,
    padding,
    post_norm,
    relu,
    tanh,
)
from .blocks import activation, heads_of, mixed, projected
from .config import Config
from .fields import Field, layers, number, optional_size, size, text, unread
from .weights import Weights

__all__ = ["BERT", "DISTILBERT", "ROBERTA", "bert", "distilbert", "roberta"]

BERT: Mapping[str, Field] = {
    "hidden_act": text("gelu"),
    "hidden_size": size(768),
    "intermediate_size": size(3072),
    "layer_norm_eps": number(1e-12),
    "max_position_embeddings": size(512),
    "num_attention_heads": size(12),
    "num_hidden_layers": layers(12),
    **{
        f"pooler_{name}": unread("size")
        for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")
    },
    "pooler_type": unread("text"),
    "type_vocab_size": size(2),
    "vocab_size": size(30522),
}


def bert(m: Model, c: Config, w: Weights) -> None:
    """BERT (Devlin et al. 2019): input_ids, attention_mask (1: a word, 0: padding) and token_type_ids [batch, seq] →
    last_hidden_state [batch, seq, width] and, where the weights have it, pooler_output [batch, width]; with a head
    logits."""
    ids, real = _inputs(m)
    with m.scope("bert"):
        x = _encoder(
            m, c, ids, real, lambda x: learned_positions(x, c["max_position_embeddings"], "position_embeddings")
        )
        pooled = _pooled(x, c) if "bert.pooler.dense.weight" in w else None
    if c.head == "ForMaskedLM":
        with m.scope("cls.predictions"):
            y = activation(c, "hidden_act")(dense(x, c["hidden_size"], "transform.dense"))
            y = layer_normed(y, "transform.LayerNorm", c["layer_norm_eps"])
        table = m.parameter("bert.embeddings.word_embeddings.weight", (c["vocab_size"], c["hidden_size"]))
        m.output("logits", _decoded(m, c, w, y, table, "cls.predictions"))
    elif c.head == "ForSequenceClassification" and pooled is not None:
        m.output("logits", dense(pooled, c.labels, "classifier"))
    else:
        _hidden_or_tokens(m, c, x, pooled)


ROBERTA: Mapping[str, Field] = {**BERT, "pad_token_id": Field("count", 1), "vocab_size": size(50265)}


def roberta(m: Model, c: Config, w: Weights) -> None:
    """RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020): BERT, whose positions count the words that are not
    padding, from the padding's number on. Padding is what has that number among input_ids."""
    ids, real = _inputs(m)
    pad = c["pad_token_id"]

    def positions(x: Tensor) -> Tensor:
        words = (~ids.eq(pad)).cast("int64")
        table = m.parameter("position_embeddings.weight", (c["max_position_embeddings"], c["hidden_size"]))
        return x + gather(table, cumsum(words, 1) * words + pad)

    with m.scope("roberta"):
        x = _encoder(m, c, ids, real, positions)
        pooled = _pooled(x, c) if "roberta.pooler.dense.weight" in w else None
    if c.head == "ForMaskedLM":
        with m.scope("lm_head"):
            y = layer_normed(gelu(dense(x, c["hidden_size"], "dense")), "layer_norm", c["layer_norm_eps"])
        table = m.parameter("roberta.embeddings.word_embeddings.weight", (c["vocab_size"], c["hidden_size"]))
        m.output("logits", _decoded(m, c, w, y, table, "lm_head"))
    elif c.head == "ForSequenceClassification":
        first = tanh(dense(x[:, 0], c["hidden_size"], "classifier.dense"))
        m.output("logits", dense(first, c.labels, "classifier.out_proj"))
    else:
        _hidden_or_tokens(m, c, x, pooled)


def _inputs(m: Model) -> tuple[Tensor, Tensor]:
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    return ids, m.input("attention_mask", "int64", ["batch", "seq"])


def _encoder(m: Model, c: Config, ids: Tensor, real: Tensor, positions: Callable[[Tensor], Tensor]) -> Tensor:
    """The encoder with the names of BERT; ``positions`` adds them to the words."""
    width, eps, heads = c["hidden_size"], c["layer_norm_eps"], heads_of(c)
    act = activation(c, "hidden_act")

    def attn(x: Tensor) -> Tensor:
        with m.scope("attention"):
            with m.scope("self"):
                q, k, v = projected(x, x, heads, ("query", "key", "value"), bias=True)
                y = mixed(q, k, v, padding(real))
            return dense(y, width, "output.dense")

    def mlp(x: Tensor) -> Tensor:
        return ffn(x, c["intermediate_size"], act, True, "", ("intermediate.dense", "output.dense"))

    with m.scope("embeddings"):
        types = c["type_vocab_size"]
        x = embedding(ids, c["vocab_size"], width, "word_embeddings")
        if types > 1:
            x = x + embedding(
                m.input("token_type_ids", "int64", ["batch", "seq"]), types, width, "token_type_embeddings"
            )
        else:
            x = x + m.parameter("token_type_embeddings.weight", (1, width))
        x = layer_normed(positions(x), "LayerNorm", eps)
    for k in range(c["num_hidden_layers"]):
        with m.scope(f"encoder.layer.{k}"):
            x = post_norm(x, lambda y: layer_normed(y, "attention.output.LayerNorm", eps), attn)
            x = post_norm(x, lambda y: layer_normed(y, "output.LayerNorm", eps), mlp)
    return x


def _pooled(x: Tensor, c: Config) -> Tensor:
    """The first word, through a layer of its own."""
    return tanh(dense(x[:, 0], c["hidden_size"], "pooler.dense"))


def _decoded(m: Model, c: Config, w: Weights, x: Tensor, table: Tensor, head: str) -> Tensor:
    """x times the table of words, or a matrix of its own, plus a bias."""
    rows, width = c["vocab_size"], c["hidden_size"]
    tied = w.tied(f"{head}.decoder.weight", table.name)
    matrix = table.T if tied else m.parameter(f"{head}.decoder.weight", (width, rows), transposed=True)
    w.tied(f"{head}.decoder.bias", f"{head}.bias")
    return x @ matrix + m.parameter(f"{head}.bias", (rows,))


def _hidden_or_tokens(m: Model, c: Config, x: Tensor, pooled: Tensor | None) -> None:
    if c.head == "ForTokenClassification":
        m.output("logits", dense(x, c.labels, "classifier"))
        return
    m.output("last_hidden_state", x)
    if pooled is not None:
        m.output("pooler_output", pooled)


DISTILBERT: Mapping[str, Field] = {
    "activation": text("gelu"),
    "dim": size(768),
    "head_dim": optional_size(),
    "hidden_dim": size(3072),
    "max_position_embeddings": size(512),
    "n_heads": size(12),
    "n_layers": layers(6),
    "vocab_size": size(30522),
}


def distilbert(m: Model, c: Config, w: Weights) -> None:
    """DistilBERT (Sanh et al. 2019): BERT without kinds of segments; input_ids and attention_mask."""
    ids, real = _inputs(m)
    width, heads, act, eps = c["dim"], heads_of(c, "n_heads", "dim"), activation(c, "activation"), 1e-12

    def attn(x: Tensor) -> Tensor:
        with m.scope("attention"):
            q, k, v = projected(x, x, heads, ("q_lin", "k_lin", "v_lin"), bias=True)
            return dense(mixed(q, k, v, padding(real)), width, "out_lin")

    def mlp(x: Tensor) -> Tensor:
        return ffn(x, c["hidden_dim"], act, True, "ffn", ("lin1", "lin2"))

    with m.scope("distilbert"):
        with m.scope("embeddings"):
            x = embedding(ids, c["vocab_size"], width, "word_embeddings")
            x = learned_positions(x, c["max_position_embeddings"], "position_embeddings")
            x = layer_normed(x, "LayerNorm", eps)
        for k in range(c["n_layers"]):
            with m.scope(f"transformer.layer.{k}"):
                x = post_norm(x, lambda y: layer_normed(y, "sa_layer_norm", eps), attn)
                x = post_norm(x, lambda y: layer_normed(y, "output_layer_norm", eps), mlp)
    if c.head == "ForMaskedLM":
        y = layer_normed(act(dense(x, width, "vocab_transform")), "vocab_layer_norm", eps)
        table = m.parameter("distilbert.embeddings.word_embeddings.weight", (c["vocab_size"], width))
        if w.tied("vocab_projector.weight", table.name):
            m.output("logits", y @ table.T + m.parameter("vocab_projector.bias", (c["vocab_size"],)))
        else:
            m.output("logits", dense(y, c["vocab_size"], "vocab_projector"))
    elif c.head == "ForSequenceClassification":
        m.output("logits", dense(relu(dense(x[:, 0], width, "pre_classifier")), c.labels, "classifier"))
    else:
        _hidden_or_tokens(m, c, x, None)
