"""Causal attention whose weights are the products of query and key themselves, in time linear in the length.

The keys and values before a chunk of tokens stand in one matrix, the sum of k vᵀ; inside a chunk the weights are taken
one by one (Katharopoulos et al. 2020, equations 9 to 12; by chunks: Hua et al. 2022, FLASH, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx

from ..spec import Kernel, Read
from .emit import Emit, number, same
from .loops import halved, unflatten
from .matmul import multiply_tile
from .scalar import wide
from .tree import Scope, store

__all__ = ["build_linear"]

_ROWS = 8


def build_linear(kernel: Kernel) -> Any:
    """``outs[0]`` [b, h, n, c] from the trees q [b, h, n, d], k [b, g, n, d] and v [b, g, n, c]."""
    emit = Emit(kernel.name)
    _Chunks(kernel, emit).build()
    return emit.function()


class _Chunks:
    def __init__(self, kernel: Kernel, emit: Emit) -> None:
        self.emit, self.kernel = emit, kernel
        self.scope = Scope(kernel, emit)
        self.out = kernel.outs[0]
        self.q, self.k, self.v = (t for t in kernel.trees[:3] if isinstance(t, Read))
        self.dtype = wide(self.out.dtype)
        d, c = self.q.shape[3], self.v.shape[3]
        assert isinstance(d, int)
        assert isinstance(c, int)
        self.width, self.values = d, c
        self.tall = -(-d // _ROWS) * _ROWS
        self.chunk: int = kernel.option("chunk")
        self.lanes: int = min(self.chunk, kernel.option("lanes"))
        self.n = self.scope.size(self.q.shape[2])
        self.shares = kernel.option("normalise") == "sum"

    def lanes_of(self, width: int) -> int:
        lanes = self.lanes
        while width % lanes:
            lanes //= 2
        return lanes

    def vector(self, length: int, body: Any) -> None:
        """``body(at)`` over a constant length in vectors."""
        lanes = self.lanes_of(length)
        kind = "vector" if lanes > 1 else "serial"
        with self.emit.loop(length // lanes, name="u") as u, self.emit.loop(lanes, kind, "v") as v:
            body(u * number(lanes) + v)

    def columns(self) -> Iterator[tuple[Any, int]]:
        """The columns of the values, two vectors at a time and then one: the first, and how many."""
        lanes, done = self.lanes_of(self.values), 0
        while done < self.values:
            width = 2 * lanes if self.values - done >= 2 * lanes else lanes
            count = (self.values - done) // width
            with self.emit.loop(count, name="C") as chunk:
                yield self.emit.let(number(done) + chunk * number(width)), width
            done += count * width

    def build(self) -> None:
        emit, scope, dtype = self.emit, self.scope, self.dtype
        heads = (self.q.shape[0], self.q.shape[1])
        zero = tirx.const(0.0, dtype)
        with emit.loop(scope.size(heads[0]) * scope.size(heads[1]), "parallel", "t") as t:
            b, h = (emit.let(x) for x in unflatten(scope, t, heads))
            g = emit.let(tirx.floordiv(h, number(self.kernel.option("repeat"))))
            self.state = emit.local(dtype, self.tall * self.values, "state")
            self.keys = emit.local(dtype, self.tall, "keys")
            self.queries = emit.local(dtype, self.chunk * self.width, "q")
            self.turned = emit.local(dtype, self.tall * self.chunk, "k")
            self.scores = emit.local(dtype, self.chunk * self.chunk, "s")
            self.totals = emit.local(dtype, self.chunk, "total")
            self.vector(self.tall * self.values, lambda x: emit.store(self.state, x, zero))
            self.vector(self.tall, lambda x: emit.store(self.keys, x, zero))
            self.vector(self.tall * self.chunk, lambda x: emit.store(self.turned, x, zero))
            chunks = tirx.floordiv(self.n + number(self.chunk - 1), number(self.chunk))
            with emit.loop(chunks, name="J") as step:
                first = emit.let(step * number(self.chunk), "row")
                count = emit.let(tirx.min(number(self.chunk), self.n - first))
                groups = emit.let(tirx.floordiv(count + number(_ROWS - 1), number(_ROWS)))
                self.read(b, h, g, first, count)
                self.weigh(groups)
                self.write(b, h, g, first, count, groups)
                self.carry(b, g, first, count)

    def read(self, b: Any, h: Any, g: Any, first: Any, count: Any) -> None:
        """The queries by row and the keys by feature; behind the last token stands what is never read, or zero."""
        emit, load = self.emit, self.scope.load
        scale = tirx.const(self.kernel.option("scale"), self.dtype)
        with emit.loop(self.chunk, name="r") as r:
            row = emit.let(first + tirx.min(r, count - number(1)))
            self.vector(
                self.width,
                lambda x: emit.store(self.queries, r * number(self.width) + x, load(self.q, [b, h, row, x]) * scale),
            )
            with emit.loop(self.width, name="x") as x:
                key = tirx.Select(r < count, load(self.k, [b, g, row, x]), tirx.const(0.0, self.dtype))
                emit.store(self.turned, x * number(self.chunk) + r, key)

    def weigh(self, groups: Any) -> None:
        """The products of the chunk's queries and keys; those of later keys are zero."""
        emit, dtype, chunk, lanes = self.emit, self.dtype, self.chunk, self.lanes
        panel = min(2 * lanes, chunk)
        zero = tirx.const(0.0, dtype)
        with emit.loop(groups, name="R") as block, emit.loop(chunk // panel, name="P") as p:
            sums = emit.local(dtype, _ROWS * panel, "acc")
            self.vector(_ROWS * panel, lambda x: emit.store(sums, x, zero))
            with emit.when(p * number(panel) < (block + number(1)) * number(_ROWS)):
                multiply_tile(
                    emit, sums, _ROWS, panel, lanes, number(self.width),
                    lambda r, k: self.queries[(block * number(_ROWS) + number(r)) * number(self.width) + k],
                    lambda k, w: self.turned[k * number(chunk) + p * number(panel) + w],
                )  # fmt: skip
            for r in range(_ROWS):
                row = block * number(_ROWS) + number(r)
                for w in range(0, panel, lanes):
                    with emit.loop(lanes, "vector" if lanes > 1 else "serial") as v:
                        j = p * number(panel) + number(w) + v
                        value = tirx.Select(j <= row, sums[number(r * panel + w) + v], zero)
                        emit.store(self.scores, row * number(chunk) + j, value)

    def write(self, b: Any, h: Any, g: Any, first: Any, count: Any, groups: Any) -> None:
        """The rows of the result: the chunk's own weights times its values, and the queries times the sum before."""
        emit, dtype, chunk = self.emit, self.dtype, self.chunk
        lanes = self.lanes_of(self.values)
        zero, one = tirx.const(0.0, dtype), tirx.const(1.0, dtype)
        if self.shares:
            self.total(count)
        with emit.loop(groups, name="R") as block:
            top = emit.let(tirx.min(count, (block + number(1)) * number(_ROWS)))
            for column, width in self.columns():
                sums = emit.local(dtype, _ROWS * width, "acc")
                kind = "vector" if lanes > 1 else "serial"
                for z in range(0, _ROWS * width, lanes):
                    with emit.loop(lanes, kind) as v:
                        emit.store(sums, number(z) + v, zero)
                multiply_tile(
                    emit, sums, _ROWS, width, lanes, top,
                    lambda r, k, block=block: self.scores[(block * number(_ROWS) + number(r)) * number(chunk) + k],
                    lambda k, w, column=column: self.scope.load(self.v, [b, g, first + k, column + w]),
                )  # fmt: skip
                multiply_tile(
                    emit, sums, _ROWS, width, lanes, number(self.width),
                    lambda r, k, block=block: self.queries[
                        (block * number(_ROWS) + number(r)) * number(self.width) + k
                    ],
                    lambda k, w, column=column: self.state[k * number(self.values) + column + w],
                )  # fmt: skip
                for r in range(_ROWS):
                    row = emit.let(block * number(_ROWS) + number(r))
                    with emit.when(row < count):
                        total = emit.let(self.totals[row]) if self.shares else one
                        factor = emit.let(one / tirx.Select(same(total, zero), one, total)) if self.shares else one
                        for w in range(0, width, lanes):
                            with emit.loop(lanes, kind) as v:
                                place = [b, h, first + row, column + number(w) + v]
                                value = sums[number(r * width + w) + v] * factor
                                pointer = self.scope.pointers[self.out.pointer]
                                store(emit, pointer, self.scope.flat(self.out, place), value, self.out.dtype)

    def total(self, count: Any) -> None:
        """The sums of each query's weights: those in the chunk, and its product with the sum of the keys before."""
        emit, dtype = self.emit, self.dtype

        def dot(length: int, body: Any) -> Any:
            lanes = self.lanes_of(length)
            kind = "vector" if lanes > 1 else "serial"
            part = emit.local(dtype, lanes, "part")
            with emit.loop(lanes, kind, "v") as v:
                emit.store(part, v, tirx.const(0.0, dtype))
            with emit.loop(length // lanes, name="u") as u, emit.loop(lanes, kind, "v") as v:
                emit.store(part, v, part[v] + body(u * number(lanes) + v))
            return halved(emit, part, lanes, lambda x, y: x + y)

        with emit.loop(count, name="r") as r:
            own = emit.let(dot(self.chunk, lambda x: self.scores[r * number(self.chunk) + x]))
            before = dot(self.width, lambda x: self.queries[r * number(self.width) + x] * self.keys[x])
            emit.store(self.totals, r, own + before)

    def carry(self, b: Any, g: Any, first: Any, count: Any) -> None:
        """The chunk's keys and values join the sum."""
        emit, dtype, chunk = self.emit, self.dtype, self.chunk
        lanes = self.lanes_of(self.values)
        kind = "vector" if lanes > 1 else "serial"
        with emit.loop(self.tall // _ROWS, name="R") as block:
            for column, width in self.columns():
                sums = emit.local(dtype, _ROWS * width, "acc")

                def move(
                    out: bool, block: Any = block, column: Any = column, sums: Any = sums, width: int = width
                ) -> None:
                    for r in range(_ROWS):
                        for w in range(0, width, lanes):
                            with emit.loop(lanes, kind) as v:
                                row = block * number(_ROWS) + number(r)
                                at = row * number(self.values) + column + number(w) + v
                                here = number(r * width + w) + v
                                emit.store(*((self.state, at, sums[here]) if out else (sums, here, self.state[at])))

                move(False)
                multiply_tile(
                    emit, sums, _ROWS, width, lanes, count,
                    lambda r, k, block=block: self.turned[(block * number(_ROWS) + number(r)) * number(chunk) + k],
                    lambda k, w, column=column: self.scope.load(self.v, [b, g, first + k, column + w]),
                )  # fmt: skip
                move(True)
        if self.shares:
            with emit.loop(self.width, name="x") as x, emit.loop(count, name="j") as j:
                emit.store(self.keys, x, self.keys[x] + self.turned[x * number(chunk) + j])
