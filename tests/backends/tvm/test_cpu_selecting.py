"""Positions of the largest, the k largest, writes by index and convolutions on tvm-cpu, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.backends.tvm.executor import TvmExecutable
from attnc.ir import Array, Builder, DType, Graph, TensorType, Value, symbol

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

F = DType.FLOAT32


def loaded(graph: Graph) -> TvmExecutable:
    executable = TvmCpuBackend().load(graph, None, Options())
    assert isinstance(executable, TvmExecutable)
    return executable


def run(make: Any, feeds: dict[str, Array], free: tuple[str, ...] = ()) -> dict[str, Array]:
    """The outputs of what ``make(b, inputs…)`` gives by name, and nothing of it computed by NumPy."""
    graph = Graph()
    b = Builder(graph)
    inputs = []
    for name, array in feeds.items():
        shape = tuple(symbol(f"n{d}") if name in free and d > 2 else d for d in array.shape)
        inputs.append(graph.add_input(name, TensorType(DType.parse(array.dtype.name), shape)))
    for name, value in make(b, *inputs).items():
        graph.add_output(value, name)
    executable = loaded(graph)
    assert not executable.plan.callbacks
    return executable.run(feeds, {})


def rows() -> Array:
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 50, size=(7, 333)).astype(np.float32)  # many equal elements
    x[1, [5, 200]] = np.nan
    x[2] = -np.inf
    x[3] = np.inf
    x[4] = np.sort(x[4])
    return x


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("free", [(), ("x",)], ids=["static", "symbolic"])
def test_positions(axis: int, free: tuple[str, ...]) -> None:
    x = rows()

    def make(b: Builder, v: Value) -> dict[str, Value]:
        return {
            f"{op}{last}": b(op, v, axis=axis, last=last) for op in ("argmax", "argmin") for last in (False, True)
        }  # fmt: skip

    got = run(make, {"x": x}, free)
    for op, fn in (("argmax", np.argmax), ("argmin", np.argmin)):
        np.testing.assert_array_equal(got[f"{op}False"], fn(x, axis))
        np.testing.assert_array_equal(got[f"{op}True"], x.shape[axis] - 1 - fn(np.flip(x, axis), axis))


def test_positions_of_other_kinds() -> None:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {
        "half": rng.normal(size=(3, 100)).astype(np.float16),
        "whole": rng.integers(-9, 9, size=(3, 100)).astype(np.int8),
        "flag": rng.random(size=(3, 100)) > 0.5,
    }
    got = run(lambda b, *v: {x.name: b("argmax", x, axis=-1, keepdims=True) for x in v}, feeds)
    for name, x in feeds.items():
        np.testing.assert_array_equal(got[name], x.argmax(-1, keepdims=True))


@pytest.mark.parametrize("k", [1, 2, 8, 64])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_largest(k: int, axis: int) -> None:
    x = rows() if axis == 1 else rows().T.copy()

    def make(b: Builder, v: Value) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for largest in (True, False):
            values, places = b.graph.add("top_k", v, attrs={"k": k, "axis": axis, "largest": largest})
            found |= {f"values{largest}": values, f"places{largest}": places}
        return found

    got = run(make, {"x": x}, ("x",))
    wide = np.where(np.isnan(x), np.inf, x.astype(np.float64))
    above = np.isnan(x).astype(np.int64)  # NaN is above infinity
    for largest, sign in ((True, -1), (False, 1)):
        order = np.lexsort((sign * wide, sign * above), axis)
        want = np.take(order, np.arange(k), axis)
        np.testing.assert_array_equal(got[f"places{largest}"], want)
        np.testing.assert_array_equal(got[f"values{largest}"], np.take_along_axis(x, want, axis))


def test_many_of_the_largest_are_left_to_numpy() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (3, 500)))
    graph.add_output(graph.add("top_k", x, attrs={"k": 400})[0], "y")
    executable = loaded(graph)
    assert executable.plan.callbacks == ["top_k"]
    data = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32)
    np.testing.assert_array_equal(executable.run({"x": data}, {})["y"], -np.sort(-data)[:, :400])


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new, "add": lambda old, new: old + new, "mul": lambda old, new: old * new,
    "min": min, "max": max,
}  # fmt: skip


@pytest.mark.parametrize("free", [(), ("x", "indices", "updates")], ids=["static", "symbolic"])
def test_writes(free: tuple[str, ...]) -> None:
    """Repeated, negative and foreign indices; the last axis of updates is a whole number of vectors or not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 19)).astype(np.float32)
    indices = rng.integers(-5, 5, size=(9, 2))
    indices[3] = [7, 0]  # outside: dropped
    updates = rng.normal(size=(9, 19)).astype(np.float32)

    def make(b: Builder, *v: Value) -> dict[str, Value]:
        return {how: b("scatter_nd", *v, reduction=how) for how in REDUCTIONS}

    got = run(make, {"x": x, "indices": indices, "updates": updates}, free)
    for how, fn in REDUCTIONS.items():
        want = x.astype(np.float64)
        for at, new in zip(indices, updates, strict=True):
            if at[0] < 6:
                want[tuple(at)] = [fn(a, b) for a, b in zip(want[tuple(at)], new, strict=True)]
        np.testing.assert_allclose(got[how], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_writes_along_an_axis(axis: int) -> None:
    rng = np.random.default_rng(axis)
    x = rng.normal(size=(6, 5, 7)).astype(np.float32)
    indices = rng.integers(-5, 5, size=(4, 3, 6))
    updates = rng.normal(size=(4, 3, 6)).astype(np.float32)
    feeds = {"x": x, "indices": indices.astype(np.int32), "updates": updates}
    got = run(lambda b, *v: {how: b("scatter_elements", *v, axis=axis, reduction=how) for how in REDUCTIONS}, feeds)
    for how, fn in REDUCTIONS.items():
        want = x.astype(np.float64)
        for at in np.ndindex(indices.shape):
            place = [*at]
            place[axis] = indices[at]
            want[tuple(place)] = fn(want[tuple(place)], updates[at])
        np.testing.assert_allclose(got[how], want, rtol=1e-5, atol=1e-6)


def convolved(x: Array, w: Array, bias: Array | None, attrs: dict[str, Any]) -> Array:
    """The definition, element by element of the window, in float64."""
    rank, groups = x.ndim - 2, attrs.get("groups", 1)
    strides, dilations = attrs.get("strides", (1,) * rank), attrs.get("dilations", (1,) * rank)
    before, after = attrs.get("before", (0,) * rank), attrs.get("after", (0,) * rank)
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(before, after, strict=True)])
    each, channels = w.shape[0] // groups, w.shape[1]
    space = [
        (n - (t - 1) * d - 1) // s + 1 for n, t, d, s in zip(x.shape[2:], w.shape[2:], dilations, strides, strict=True)
    ]  # fmt: skip
    y = np.zeros((x.shape[0], w.shape[0], *space))
    for o in range(w.shape[0]):
        part = x[:, o // each * channels :][:, :channels]
        for tap in np.ndindex(*w.shape[2:]):
            place = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, space, strides, strict=True)
            )
            y[:, o] += np.einsum("bc...,c->b...", part[(slice(None), slice(None), *place)], w[(o, slice(None), *tap)])
        y[:, o] += 0 if bias is None else bias[o]
    return y


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "spectrogram": ((2, 10, 50), (16, 10, 3), {"before": (1,), "after": (1,)}),
    "halving": ((1, 16, 51), (16, 16, 3), {"before": (1,), "after": (1,), "strides": (2,)}),
    "by-channel": ((2, 12, 33), (12, 1, 4), {"before": (3,), "groups": 12}),
    "groups": ((1, 12, 40), (24, 6, 9), {"groups": 2, "dilations": (2,), "before": (8,), "after": (8,)}),
    "patches": ((2, 3, 32, 48), (40, 3, 8, 8), {"strides": (8, 8)}),
    "image": ((1, 6, 13, 17), (10, 6, 3, 3), {"before": (1, 1), "after": (1, 0), "dilations": (1, 2)}),
    "wide-image": ((2, 6, 7, 45), (11, 6, 3, 3), {"before": (1, 1), "after": (1, 1), "strides": (2, 1)}),
    "short": ((1, 10, 12), (9, 10, 3), {}),
    "points": ((2, 8, 9, 9), (5, 8, 1, 1), {}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("free", [(), ("x",)], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [F, DType.FLOAT16], ids=str)
def test_convolutions(name: str, free: tuple[str, ...], dtype: DType) -> None:
    if dtype is DType.FLOAT16 and free:
        return
    size, filters, attrs = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=size).astype(dtype.numpy)
    w, bias = ((rng.normal(size=s) * 0.3).astype(dtype.numpy) for s in (filters, filters[:1]))

    def make(b: Builder, v: Value) -> dict[str, Value]:
        constant = b.constant(w, "w")
        return {
            "biased": b("relu", b("conv", v, constant, b.constant(bias, "bias"), **attrs)),
            "plain": b("conv", v, constant, **attrs),
        }

    graph = Graph()
    shape = tuple(symbol(f"n{k}") if free and k != 1 else d for k, d in enumerate(size))
    found = make(Builder(graph), graph.add_input("x", TensorType(dtype, shape)))
    for key, value in found.items():
        graph.add_output(value, key)
    executable = loaded(graph)
    assert not executable.plan.callbacks
    if name in ("spectrogram", "wide-image"):
        assert ("conv" in {k.kind for k in executable.plan.kernels.values()}) == (name == "spectrogram" or not free)
    got = executable.run({"x": x}, {})
    tolerance = 1e-5 if dtype is F else 4e-3
    for key, want in (
        ("plain", convolved(x, w, None, attrs)), ("biased", np.maximum(convolved(x, w, bias, attrs), 0))
    ):  # fmt: skip
        assert got[key].shape == want.shape
        np.testing.assert_allclose(got[key].astype(np.float64), want, rtol=tolerance, atol=tolerance)
