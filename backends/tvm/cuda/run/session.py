"""A program with a cache while it runs: what it remembers stays on the device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import DeviceArray
from .program import Program

__all__ = ["Session"]


class Session:
    """Runs new tokens behind those seen. Several sessions may share a program; what one remembers never changes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.states: dict[str, Any] = {}
        self.length = 0
        """How many tokens it has seen."""
        self._kept: dict[str, Any] = {}

    @cached_property
    def _plan(self) -> dict[str, Any]:
        """What the states hold, as attnc.json has it."""
        path = self.program.folder / "attnc.json"
        plan = json.loads(path.read_text(encoding="utf-8")).get("plan") if path.is_file() else None
        if plan is None:
            raise ValueError(f"{path} does not say what the states hold: compile the model with a cache")
        return dict(plan)

    def step(self, **feeds: Any) -> dict[str, DeviceArray]:
        """The outputs for new tokens. ``feeds`` are those of the new tokens, but for inputs that have an entry for
        every token, such as a mask. Inputs without time need to be given once; those of the encoder's half run it.
        Raises ValueError for what does not fit; the session is then as it was."""
        program, plan = self.program, self._plan
        timed = {entry["name"]: entry for entry in plan["inputs"]}
        encoder = set() if program.prepare is None else set(program.prepare.inputs) - set(program.inputs)
        states, kept = dict(self.states), dict(self._kept)
        if encoder & set(feeds):
            states, kept = self._prepared(feeds)
        given = {**kept, **{name: value for name, value in feeds.items() if name not in encoder}}
        counted = _counted(plan["inputs"])
        count = self._entries(given, counted) - (self.length if counted["whole"] else 0)
        outputs = program.run(given, states)
        self.states = states
        self._kept = kept | _held({name: value for name, value in given.items() if name not in timed})
        self.length += count
        return outputs

    def prepare(self, **feeds: Any) -> dict[str, DeviceArray]:
        """Runs the encoder's half, of which all steps read the states; gives its outputs."""
        program = self.program.prepare
        if program is None:
            raise ValueError("the program has no encoder half that would be run first")
        if self.length:
            raise ValueError("the session has seen tokens: reset() it before it gets another input")
        states: dict[str, Any] = {}
        outputs = program.run(feeds, states)
        self.states = states
        self._kept = _held({name: value for name, value in feeds.items() if name in self.program.inputs})
        return outputs

    def _prepared(self, feeds: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        fresh = self.clone()
        assert self.program.prepare is not None
        fresh.prepare(**{name: feeds[name] for name in self.program.prepare.inputs if name in feeds})
        return fresh.states, fresh._kept

    def _entries(self, feeds: dict[str, Any], counted: dict[str, Any]) -> int:
        value = feeds.get(counted["name"])
        if value is None:
            raise ValueError(f"missing: {counted['name']}, whose entries are the new tokens")
        shape = getattr(value, "shape", None)
        if shape is None:
            shape = np.shape(value)
        if len(shape) <= counted["axis"]:
            raise ValueError(f"input {counted['name']} has no axis {counted['axis']}: its shape is {list(shape)}")
        return int(shape[counted["axis"]])

    # -- the cache -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets what was seen."""
        self.states, self._kept, self.length = {}, {}, 0

    def clone(self) -> Session:
        """A session that has seen the same and goes its own way; nothing is copied until one of them goes on."""
        made = Session(self.program)
        made.states, made._kept, made.length = dict(self.states), dict(self._kept), self.length
        return made

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row k what row ``rows[k]`` was; rows may be left out or repeated. Raises ValueError."""
        states, kept = dict(self.states), dict(self._kept)
        for entry in self._plan["states"]:
            name, axis = entry["name"], entry["batch_axis"]
            if name in states and axis is not None:
                count = states[name].shape[axis]
                if not rows or any(not 0 <= row < count for row in rows):
                    raise ValueError(f"rows {list(rows)} of {count}")
                states[name] = states[name].take(list(rows), axis)
        batch = self._plan["batch"]
        for name, value in kept.items():
            shape = self.program.inputs[name]["shape"]
            if batch in shape:
                kept[name] = self.program.array(name, value).take(list(rows), shape.index(batch))
        self.states, self._kept = states, kept

    def truncate(self, length: int) -> None:
        """Goes back to the first ``length`` tokens. Raises ValueError when a state cannot: a running sum, a hidden
        state, or a window that has dropped what it would need."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the session has seen {self.length} tokens: it cannot be truncated to {length}")
        if length == self.length:
            return
        states = {}
        plans = {entry["name"]: entry for entry in self._plan["states"]}
        for name, array in self.states.items():
            plan = plans.get(name)
            if plan is None or plan["kind"] == "fixed":
                states[name] = array
            elif length:
                states[name] = _truncated(plan, array, self.length, length)
        self.states, self.length = states, length


def _held(feeds: dict[str, Any]) -> dict[str, Any]:
    """Feeds to be remembered: arrays of the host are copied, for whoever gave them may write to them."""
    return {name: np.array(v) if isinstance(v, np.ndarray) else v for name, v in feeds.items()}


def _truncated(plan: dict[str, Any], array: DeviceArray, seen: int, length: int) -> DeviceArray:
    axis = plan["time_axis"]
    if plan["kind"] not in ("append", "ring") or axis is None:
        raise ValueError(f"the state {plan['name']} cannot go back: it is of the kind {plan['kind']}")
    held = array.shape[axis]
    needed = length if plan["kind"] == "append" else min(length, plan["window"] or 0)
    first = length - needed - (seen - held)
    if first < 0:
        raise ValueError(f"the state {plan['name']} cannot go back: it holds the last {held} of {seen} tokens")
    return array[(*(slice(None),) * axis, slice(first, first + needed))]


def _counted(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The input whose entries are the new tokens."""
    ids = [entry for entry in inputs if entry["role"] == "ids"]
    return [*ids, *(entry for entry in inputs if not entry["whole"]), *inputs][0]
