"""A program on a device: its plan, its weights, and the memory that it works in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import DeviceArray, numpy_type, upload
from .library import Library
from .sizes import learn, names, read
from .steps import ALIGNMENT, MOST_ELEMENTS, Steps, check_elements, layout
from .weights import weights_of

if TYPE_CHECKING:
    from .session import Session

__all__ = ["PLAN", "Program", "load"]

PLAN, LIBRARY = "plan.json", "model.so"
FORMAT = 1

_SPARE = 1.25
"""How much more memory than it needs a run asks for when there is not enough."""


def load(folder: str | Path, device: int = 0) -> Program:
    """The program in a folder that was compiled for the target ``cuda``. Raises FileNotFoundError for a file that is
    missing, DeviceError where it cannot run, ValueError for a folder that this version does not read."""
    return Program(Path(folder), device)


class Program:
    """A compiled program, ready to run. Not thread-safe: it works in memory of its own. ``about`` is plan.json."""

    def __init__(self, folder: Path, device: int = 0) -> None:
        self.folder = folder
        self.about: dict[str, Any] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        about = self.about
        if about.get("format") != FORMAT:
            raise ValueError(f"{folder / PLAN}: the format is {about.get('format')}, and this reads {FORMAT}")
        self.library = Library(folder / LIBRARY, about["arches"], device)
        self.inputs: dict[str, Any] = {entry["name"]: entry for entry in about["inputs"]}
        self.states: dict[str, Any] = {entry["name"]: entry for entry in about["states"]}
        self.outputs: dict[str, Any] = {entry["name"]: entry for entry in about["outputs"]}
        self._sizes = [read(d) for d in about["sizes"]]
        self._fixed = [d if isinstance(d, int) else None for d in about["sizes"]]
        self._values: list[int] = [0] * len(self._sizes)
        self._numbers = np.zeros(len(self._sizes), np.int64)
        self._known: dict[str, int] | None = None
        self._grown = {
            name: (s["append"]["axis"], s["append"]["room"], [read(d) for d in s["append"]["shape"]])
            for name, s in self.states.items()
            if s["append"] is not None
        }
        kinds: dict[str, int] = {}
        self._kinds = {name: kinds.setdefault(json.dumps(s["shape"]), len(kinds)) for name, s in self.states.items()}
        """Which states have one declaration of a shape: a decoder has very many of very few."""
        self._arena: DeviceArray | None = None
        self._staged: dict[str, DeviceArray] = {}
        with self.library.active():
            self._weights = weights_of(self.library, folder, about)
        self._pointers = np.zeros(len(about["storages"]), np.int64)
        self._moving: list[tuple[int, str, str]] = []
        self._slotted: list[tuple[int, int]] = []
        for at, (kind, name) in enumerate(about["storages"]):
            if kind in ("constant", "kept"):
                self._pointers[at] = self._weights.address(kind, name)
            elif kind != "buffer":
                self._moving.append((at, kind, name))
            elif name in about["buffers"]:
                self._slotted.append((at, about["buffers"][name]))
        self._read_states = {name for _, kind, name in self._moving if kind == "state"}
        self._steps = Steps(self.library, about["steps"])

    @cached_property
    def prepare(self) -> Program | None:
        """The encoder's half of a program with two."""
        folder = self.folder / "prepare"
        return Program(folder, self.library.device) if (folder / PLAN).is_file() else None

    # -- running ---------------------------------------------------------------------------------------------

    def __call__(self, **feeds: Any) -> dict[str, DeviceArray]:
        """The outputs by name, of a program that remembers nothing. Inputs are DLPack tensors on the device or NumPy
        arrays. Raises ValueError for feeds that do not fit."""
        if self.states:
            raise ValueError("the program has states: run it in a session, program.session().step(...)")
        return self.run(feeds, {})

    def session(self) -> Session:
        """A program with a cache, from the beginning."""
        from .session import Session

        return Session(self)

    def run(self, feeds: Mapping[str, Any], states: dict[str, Any]) -> dict[str, DeviceArray]:
        """The outputs by name; puts the states as the run leaves them into ``states``. Arrays that were there before
        stay as they are."""
        with self.library.active():
            return self._run(self._given(feeds), states)

    def _run(self, feeds: dict[str, DeviceArray], states: dict[str, Any]) -> dict[str, DeviceArray]:
        before, sizes = self._begin(feeds, states)
        grown: dict[str, DeviceArray] = {}
        for name, (axis, room, whole) in self._grown.items():
            held = before[name]
            grown[name] = held.with_room(axis, whole[axis](sizes) - held.shape[axis])
            sizes[room] = grown[name].shape[axis]
        if sizes != self._known:
            self._resize(sizes)
        outputs = {name: self._new(entry) for name, entry in self.outputs.items()}
        written = {name: self._new(s | {"shape": s["write"]}) for name, s in self.states.items() if s["write"]}
        flat = {name: array.aligned(ALIGNMENT) for name, array in before.items() if name in self._read_states}
        sources = {"input": feeds, "state": flat, "grown": grown, "output": outputs, "written": written}
        pointers = self._pointers
        for at, kind, name in self._moving:
            array = sources[kind][name]
            check_elements(array.size, f"{kind} {name}")
            pointers[at] = array.pointer
        self._steps.run(pointers, self._numbers)
        for name, array in before.items():
            if name in self._grown:
                axis, _, whole = self._grown[name]
                states[name] = grown[name].first(axis, whole[axis](sizes))
            else:
                states[name] = written.get(name, array)
        return outputs

    def _new(self, entry: Mapping[str, Any]) -> DeviceArray:
        return DeviceArray.new(self.library, [self._values[at] for at in entry["shape"]], entry["dtype"])

    # -- sizes -----------------------------------------------------------------------------------------------

    def _begin(
        self, feeds: Mapping[str, DeviceArray], states: Mapping[str, Any]
    ) -> tuple[dict[str, DeviceArray], dict[str, int]]:
        """The states before the run, those that are missing as they begin, and the sizes."""
        unknown = sorted(set(states) - set(self.states))
        before = {name: self._state(name, array) for name, array in states.items() if name not in unknown}
        missing = [name for name in self.states if name not in before]
        for name in missing:
            if self.states[name]["initial"] is not None:
                before[name] = self._weights.array(self.states[name]["initial"])
        typed = [(f"input {name}", entry["shape"], feeds[name].shape) for name, entry in self.inputs.items()]
        # What has been seen before is nothing, where a state that would say it is not there yet.
        later = {name for state in missing for d in self.states[state]["shape"] for name in names(d)}
        sizes: dict[str, int] = {}
        learn([*typed, *self._shapes(before)], sizes, later & set(self.about["zero"]))
        for name in missing:
            if name not in before:
                known = {**dict.fromkeys(self.about["names"], 0), **sizes, **dict.fromkeys(self.about["zero"], 0)}
                before[name] = self._zeros(self.states[name], known)
        if missing:
            learn(self._shapes(before), sizes)
        return {name: before[name] for name in self.states}, sizes

    def _shapes(self, states: Mapping[str, DeviceArray]) -> list[tuple[str, Any, Sequence[int]]]:
        """What ``learn`` takes of states; those of one declaration and one shape count once."""
        found = {(self._kinds[name], array.shape): name for name, array in states.items()}
        return [(f"state {name}", self.states[name]["shape"], shape) for (_, shape), name in found.items()]

    def _zeros(self, entry: Mapping[str, Any], sizes: Mapping[str, int]) -> DeviceArray:
        shape = [read(d)(sizes) for d in entry["shape"]]
        return upload(self.library, np.zeros(shape, numpy_type(entry["dtype"])), entry["dtype"])

    def _resize(self, sizes: Mapping[str, int]) -> None:
        """Computes everything that follows from the sizes, and sees to it that the memory suffices."""
        self._known = None
        self._values = [
            size(sizes) if fixed is None else fixed for size, fixed in zip(self._sizes, self._fixed, strict=True)
        ]
        largest = max(map(abs, self._values), default=0)
        if largest > MOST_ELEMENTS:
            raise ValueError(f"a size of {largest} is too large: the kernels count in 32 bits")
        starts, total = layout([(itemsize, self._values[size]) for itemsize, size in self.about["slots"]])
        if self._arena is None or self._arena.nbytes < total:
            before = 0 if self._arena is None else self._arena.nbytes
            self._arena = None
            self._arena = DeviceArray.new(self.library, [max(total, int(before * _SPARE))], "uint8")
        for at, slot in self._slotted:
            self._pointers[at] = self._arena.base + starts[slot]
        self._numbers = np.array(self._values, np.int64)
        self._known = dict(sizes)

    # -- feeds -----------------------------------------------------------------------------------------------

    def _given(self, feeds: Mapping[str, Any]) -> dict[str, DeviceArray]:
        """The feeds on the device. Raises ValueError."""
        unknown = sorted(set(feeds) - set(self.inputs))
        missing = [name for name in self.inputs if name not in feeds]
        if unknown or missing:
            parts = [f"no input is called {', '.join(unknown)}"] if unknown else []
            parts += [f"missing: {', '.join(missing)}"] if missing else []
            raise ValueError(f"{'; '.join(parts)}. The inputs are {', '.join(self.inputs) or 'none'}")
        return {name: self._feed(name, entry["dtype"], feeds[name]) for name, entry in self.inputs.items()}

    def array(self, name: str, value: Any) -> DeviceArray:
        """A value of an input on the device, until the input gets another."""
        with self.library.active():
            return self._feed(name, self.inputs[name]["dtype"], value)

    def _feed(self, name: str, dtype: str, value: Any) -> DeviceArray:
        if isinstance(value, DeviceArray):
            _same(value.type, dtype, name)
            array = value
        elif isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return self._staged_feed(name, dtype, _converted(name, dtype, value))
        else:
            array = self._shared(name, dtype, value)
        return array.aligned(ALIGNMENT)

    def _shared(self, name: str, dtype: str, value: Any) -> DeviceArray:
        """The array over the memory of a tensor on the device."""
        if hasattr(value, "contiguous"):
            value = value.contiguous()
        tensor = self.library.tensor(value)
        place = int(tensor.device.dlpack_device_type()), int(tensor.device.index)
        if place != (self.library.device_type, self.library.device):
            raise ValueError(f"input {name} lies on {tensor.device}, and the program on device {self.library.device}")
        _same(str(tensor.dtype), dtype, name)
        if not tensor.is_contiguous():
            raise ValueError(f"input {name} is not contiguous: copy it first")
        return DeviceArray(self.library, tensor, int(tensor.data_ptr()), dtype, tensor.shape)

    def _staged_feed(self, name: str, dtype: str, array: np.ndarray[Any, Any]) -> DeviceArray:
        """A NumPy array in a block of memory that the input's next value takes over."""
        block = self._staged.get(name)
        if block is None or block.nbytes < array.nbytes:
            room = max(2 * array.nbytes, ALIGNMENT)  # a mask grows with every token
            block = self._staged[name] = DeviceArray.new(self.library, [room], "uint8")
        return upload(self.library, array, dtype, block)

    def _state(self, name: str, value: Any) -> DeviceArray:
        dtype = self.states[name]["dtype"]
        if isinstance(value, DeviceArray):
            return value
        return upload(self.library, _converted(f"state {name}", dtype, value), dtype)

    def close(self) -> None:
        """Frees what the program works in; the arrays that it gave stay."""
        self._arena = None
        self._staged.clear()
        self._known = None


def _same(found: str, wanted: str, name: str) -> None:
    if found != wanted:
        raise ValueError(f"input {name} must be {wanted}, not {found}")


def _converted(name: str, dtype: str, value: Any) -> np.ndarray[Any, Any]:
    """A value as an array of the dtype; only integers change their width, where they fit. Raises ValueError."""
    array, wanted = np.asarray(value), numpy_type(dtype)
    if array.dtype == wanted:
        return array
    plain = not isinstance(value, np.ndarray | np.generic)
    integers = array.dtype.kind in "iu" and wanted.kind in "iu" and dtype != "bfloat16"
    if not integers and not (plain and array.dtype.kind in "iuf" and wanted.kind == "f"):
        raise ValueError(f"input {name} must be {dtype}, not {array.dtype}")
    made: np.ndarray[Any, Any] = array.astype(wanted)
    if integers and not np.array_equal(made, array):
        raise ValueError(f"input {name} has values that do not fit {dtype}")
    return made
