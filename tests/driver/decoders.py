"""Small decoders, each as a graph over all tokens and as a step graph with states, built by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnc.backends.base import Options
from attnc.driver import Program, Report
from attnc.frontends.api import Model, Tensor, dense, embedding, rms_normed
from attnc.frontends.api import functions as f
from attnc.ir import Dim, DType, Graph, State, TensorType, evaluate, symbol
from attnc.ir.cacheplan import CachePlan, CacheState, TimeInput, TimeOutput
from attnc.ir.dims import dim_min

__all__ = ["Decoder", "cached", "full_graph", "greedy", "whole"]

WORDS, WIDTH, HEADS, GROUPS, SIZE, TABLE = 40, 16, 4, 2, 4, 64


@dataclass(frozen=True)
class Decoder:
    """What a decoder of two layers with grouped heads has."""

    masked: bool = False
    """An input attention_mask."""
    placed: bool = False
    """An input position_ids; else positions count from the first entry."""
    window: int | None = None
    """How many keys a query of the second layer sees, its own among them: a ring of one fewer."""
    sums: bool = False
    """Whether a running sum over the tokens is added."""
    typed: bool = False
    """An input token_type_ids."""
    encoder: bool = False
    """An encoder over enc_ids, of which enc_mask hides some, that the first layer attends to."""
    batch: str | int = "batch"
    table: int = TABLE
    """How many positions the table has."""


class _Build:
    """One of the graphs of a decoder: whole, or the step."""

    def __init__(self, config: Decoder, step: bool) -> None:
        self.config = config
        self.step = step
        self.model = Model("step" if step else "whole", seed=3)
        self.past: Dim = symbol("past") if step else 0
        self.n = symbol("seq")
        self.states: list[CacheState] = []

    def build(self) -> Graph:
        m, config, n = self.model, self.config, self.n
        ids = m.input("input_ids", "int64", [config.batch, n])
        shown = m.input("attention_mask", "int64", [config.batch, self.past + n]) if config.masked else None
        places = m.input("position_ids", "int64", [config.batch, n]) if config.placed else m.arange(n, start=self.past)
        x = embedding(ids, WORDS, WIDTH, "embed") + embedding(places, config.table, WIDTH, "places")
        if config.typed:
            x = x + embedding(m.input("token_type_ids", "int64", [config.batch, n]), 2, WIDTH, "types")
        if config.sums:
            x = x + self._sum(x)
        crossed = self._crossed() if config.encoder else None
        for layer in range(2):
            with m.scope(f"layers.{layer}"):
                x = x + self._attention(rms_normed(x, "norm1"), layer, shown)
                if layer == 0 and crossed is not None:
                    x = x + self._cross(rms_normed(x, "norm3"), *crossed)
                x = x + dense(f.gelu(dense(rms_normed(x, "norm2"), 2 * WIDTH, "up")), WIDTH, "down")
        if self.step:
            x = m.op("slice", x, axes=(1,), starts=(n - 1,), sizes=(1,))
        m.output("logits", 4 * dense(rms_normed(x, "norm"), WORDS, "head"))
        return m.graph

    def _heads(self, x: Tensor, layer: int) -> list[Tensor]:
        return [
            f.split_heads(dense(x, count * SIZE, name, bias=False), count)
            for count, name in ((HEADS, "q"), (GROUPS, "k"), (GROUPS, "v"))
        ]

    def _attention(self, x: Tensor, layer: int, shown: Tensor | None) -> Tensor:
        m, window = self.model, self.config.window if layer else None
        q, k, v = self._heads(x, layer)
        past = self.past
        if self.step and window is None:
            k, v = (self._append(t, f"{layer}.{name}") for t, name in ((k, "key"), (v, "value")))
        elif self.step and window is not None:
            past = symbol("past_w")
            k, v = (self._ring(t, f"{layer}.{name}", window) for t, name in ((k, "key"), (v, "value")))
        near = f" and i + {past} - j < {window}" if window is not None else ""
        operands: tuple[Tensor, ...] = ()
        attrs: dict[str, object] = {}
        if shown is not None:
            operands, attrs = (shown,), {"loads": ("shown",), "where": f"shown[b, j + {self.past - past}] > 0"}
        mask = f"j <= i + {past}{near}"
        mixed = m.op("attention", q, k, v, *operands, scale=SIZE**-0.5, mask=mask, **attrs)
        return dense(f.merge_heads(mixed), WIDTH, "o", bias=False)

    def _state(self, name: str, kind: str, x: Tensor, size: Dim, axis: int | None, window: int | None = None) -> None:
        shape = tuple(size if k == axis else d for k, d in enumerate(x.shape))
        self.model._graph.add_state(State(name, TensorType(DType.FLOAT32, shape)))
        batch = 0 if isinstance(self.config.batch, str) else None
        self.states.append(CacheState(name, kind, batch, axis, "attention", "", "", window))

    def _append(self, x: Tensor, name: str) -> Tensor:
        self._state(name, "append", x, self.past, 2)
        return self.model.op("state_append", x, state=name, axis=2)

    def _ring(self, x: Tensor, name: str, window: int) -> Tensor:
        old = symbol("past_w")
        self._state(name, "ring", x, old, 2, window - 1)
        both = self.model.op("concat", self.model.op("state_read", state=name), x, axis=2)
        kept = dim_min(old + self.n, window - 1)
        last = self.model.op("slice", both, axes=(2,), starts=(old + self.n - kept,), sizes=(kept,))
        self.model.op("state_write", last, state=name)
        return both

    def _sum(self, x: Tensor) -> Tensor:
        m = self.model
        total = m.op("cumsum", x, axis=1)
        if self.step:
            name = "sum"
            first = m.op("slice", x, axes=(1,), starts=(0,), sizes=(1,))
            self._state(name, "sum", first, 1, 1)
            total = total + m.op("state_read", state=name)
            m.op("state_write", m.op("slice", total, axes=(1,), starts=(self.n - 1,), sizes=(1,)), state=name)
        return 0.3 * total

    # -- the encoder -----------------------------------------------------------------------------------------

    def _crossed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the encoder, and its mask."""
        m = self.model
        shown = m.input("enc_mask", "bool", [self.config.batch, "enc"])
        if not self.step:
            k, v = encoder(m, self.config)
            return k, v, shown
        for name in ("0.cross.key", "0.cross.value"):
            type = TensorType(DType.FLOAT32, (symbol("batch"), GROUPS, symbol("enc"), SIZE))
            m._graph.add_state(State(name, type))
            self.states.append(CacheState(name, "fixed", 0, None, "cross", "", ""))
        k, v = (m.op("state_read", state=f"0.cross.{name}") for name in ("key", "value"))
        return k, v, shown

    def _cross(self, x: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        q = f.split_heads(dense(x, HEADS * SIZE, "cross.q", bias=False), HEADS)
        mixed = self.model.op("attention", q, k, v, shown, scale=SIZE**-0.5, loads=("e",), where="e[b, j]")
        return dense(f.merge_heads(mixed), WIDTH, "cross.o", bias=False)


def encoder(m: Model, config: Decoder) -> tuple[Tensor, Tensor]:
    """Keys and values over enc_ids: [batch, groups, enc, size]."""
    ids = m.input("enc_ids", "int64", [config.batch, "enc"])
    x = embedding(ids, WORDS, WIDTH, "enc.embed")
    x = x + dense(f.gelu(dense(x, WIDTH, "enc.up")), WIDTH, "enc.down")
    k, v = (f.split_heads(dense(x, GROUPS * SIZE, f"enc.{name}", bias=False), GROUPS) for name in ("k", "v"))
    return k, v


def full_graph(config: Decoder) -> Graph:
    """The decoder over all tokens: logits [batch, seq, words]."""
    return _Build(config, False).build()


def whole(config: Decoder) -> Program:
    """The decoder without a cache, for numpy."""
    graph = full_graph(config)
    return Program(graph, graph, "numpy", Options(), Report())


def cached(config: Decoder, options: Options | None = None, **plan: object) -> Program:
    """The decoder with a cache, for numpy. ``plan`` changes fields of the plan."""
    build = _Build(config, True)
    graph = build.build()
    inputs = [TimeInput("input_ids", 1, "ids")]
    inputs += [TimeInput("attention_mask", 1, "mask", whole=True)] if config.masked else []
    inputs += [TimeInput("position_ids", 1, "positions")] if config.placed else []
    inputs += [TimeInput("token_type_ids", 1, "other")] if config.typed else []
    batch = config.batch if isinstance(config.batch, str) else None
    outputs = (TimeOutput("logits", 1, last=True),)
    made = CachePlan("seq", tuple(inputs), tuple(build.states), outputs, batch, max_length=config.table)
    made = replace(made, padding=config.masked and config.placed and not config.sums)
    made = replace(made, **plan)  # type: ignore[arg-type]
    prepare = None
    if config.encoder:
        m = Model("prepare", seed=3)
        for name, value in zip(("key", "value"), encoder(m, config), strict=True):
            m._graph.add_state(State(f"0.cross.{name}", value.value.type))
            m.op("state_write", value, state=f"0.cross.{name}")
        prepare = m._graph
    return Program(graph, full_graph(config), "numpy", options or Options(), Report(), plan=made, prepare=prepare)


def logits(graph: Graph, row: list[int], **feeds: object) -> np.ndarray:
    """The logits [n, words] of one row by the graph over all tokens, in float64."""
    known = {v.name for v in graph.inputs}
    all_feeds = {
        "input_ids": np.asarray([row]),
        "attention_mask": np.ones((1, len(row)), np.int64),
        "position_ids": np.arange(len(row))[None],
        **feeds,
    }
    arrays = {name: value for name, value in all_feeds.items() if name in known}
    return np.asarray(evaluate(graph, arrays, DType.FLOAT64)["logits"][0])


def greedy(graph: Graph, row: list[int], count: int, **feeds: object) -> list[int]:
    """The most probable tokens one after the other, the whole row read anew for each, in float64."""
    found: list[int] = []
    for _ in range(count):
        more = {name: value(len(row) + len(found)) if callable(value) else value for name, value in feeds.items()}
        found.append(int(np.argmax(logits(graph, [*row, *found], **more)[-1])))
    return found
