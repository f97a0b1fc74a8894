"""Recurrent layers over the first axis, with the operands and gate orders of ONNX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..graph import Graph, Value
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType
from .elementwise import sigmoid

_DIRECTIONS: Mapping[str, tuple[bool, ...]] = {
    "forward": (False,),
    "reverse": (True,),
    "bidirectional": (False, True),
}
"""Direction → whether each of its parts runs from the end."""


class Recurrent(Operator):
    """What the layers have in common: shapes, directions, and the loop over time.

    x[n, b, in], w[dirs, gates·h, in], r[dirs, gates·h, h], bias[dirs, 2·gates·h] (that of w, then that of r), and one
    initial[dirs, b, h] for each tensor that is carried, zeros when absent. Results: y[n, dirs, b, h] and the last of
    each carried tensor, [dirs, b, h]. Half precisions are computed in float32.
    """

    inputs: tuple[str, ...] = ("x", "w", "r", "bias?", "initial?")
    attributes: ClassVar[Mapping[str, Attr]] = {"hidden": Attr("int"), "direction": Attr("str", "forward")}
    gates = 1
    carried = 1

    @abstractmethod
    def step(
        self, attrs: Mapping[str, Any], xs: list[Array], h: list[Array], r: list[Array], rb: list[Array]
    ) -> list[Array]:
        """The carried tensors after one element. ``xs`` is x w^T with its bias, ``r`` the transposed matrices and
        ``rb`` their biases, each split by gate; ``h`` is what is carried."""

    @abstractmethod
    def build_step(
        self, b: Builder, attrs: Mapping[str, Any], xs: list[Value], h: list[Value], r: list[Value], rb: list[Value]
    ) -> list[Value]:
        """The same as nodes."""

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        x, hidden = call.type(0), call.attr("hidden")
        if call.attr("direction") not in _DIRECTIONS:
            raise call.error(f"direction is one of {', '.join(_DIRECTIONS)}")
        if not call.same_dtype().is_float:
            raise call.error("needs float operands")
        if x.rank != 3:
            raise call.error("x must be [length, batch, features]")
        length, batch, features = x.shape
        dirs, rows = len(_DIRECTIONS[call.attr("direction")]), self.gates * hidden
        state = (dirs, batch, hidden)
        wanted = [x.shape, (dirs, rows, features), (dirs, rows, hidden), (dirs, 2 * rows), *(state,) * self.carried]
        for position, (t, shape) in enumerate(zip(call.types, wanted, strict=False)):
            if t is not None and t.shape != shape:
                raise call.error(f"{self.input_name(position)} must be [{', '.join(map(str, shape))}]")
        return (x.with_shape((length, dirs, batch, hidden)), *(x.with_shape(state),) * self.carried)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        wide = [a.astype(np.float32) if a is not None and a.dtype.itemsize == 2 else a for a in inputs]
        absent: list[Any] = [None] * (4 + self.carried - len(wide))
        x, w, r, bias, *initial = [*wide, *absent]
        rows = w.shape[1]
        zeros = np.zeros((w.shape[0], x.shape[1], run.attrs["hidden"]), x.dtype)
        ys, lasts = [], []
        for d, backwards in enumerate(_DIRECTIONS[run.attrs["direction"]]):
            both = np.zeros(2 * rows, x.dtype) if bias is None else bias[d]
            rb = np.split(both[rows:], self.gates)
            matrices = [m.T for m in np.split(r[d], self.gates)]
            h = [zeros[d] if start is None else start[d] for start in initial]
            y = np.zeros((x.shape[0], *h[0].shape), x.dtype)
            order = range(len(x))
            for t in reversed(order) if backwards else order:
                h = self.step(run.attrs, np.split(x[t] @ w[d].T + both[:rows], self.gates, axis=-1), h, matrices, rb)
                y[t] = h[0]
            ys.append(y)
            lasts.append(h)
        results = (np.stack(ys, 1), *(np.stack(parts) for parts in zip(*lasts, strict=True)))
        return tuple(a.astype(inputs[0].dtype, copy=False) for a in results)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        dtype = next(v.dtype for v in inputs if v is not None)
        wide = [b.cast(v, DType.FLOAT32) if v is not None and dtype.bits == 16 else v for v in inputs]
        absent: list[Value | None] = [None] * (4 + self.carried - len(wide))
        x, w, r, bias, *initial = [*wide, *absent]
        assert x is not None
        assert w is not None
        assert r is not None
        length, batch, _ = x.shape
        hidden, rows = attrs["hidden"], self.gates * attrs["hidden"]
        ys, lasts = [], []
        for d, backwards in enumerate(_DIRECTIONS[attrs["direction"]]):
            zero = b.constant(np.zeros((), x.dtype.numpy))
            xw = b.matmul(x, b.transpose(_part(b, w, d), (1, 0)))
            biases = b.expand(zero, (2 * rows,)) if bias is None else _part(b, bias, d)
            xw = b.add(xw, b("slice", biases, axes=(0,), starts=(0,), sizes=(rows,)))
            rb = b("slice", biases, axes=(0,), starts=(rows,), sizes=(rows,))
            start = [b.expand(zero, (batch, hidden)) if i is None else _part(b, i, d) for i in initial]
            body = self._body(start, xw.type.with_shape(xw.shape[1:]), attrs, b.source)
            rt = b.transpose(_part(b, r, d), (1, 0))
            *last, y = b.multi(
                "scan", *start, xw, rt, rb, regions=(body,), states=self.carried, sequences=1, reverse=(backwards,),
                output_reverse=(backwards,),
            )  # fmt: skip
            ys.append(b.reshape(y, (length, 1, batch, hidden)))
            lasts.append([b.reshape(v, (1, batch, hidden)) for v in last])
        both = [ys, *(list(parts) for parts in zip(*lasts, strict=True))]
        joined = [
            parts[0] if len(parts) == 1 else b("concat", *parts, axis=1 - min(k, 1)) for k, parts in enumerate(both)
        ]
        return [b.cast(v, dtype) for v in joined]

    def _body(self, start: Sequence[Value], xw: TensorType, attrs: Mapping[str, Any], source: str) -> Graph:
        hidden, rows = attrs["hidden"], self.gates * attrs["hidden"]
        body = Graph("step")
        h = [body.add_input(f"h{k}", v.type) for k, v in enumerate(start)]
        x = body.add_input("x", xw)
        r = body.add_input("r", xw.with_shape((hidden, rows)))
        rb = body.add_input("rb", xw.with_shape((rows,)))
        inner = Builder(body, source)

        def split(value: Value) -> list[Value]:
            axis = value.type.rank - 1
            return [
                inner("slice", value, axes=(axis,), starts=(k * hidden,), sizes=(hidden,)) for k in range(self.gates)
            ]

        results = self.build_step(inner, attrs, split(x), h, split(r), split(rb))
        for k, value in enumerate(results):
            body.add_output(value, f"h{k}")
        body.add_output(results[0], "y")
        return body

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(3)
        length, batch, features, hidden = 4, 2, 3, 2

        def draw(*shape: int) -> Array:
            return rng.normal(size=shape).astype(np.float32)

        for direction, parts in _DIRECTIONS.items():
            dirs, rows = len(parts), self.gates * hidden
            x, w, r = draw(length, batch, features), draw(dirs, rows, features), draw(dirs, rows, hidden)
            attrs = {"hidden": hidden, "direction": direction}
            yield Sample((x, w, r), attrs)
            initial = [draw(dirs, batch, hidden) for _ in range(self.carried)]
            yield Sample((x, w, r, draw(dirs, 2 * rows), *initial), attrs)


def _part(b: Builder, value: Value, index: int) -> Value:
    """Element ``index`` of the first axis."""
    rest = value.shape[1:]
    return b.reshape(b("slice", value, axes=(0,), starts=(index,), sizes=(1,)), rest)


class Rnn(Recurrent):
    """h' = tanh(x w^T + h r^T + biases) (Elman 1990), as ONNX RNN: x[n, b, in], w[dirs, h, in], r[dirs, h, h],
    bias[dirs, 2h], initial[dirs, b, h] → y[n, dirs, b, h], last[dirs, b, h]."""

    name = "rnn"

    def step(
        self, attrs: Mapping[str, Any], xs: list[Array], h: list[Array], r: list[Array], rb: list[Array]
    ) -> list[Array]:
        return [np.tanh(xs[0] + h[0] @ r[0] + rb[0])]

    def build_step(
        self, b: Builder, attrs: Mapping[str, Any], xs: list[Value], h: list[Value], r: list[Value], rb: list[Value]
    ) -> list[Value]:
        return [b("tanh", b.add(b.add(xs[0], b.matmul(h[0], r[0])), rb[0]))]


class Gru(Recurrent):
    """Gated recurrent unit (Cho et al. 2014) as ONNX GRU, gates in the order z, r, h; s is the sigmoid:

        z = s(x Wz^T + h Rz^T + biases)        r = s(x Wr^T + h Rr^T + biases)
        c = tanh(x Wh^T + (r * h) Rh^T + biases), or, ``linear_before_reset``,
        c = tanh(x Wh^T + r * (h Rh^T + bias of Rh) + bias of Wh)
        h' = (1 - z) * c + z * h

    x[n, b, in], w[dirs, 3h, in], r[dirs, 3h, h], bias[dirs, 6h], initial[dirs, b, h] → y[n, dirs, b, h],
    last[dirs, b, h].
    """

    name = "gru"
    gates = 3
    attributes: ClassVar[Mapping[str, Attr]] = {**Recurrent.attributes, "linear_before_reset": Attr("bool", False)}

    def step(
        self, attrs: Mapping[str, Any], xs: list[Array], h: list[Array], r: list[Array], rb: list[Array]
    ) -> list[Array]:
        z = sigmoid(xs[0] + h[0] @ r[0] + rb[0])
        reset = sigmoid(xs[1] + h[0] @ r[1] + rb[1])
        inner = reset * (h[0] @ r[2] + rb[2]) if attrs["linear_before_reset"] else (reset * h[0]) @ r[2] + rb[2]
        return [(1 - z) * np.tanh(xs[2] + inner) + z * h[0]]

    def build_step(
        self, b: Builder, attrs: Mapping[str, Any], xs: list[Value], h: list[Value], r: list[Value], rb: list[Value]
    ) -> list[Value]:
        z, reset = (b("sigmoid", b.add(b.add(xs[k], b.matmul(h[0], r[k])), rb[k])) for k in (0, 1))
        if attrs["linear_before_reset"]:
            inner = b.mul(reset, b.add(b.matmul(h[0], r[2]), rb[2]))
        else:
            inner = b.add(b.matmul(b.mul(reset, h[0]), r[2]), rb[2])
        c = b("tanh", b.add(xs[2], inner))
        return [b.add(b.mul(b.sub(1.0, z), c), b.mul(z, h[0]))]

    def samples(self) -> Iterable[Sample]:
        for sample in super().samples():
            yield sample
            yield Sample(sample.inputs, {**sample.attrs, "linear_before_reset": True})


class Lstm(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, Gers et al. 2000) as ONNX LSTM without peepholes, gates
    in the order i, o, f, c; s is the sigmoid:

        i, o, f = s(x W^T + h R^T + biases)        g = tanh(x Wc^T + h Rc^T + biases)
        c' = f * c + i * g                          h' = o * tanh(c')

    x[n, b, in], w[dirs, 4h, in], r[dirs, 4h, h], bias[dirs, 8h], initial h and c [dirs, b, h] → y[n, dirs, b, h],
    last h and c [dirs, b, h].
    """

    name = "lstm"
    inputs = ("x", "w", "r", "bias?", "initial_h?", "initial_c?")
    gates = 4
    carried = 2

    def step(
        self, attrs: Mapping[str, Any], xs: list[Array], h: list[Array], r: list[Array], rb: list[Array]
    ) -> list[Array]:
        i, o, f, g = (xs[k] + h[0] @ r[k] + rb[k] for k in range(4))
        c = sigmoid(f) * h[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]

    def build_step(
        self, b: Builder, attrs: Mapping[str, Any], xs: list[Value], h: list[Value], r: list[Value], rb: list[Value]
    ) -> list[Value]:
        i, o, f, g = (b.add(b.add(xs[k], b.matmul(h[0], r[k])), rb[k]) for k in range(4))
        c = b.add(b.mul(b("sigmoid", f), h[1]), b.mul(b("sigmoid", i), b("tanh", g)))
        return [b.mul(b("sigmoid", o), b("tanh", c)), c]


OPS: tuple[Operator, ...] = (Rnn(), Gru(), Lstm())
