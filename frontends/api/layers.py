"""Layers: functions that take their weights from the model under the names of its scopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import Expr, ShapeError, UsageError
from . import functions as f
from .attention import MaskLike, attention
from .positions import Rope, rope
from .scores import ScoreLike
from .tensor import Tensor

__all__ = [
    "ACTIVATIONS",
    "dense",
    "embedding",
    "ffn",
    "gated_ffn",
    "gru",
    "gru_cell",
    "layer_normed",
    "learned_positions",
    "lstm",
    "multi_head_attention",
    "parallel_block",
    "post_norm",
    "pre_norm",
    "rms_normed",
]

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": f.relu,
    "gelu": f.gelu,
    "gelu_tanh": lambda x: f.gelu(x, "tanh"),
    "silu": f.silu,
    "sigmoid": f.sigmoid,
    "tanh": f.tanh,
}


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """The activation of that name, or the function given. Raises UsageError."""
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise UsageError(f"no activation is called {name}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _width(x: Tensor) -> int:
    width = x.shape[-1]
    if not isinstance(width, int):
        raise ShapeError(f"the last axis of {x!r} must have a known size at {x.model.place()}")
    return width


def dense(x: Tensor, width: int, name: str, bias: bool = True, init: str = "fan_in") -> Tensor:
    """x W + b with weights ``name.weight`` [in, width] (begun by ``init``) and ``name.bias`` [width]. In a model with
    ``transposed`` its weights hold the matrix as [width, in]."""
    model = x.model
    weight = model.parameter(f"{name}.weight", (_width(x), width), init, transposed=model.transposed)
    shift = model.parameter(f"{name}.bias", (width,), "zeros") if bias else None
    return f.linear(x, weight, shift)


def embedding(ids: Tensor, rows: int, width: int, name: str, init: str = "normal") -> Tensor:
    """Row ``ids`` of ``name.weight`` [rows, width], begun by ``init``. For a tied head multiply by
    ``model.parameter(...).T``."""
    return f.gather(ids.model.parameter(f"{name}.weight", (rows, width), init), ids)


def learned_positions(x: Tensor, longest: int, name: str, start: int = 0, init: str = "normal") -> Tensor:
    """x [batch, n, d] plus n rows of ``name.weight`` [longest, d], begun by ``init``, from row ``start`` on (Gehring et
    al. 2017)."""
    table = x.model.parameter(f"{name}.weight", (longest, _width(x)), init)
    return x + f.gather(table, x.model.arange(x.shape[-2], start=start))


def layer_normed(x: Tensor, name: str, eps: float = 1e-5, bias: bool = True) -> Tensor:
    """LayerNorm with weights ``name.weight`` and ``name.bias``."""
    shape, model = (_width(x),), x.model
    weight = model.parameter(f"{name}.weight", shape, "ones")
    shift = model.parameter(f"{name}.bias", shape, "zeros") if bias else None
    return f.layer_norm(x, weight, shift, eps)


def rms_normed(x: Tensor, name: str, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """RMSNorm with the weight ``name.weight``; ``offset`` is added to it (Gemma stores what it is above 1)."""
    weight = x.model.parameter(f"{name}.weight", (_width(x),), "zeros" if offset else "ones")
    return f.rms_norm(x, weight + offset if offset else weight, eps)


def multi_head_attention(
    x: Tensor,
    context: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_width: int | None = None,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    how: Rope | None = None,
    positions: Tensor | None = None,
    temperature: float = 1.0,
    sink: float | Tensor | Expr | None = None,
    bias: bool = True,
    name: str = "attn",
) -> Tensor:
    """Concat(head_1 … head_h) W_O with head_i = attention(x W_Q, c W_K, c W_V) (Vaswani et al. 2017, section 3.2.2).

    ``x`` [batch, n, d]; ``context`` [batch, m, e] makes it cross-attention (the query comes from x, keys and values
    from the context). ``kv_heads`` below ``heads``: grouped-query, 1: multi-query. ``how``: rotary positions. Weights:
    ``name.query|key|value|out`` (``.weight``, ``.bias``).
    """
    source = x if context is None else x.model.own(context)
    kv_heads = heads if kv_heads is None else kv_heads
    width = head_width or _width(x) // heads
    with x.model.scope(name):
        q = f.split_heads(dense(x, heads * width, "query", bias), heads)
        k = f.split_heads(dense(source, kv_heads * width, "key", bias), kv_heads)
        v = f.split_heads(dense(source, kv_heads * width, "value", bias), kv_heads)
        if how is not None:
            q, k = rope(q, how, positions), rope(k, how, positions)
        mixed = attention(q, k, v, mask=mask, score=score, temperature=temperature, sink=sink)
        return dense(f.merge_heads(mixed), _width(x), "out", bias)


def ffn(
    x: Tensor,
    width: int,
    activation: Activation = "relu",
    bias: bool = True,
    name: str = "ffn",
    names: Sequence[str] = ("up", "down"),
) -> Tensor:
    """act(x W_1 + b_1) W_2 + b_2 (Vaswani et al. 2017, equation 2). ``names`` are those of the two layers."""
    with x.model.scope(name):
        return dense(activation_of(activation)(dense(x, width, names[0], bias)), _width(x), names[1], bias)


def gated_ffn(
    x: Tensor,
    width: int,
    activation: Activation = "silu",
    bias: bool = False,
    name: str = "ffn",
    names: Sequence[str] = ("gate", "up", "down"),
) -> Tensor:
    """(act(x W_gate) * x W_up) W_down: SwiGLU with ``silu``, GEGLU with ``gelu``, GLU with ``sigmoid`` (Shazeer
    2020). ``names`` are those of the three layers."""
    with x.model.scope(name):
        gate = activation_of(activation)(dense(x, width, names[0], bias))
        return dense(gate * dense(x, width, names[1], bias), _width(x), names[2], bias)


Layer = Callable[[Tensor], Tensor]


def pre_norm(x: Tensor, norm: Layer, layer: Layer) -> Tensor:
    """x + layer(norm(x)): the residual block of GPT-2 and after (Xiong et al. 2020)."""
    return x + layer(norm(x))


def post_norm(x: Tensor, norm: Layer, layer: Layer) -> Tensor:
    """norm(x + layer(x)): the residual block of 2017."""
    return norm(x + layer(x))


def parallel_block(x: Tensor, norm: Layer, *layers: Layer) -> Tensor:
    """x + sum of layer(norm(x)): attention and FFN side by side (GPT-J; Wang and Komatsuzaki 2021)."""
    normed = norm(x)
    for layer in layers:
        x = x + layer(normed)
    return x


def _recurrent(kind: str, x: Tensor, hidden: int, name: str, direction: str) -> tuple[Tensor, ...]:
    """A recurrent operator over x [batch, n, in]: all states [batch, n, dirs * hidden], then its other results."""
    model = x.model
    gates = {"gru": 3, "lstm": 4}[kind]
    dirs = 2 if direction == "bidirectional" else 1
    batch, n, width = x.shape[0], x.shape[1], _width(x)
    weights = [
        model.parameter(f"{name}.w", (dirs, gates * hidden, width), "fan_in_last"),
        model.parameter(f"{name}.r", (dirs, gates * hidden, hidden), "fan_in_last"),
        model.parameter(f"{name}.b", (dirs, 2 * gates * hidden), "zeros"),
    ]
    y, *last = model.multi(kind, x.transpose(1, 0, 2), *weights, hidden=hidden, direction=direction)
    return (y.transpose(2, 0, 1, 3).reshape(batch, n, dirs * hidden), *last)


def gru(x: Tensor, hidden: int, name: str = "gru", direction: str = "forward") -> tuple[Tensor, Tensor]:
    """A GRU layer over x [batch, n, in] (Cho et al. 2014): all states [batch, n, dirs * hidden] and the last of each
    direction [dirs, batch, hidden].

    Weights as ONNX has them: ``name.w`` [dirs, 3·hidden, in], ``name.r`` [dirs, 3·hidden, hidden], ``name.b`` [dirs,
    6·hidden], gates in the order update, reset, new.
    """
    y, last = _recurrent("gru", x, hidden, name, direction)
    return y, last


def lstm(x: Tensor, hidden: int, name: str = "lstm", direction: str = "forward") -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM layer over x [batch, n, in] (Hochreiter and Schmidhuber 1997): all states [batch, n, dirs * hidden], and
    the last state and the last cell of each direction [dirs, batch, hidden].

    Weights as ONNX has them: ``name.w`` [dirs, 4·hidden, in], ``name.r`` [dirs, 4·hidden, hidden], ``name.b`` [dirs,
    8·hidden], gates in the order input, output, forget, cell.
    """
    y, last, cell = _recurrent("lstm", x, hidden, name, direction)
    return y, last, cell


def gru_cell(x: Tensor, state: Tensor, name: str = "gru") -> Tensor:
    """One GRU step (Cho et al. 2014): z = σ(x W_z + h U_z), r = σ(x W_r + h U_r), h̃ = tanh(x W + (r h) U),
    h' = (1 - z) h̃ + z h; ``x`` [batch, in], ``state`` [batch, hidden]."""
    hidden = _width(state)
    with x.model.scope(name):
        update = f.sigmoid(dense(x, hidden, "xz") + dense(state, hidden, "hz", bias=False))
        reset = f.sigmoid(dense(x, hidden, "xr") + dense(state, hidden, "hr", bias=False))
        new = f.tanh(dense(x, hidden, "xn") + dense(reset * state, hidden, "hn", bias=False))
        return (1.0 - update) * new + update * state
