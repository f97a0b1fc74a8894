"""The buffers of growing caches by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.backends.ort.buffers import Buffers
from attnc.ir import InputError

SHAPES = {"a": (1, 2, 0, 3), "b": (1, 1, 0, 5), "c": (1, 2, 0, 3)}


def states(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {name: rng.normal(size=(*s[:2], length, s[3])).astype(np.float32) for name, s in SHAPES.items()}
    return {**found, "c": found["c"].astype(np.float64), "other": np.zeros(2)}


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["c", "b", "a"]])
@pytest.mark.parametrize("room", [None, 7])
def test_what_is_loaded_is_what_is_given(names: list[str], room: int | None) -> None:
    buffers, given = Buffers(names, room), states(4)
    length, fresh = buffers.load(given, 2)
    assert length == 4
    assert set(fresh) == set(names)
    views = dict(given)
    buffers.fill(views, 4)
    assert views["other"] is given["other"]
    for name in names:
        np.testing.assert_array_equal(views[name], given[name])
        assert views[name].dtype == given[name].dtype
        assert fresh[name].data_ptr() == views[name].ctypes.data
        assert views[name].ctypes.data % 64 == 0
        assert fresh[name].shape()[2] == buffers.room
    for name in names:  # none lies in another
        views[name][:] = 7
    assert all((views[name] == 7).all() for name in names)


def test_views_of_the_last_run_are_taken_as_they_are() -> None:
    buffers, given = Buffers(["a", "b", "c"], None), states(4)
    buffers.load(given, 1)
    held = dict(given)
    buffers.fill(held, 5)
    assert buffers.load(held, 1) == (5, {})
    assert buffers.load(dict(reversed(held.items())), 1) == (5, {})
    older = dict(held)
    buffers.fill(held, 6)
    assert buffers.load(held, 1) == (6, {})
    for changed in (older, {**held, "c": held["c"].copy()}, {**held, "b": held["b"][:]}):
        if changed is older:
            length, fresh = buffers.load(changed, 1)
            assert (length, set(fresh)) == (5, {"a", "b", "c"})
            continue
        buffers.load(changed, 1)
        assert buffers.load(held, 1)[1], "one array was another: all are loaded anew"


def test_lengths_that_differ() -> None:
    given = states(4)
    with pytest.raises(InputError, match="of one length, not of these: a: 4, b: 3"):
        Buffers(["a", "b"], None).load({**given, "b": given["b"][:, :, :3]}, 1)
