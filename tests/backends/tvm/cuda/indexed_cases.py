"""Small graphs for the kernels that choose elements of a row, write at indices, or widen weights in few bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnc.ir import Array, DType
from attnc.tests.backends.tvm.cuda.making import F64, INT, Case, F, H, M, Making, N

__all__ = ["indexed"]


def indexed() -> list[Case]:
    return [*_selected(), *_scattered(), *_quantised()]


def _selected() -> list[Case]:
    made = []
    for width, dtype in ((7, F), (40, H), (5000, F), (30, INT), (64, F64)):
        m = Making(f"argmax_{width}_{dtype}")
        made.append(m.done(m.b("argmax", m.x((N, width), dtype)), lambda x: x.argmax(-1), {"n": 9}))
    m = Making("argmin_last")
    found = m.b("argmin", m.x((N, M), INT), axis=1, last=True, keepdims=True)
    lengths = ({"n": 9, "m": k} for k in (1, 30, 700))
    made.append(m.done(found, lambda x: x.shape[1] - 1 - x[:, ::-1].argmin(1, keepdims=True), *lengths))
    m = Making("argmax_first_axis")
    made.append(m.done(m.b("argmax", m.x((N, 30)), axis=0), lambda x: x.argmax(0), {"n": 20}))
    m = Making("argmax_nan")
    x = np.array([[1, np.nan, 2, np.nan], [-np.inf, -np.inf, -np.inf, -np.inf], [0, -0.0, np.inf, np.inf]])
    made.append(m.ends(m.b("argmax", m.x((N, 4))), lambda x: x.argmax(-1), x))
    for width, k, largest, dtype in ((8, 3, True, F), (8, 8, False, INT), (1000, 5, True, H), (80, 70, True, F)):
        for which in (0, 1):
            m = Making(f"top_{width}_{k}_{dtype}_{which}")
            out = m.b.multi("top_k", m.x((N, width), dtype), k=k, largest=largest)[which]
            made.append(m.done(out, _top(k, largest, which), {"n": 3}))
    return made


def _top(k: int, largest: bool, which: int) -> Callable[[Array], Array]:
    def reference(x: Array) -> Array:
        order = np.argsort(-x if largest else x, axis=-1, kind="stable")[:, :k]
        return np.asarray(order if which else np.take_along_axis(x, order, -1))

    return reference


def _scattered() -> list[Case]:
    made = []
    folds: dict[str, Callable[[object, object], object]] = {
        "none": lambda old, new: new, "add": lambda old, new: old + new, "mul": lambda old, new: old * new,  # type: ignore[operator]
        "min": min, "max": max,  # type: ignore[dict-item]
    }  # fmt: skip
    for name, fold in folds.items():
        m = Making(f"scatter_elements_{name}")
        x, places, new = m.x((N, 4)), m.x((N, M), INT), m.x((N, M))
        out = m.b("scatter_elements", x, places, new, axis=1, reduction=name)

        def by_elements(x: Array, at: Array, new: Array, fold: Callable[..., object] = fold) -> Array:
            y = x.copy()
            for i, j in np.ndindex(*at.shape):
                y[i, at[i, j]] = fold(y[i, at[i, j]], new[i, j])
            return y

        made.append(m.done(out, by_elements, {"n": 5, "m": 3}, {"n": 40, "m": 9}))
        m = Making(f"scatter_nd_{name}")
        x, places, new = m.x((4, 3, M)), m.x((N, 1), INT), m.x((N, 3, M))
        out = m.b("scatter_nd", x, places, new, reduction=name)

        def by_rows(x: Array, at: Array, new: Array, fold: Callable[..., object] = fold) -> Array:
            y = x.copy()
            for i in range(len(at)):
                for j in np.ndindex(*new.shape[1:]):
                    y[(at[i, 0], *j)] = fold(y[(at[i, 0], *j)], new[(i, *j)])
            return y

        made.append(m.done(out, by_rows, {"n": 3, "m": 2}, {"n": 7, "m": 90}))
    m = Making("scatter_outside")  # dropped, where NumPy would raise
    x, places, new = m.x((N, 2)), m.x((N, 3), INT), m.x((N, 3))

    def inside_only(x: Array, at: Array, new: Array) -> Array:
        y = x.copy()
        for i, j in np.ndindex(*at.shape):
            if -2 <= at[i, j] < 2:
                y[i, at[i, j]] = new[i, j]
        return y

    made.append(m.done(m.b("scatter_elements", x, places, new, axis=1), inside_only, {"n": 30}))
    m = Making("scatter_single")
    x, places, new = m.x((5, 4), H), m.x((N, 2, 2), INT), m.x((N, 2), H)

    def one_by_one(x: Array, at: Array, new: Array) -> Array:
        y = x.copy()
        for i in np.ndindex(*new.shape):
            y[tuple(at[i])] = new[i]
        return y

    made.append(m.done(m.b("scatter_nd", x, places, new), one_by_one, {"n": 2}, {"n": 60}))
    return made


def _quantised() -> list[Case]:
    """The others are in ``test_kernels_quantised``."""
    m = Making("quantised")
    x, packed, scales = m.x((3, 1040)), m.x((6, 130, 8), DType.UINT8), m.x((6, 130))

    def reference(x: Array, packed: Array, scales: Array) -> Array:
        return np.asarray(x @ ((packed - 128.0) * scales[..., None]).reshape(6, 1040).T)

    return [m.done(m.b("quantised_matmul", x, packed, scales, bits=8, block=8), reference)]
