"""Small graphs for the kernels that every model needs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attnc.ir import Array, DType
from attnc.tests.backends.tvm.cuda.indexed_cases import indexed
from attnc.tests.backends.tvm.cuda.making import F64, INT, ROUNDING, B, Case, F, H, M, Making, N

__all__ = ["ROUNDING", "Case", "cases"]


def cases() -> list[Case]:
    """All of them."""
    return [
        *_maps(),
        *_moves(),
        *_rows(),
        *_reductions(),
        *_running(),
        *indexed(),
        *_ends(),
    ]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _maps() -> list[Case]:
    made = []
    # A row of any length: vectors where a block is whole, the rest one by one.
    m = Making("exp")
    lengths = ({"n": n} for n in (0, 1, 3, 1024, 1027, 4099))
    made.append(m.done(m.b("exp", m.x((N,))), np.exp, *lengths))
    for dtype in (F, H, B, F64):
        m = Making(f"bias_gelu_{dtype}")
        x, bias = m.x((N, 48), dtype), m.x((48,), dtype)
        made.append(m.done(m.b("gelu", m.b.add(x, bias)), lambda x, b: _gelu(x + b), {"n": 3}, {"n": 37}))
    # Rows that are multiples of a vector, and others.
    m = Making("ragged")
    x, y = m.x((N, M)), m.x((M,))
    lengths = ({"n": 5, "m": k} for k in (1, 7, 8, 130))
    made.append(m.done(m.b("tanh", m.b.mul(x, y)), lambda x, y: np.tanh(x * y), *lengths))
    m = Making("columns")
    x, y = m.x((N, M)), m.x((N, 1))
    made.append(m.done(m.b.sub(x, y), lambda x, y: x - y, {"n": 5, "m": 12}, {"n": 3, "m": 5}))
    m = Making("chosen")
    x, y = m.x((N, 20)), m.x((N, 20))
    truth = m.b("and", m.b("less", x, y), m.b("not", m.b("is_nan", x)))
    made.append(m.done(m.b("where", truth, x, y), np.minimum, {"n": 9}))
    m = Making("truth")
    x, y = m.x((N, 24)), m.x((N, 24))
    made.append(m.done(m.b("or", m.b("less", x, y), m.b("greater", x, 1.0)), lambda x, y: (x < y) | (x > 1), {"n": 9}))
    m = Making("truths")  # operands of one byte
    x, y = (m.b.cast(m.x((N,), INT), DType.BOOL) for _ in range(2))
    graph = m.case.graph
    graph.add_output(x, "kept")
    graph.add_output(y, "too")
    both = m.b("xor", x, y)
    made.append(m.done(both, lambda x, y: (x != 0) ^ (y != 0), {"n": 700}, {"n": 5000}))
    m = Making("integers")
    x, y = m.x((N,), INT), m.x((N,), INT)
    formula = m.b.add(m.b("mod", x, 4), m.b.mul(m.b("abs", y), m.b("sign", x)))
    made.append(m.done(formula, lambda x, y: x % 4 + abs(y) * np.sign(x), {"n": 1030}))
    m = Making("casts")
    x = m.x((N, 16), INT)
    made.append(m.done(m.b.cast(m.b.cast(m.b.mul(x, x), F), H), lambda x: x * x, {"n": 11}))
    m = Making("scalar")
    x = m.x(())
    made.append(m.done(m.b("sigmoid", x), lambda x: 1 / (1 + np.exp(-x))))
    return made


def _moves() -> list[Case]:
    made = []
    m = Making("gather")
    x, chosen = m.x((50, 32), H), m.x((N,), INT)
    made.append(m.done(m.b("gather", x, chosen, axis=0), lambda x, i: x[i], {"n": 7}, {"n": 130}))
    m = Making("gather_beyond")  # never outside the tensor
    x, chosen = m.x((2, 32)), m.x((N,), INT)
    made.append(
        m.done(m.b("gather", x, chosen, axis=0), lambda x, i: x[np.where(i < 0, i + 2, i).clip(0, 1)], {"n": 99})
    )
    m = Making("gather_last")
    x, chosen = m.x((N, 32)), m.x((5,), INT)
    made.append(m.done(m.b("gather", x, chosen, axis=1), lambda x, i: x[:, i], {"n": 7}))
    m = Making("gather_elements")
    x, chosen = m.x((9, 16)), m.x((N, 16), INT)
    made.append(m.done(m.b("gather_elements", x, chosen, axis=0), lambda x, i: np.take_along_axis(x, i, 0), {"n": 7}))
    m = Making("pad")
    x = m.x((N, 8))
    padded = m.b("pad", x, 2.0, before=(1, 4), after=(2, 4))
    made.append(m.done(padded, lambda x: np.pad(x, ((1, 2), (4, 4)), constant_values=2.0), {"n": 5}))
    m = Making("transpose")
    x = m.x((N, M))
    made.append(m.done(m.b.transpose(x, (1, 0)), lambda x: x.T, {"n": 70, "m": 45}, {"n": 1, "m": 33}))
    m = Making("transpose_more")
    x, y, z = m.x((3, 40, N)), m.x((3, N, 40)), m.x((40,))
    turned = m.b.add(m.b("exp", m.b.mul(m.b.transpose(x, (0, 2, 1)), z)), y)
    made.append(m.done(turned, lambda x, y, z: np.exp(x.swapaxes(1, 2) * z) + y, {"n": 0}, {"n": 9}, {"n": 65}))
    for dtype in (H, DType.BOOL):
        m = Making(f"heads_{dtype}")
        x = m.x((N, 6, 40, 3), INT if dtype is DType.BOOL else dtype)
        x = m.b.cast(x, dtype) if dtype is DType.BOOL else x
        swapped = m.b.transpose(x, (0, 1, 3, 2))
        how = (lambda x: x.swapaxes(2, 3) != 0) if dtype is DType.BOOL else (lambda x: x.swapaxes(2, 3))
        made.append(m.done(swapped, how, {"n": 2}))
    m = Making("slice")  # a row begins where no vector may
    x = m.x((N, 20))
    cut = m.b("slice", x, axes=(1,), starts=(1,), sizes=(16,), steps=(1,))
    made.append(m.done(m.b("neg", cut), lambda x: -x[:, 1:17], {"n": 6}))
    m = Making("backwards")
    x = m.x((N, 20))
    cut = m.b("slice", x, axes=(1,), starts=(19,), sizes=(8,), steps=(-2,))
    made.append(m.done(m.b("neg", cut), lambda x: -x[:, 19:3:-2], {"n": 6}))
    m = Making("concat")
    x, y = m.x((N, 12)), m.x((N, 5))
    joined = m.b("concat", x, m.b("exp", y), x, axis=1)
    made.append(m.done(joined, lambda x, y: np.concatenate([x, np.exp(y), x], 1), {"n": 100}))
    m = Making("rope")
    x, cos, sin = m.x((2, N, 4, 20)), m.x((2, N, 1, 8)), m.x((2, N, 1, 8))
    tables = [m.b.reshape(t, (2, N, 8)) for t in (cos, sin)]
    turned = m.b("rope", m.b.transpose(x, (0, 2, 1, 3)), *tables, rotary_dim=16)
    turned = m.b.transpose(turned, (0, 2, 1, 3))
    made.append(m.done(turned, _rope, {"n": 9}))
    m = Making("iota")
    numbers = m.b("iota", shape=(N, 8), axis=0, start=-2, step=3)
    made.append(
        m.done(m.b.add(m.x((N, 8), INT), numbers), lambda x: x + (np.arange(len(x)) * 3 - 2)[:, None], {"n": 6})
    )
    return made


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., :8], x[..., 8:16]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 16:]], -1)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _norm(x: Array, weight: Array, bias: Array | None, centred: bool) -> Array:
    x = x - x.mean(-1, keepdims=True) if centred else x
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return np.asarray(y if bias is None else y + bias)


def _rows() -> list[Case]:
    made = []
    # Groups of one thread, of a part of a warp, of a warp, of a block; rows in registers, and one that is too long.
    for width, dtype in ((1, F), (3, F), (20, F), (100, F), (130, H), (1000, F), (33000, F), (64, F64), (40, B)):
        m = Making(f"softmax_{width}_{dtype}")
        made.append(m.done(m.b("softmax", m.x((N, width), dtype), axis=-1), _softmax, {"n": 1}, {"n": 5}))
    m = Making("softmax_any")
    lengths = ({"n": 3, "m": k} for k in (1, 7, 128, 1000, 1001))
    made.append(m.done(m.b("softmax", m.b.mul(m.x((N, M)), 3.0), axis=-1), lambda x: _softmax(3 * x), *lengths))
    for width, dtype in ((24, F), (768, F), (768, H), (1500, F), (33000, F), (100, F64)):
        m = Making(f"layer_norm_{width}_{dtype}")
        m.low = 1.0
        normed = m.b("layer_norm", m.x((N, width), dtype), *(m.x((width,), dtype) for _ in "wb"), axis=-1, eps=1e-5)
        made.append(m.done(normed, lambda x, w, b: _norm(x, w, b, True), {"n": 3}))
    for width, dtype in ((64, F), (96, B), (4096, H)):
        m = Making(f"rms_norm_{width}_{dtype}")
        x, y = m.x((N, width), dtype), m.x((N, width), dtype)
        normed = m.b("rms_norm", m.b.add(x, y), m.x((width,), dtype), axis=-1, eps=1e-5)
        made.append(m.done(normed, lambda x, y, w: _norm(x + y, w, None, False), {"n": 3}))
    return made


def _reductions() -> list[Case]:
    made = []
    ways = {
        "sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod,
    }  # fmt: skip
    for name, how in ways.items():
        m = Making(f"reduce_{name}")
        x = m.x((N, M))
        found = m.b(f"reduce_{name}", m.b("tanh", x), axes=(1,), keepdims=False)
        lengths = ({"n": 5, "m": k} for k in (1, 40, 1030))
        made.append(m.done(found, lambda x, h=how: h(np.tanh(x), axis=1), *lengths))
    for axes, dtype in (((0,), F), ((1,), H), ((0, 2), F), ((0, 1, 2), F), ((0, 1), INT), ((2,), INT)):
        m = Making(f"reduce_{'_'.join(map(str, axes))}_{dtype}")
        found = m.b("reduce_sum", m.x((N, 6, 40), dtype), axes=axes, keepdims=True)
        made.append(m.done(found, lambda x, a=axes: x.sum(a, keepdims=True), {"n": 3}, {"n": 90}))
    for name in ("all", "any"):
        m = Making(f"reduce_{name}")
        truth = m.b("greater", m.x((N, 30), INT), 2 if name == "any" else -3)
        how = np.any if name == "any" else np.all
        bound = 2 if name == "any" else -3
        found = m.b(f"reduce_{name}", truth, axes=(1,), keepdims=False)
        made.append(m.done(found, lambda x, h=how, c=bound: h(x > c, axis=1), {"n": 70}))
    m = Making("reduce_narrow")
    found = m.b("reduce_max", m.b.cast(m.x((N, 40), INT), DType.INT8), axes=(1,), keepdims=False)
    made.append(m.done(found, lambda x: x.max(1), {"n": 70}))
    return made


def _running() -> list[Case]:
    made = []
    for dtype in (F, H, INT, F64):
        m = Making(f"cumsum_{dtype}")
        sums = m.b("cumsum", m.x((N, M), dtype), axis=1, exclusive=False, reverse=False)
        made.append(m.done(sums, lambda x: np.cumsum(x, 1), {"n": 3, "m": 5}, {"n": 2, "m": 700}))
    m = Making("cumsum_beside")
    sums = m.b("cumsum", m.x((N, 30)), axis=0, exclusive=False, reverse=True)
    made.append(m.done(sums, lambda x: np.cumsum(x[::-1], 0)[::-1], {"n": 40}))
    m = Making("cumsum_before")
    sums = m.b("cumsum", m.x((N, 300)), axis=1, exclusive=True, reverse=True)
    made.append(m.done(sums, lambda x: np.cumsum(x[:, ::-1], 1)[:, ::-1] - x, {"n": 3}))
    m = Making("cumprod")
    m.low = 1.0
    products = m.b("cumprod", m.x((N, 30)), axis=1, exclusive=True, reverse=False)

    def reference(x: Array) -> Array:
        return np.cumprod(np.concatenate([np.ones((len(x), 1)), x[:, :-1]], 1), 1)

    made.append(m.done(products, reference, {"n": 3}))
    return made


def _ends() -> list[Case]:
    made = []
    inf, nan = np.inf, np.nan
    ends = np.array([-inf, -1e30, -200, -88, -20, -1, -1e-6, 0, 1e-6, 1, 20, 88, 200, 1e30, inf, nan])
    functions: dict[str, Callable[[Array], Array]] = {
        "exp": np.exp, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "erf": _erf, "gelu": _gelu,
        "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.logaddexp(x, 0), "relu": lambda x: x.clip(0),
        "round": np.round,
    }  # fmt: skip
    for name, how in functions.items():
        m = Making(f"ends_{name}")
        made.append(m.ends(m.b(name, m.x((N,))), how, np.append(ends, [0.5, 1.5, -2.5]) if name == "round" else ends))
    rows = np.linspace(-3, 3, 5 * 20).reshape(5, 20)
    rows[0], rows[1, 3:], rows[2, 4], rows[3, 5] = -inf, -inf, inf, nan
    for name, width in (("held", 20), ("read_again", M)):
        m = Making(f"ends_softmax_{name}")
        made.append(m.ends(m.b("softmax", m.x((N, width)), axis=-1), _softmax, rows))
    for name, how in (("max", np.max), ("min", np.min)):
        m = Making(f"ends_reduce_{name}")
        found = m.b(f"reduce_{name}", m.x((N, M)), axes=(1,), keepdims=False)
        made.append(m.ends(found, lambda x, h=how: h(x, axis=1), rows))
    return made
