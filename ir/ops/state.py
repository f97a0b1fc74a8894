"""States: tensors that persist between runs.

Within a run every read sees what the state was before it, and what is written holds from the next run on, so the
order of these nodes does not matter. A state is written at most once a run. Its type may hold sizes that grow
(``past``); a run learns them from the tensor it is given, and at the first run they are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..dims import symbol
from ..graph import State
from ..operator import Array, Call, Operator, Run, Sample
from ..tensor import Tensor
from ..types import DType, TensorType

_HELD = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
_NEW = -np.arange(8, dtype=np.float32).reshape(1, 2, 4)
_STATE = State("k0", TensorType(DType.FLOAT32, (1, symbol("past"), 4)), Tensor(_HELD))


def _declared(call: Call) -> State:
    name = call.attr("state")
    if name not in call.states:
        known = ", ".join(call.states) or "none"
        raise call.error(f"the state {name} is not declared; the graph's states: {known}")
    return call.states[name]


def _held(run: Run) -> Array:
    return run.states[run.attrs["state"]].astype(run.result_dtype(), copy=False)


class StateRead(Operator):
    """What ``state`` was before the run."""

    name = "state_read"
    inputs = ()
    attributes: ClassVar[Mapping[str, Attr]] = {"state": Attr("str")}

    def infer(self, call: Call) -> TensorType:
        return _declared(call).type

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return _held(run)

    def samples(self) -> Iterable[Sample]:
        yield Sample((), {"state": "k0"}, (_HELD,), states=(_STATE,))


class StateWrite(Operator):
    """x, which ``state`` becomes when the run has ended. Axes of a fixed size keep it."""

    name = "state_write"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"state": Attr("str")}
    has_effect = True

    def infer(self, call: Call) -> TensorType:
        x, state = call.type(0), _declared(call).type
        if x.dtype is not state.dtype or x.rank != state.rank:
            raise call.error(f"the state {call.attr('state')} is {state}")
        for axis, (d, fixed) in enumerate(zip(x.shape, state.shape, strict=True)):
            if isinstance(fixed, int):
                call.same_dim(d, fixed, f"axis {axis} of the state {call.attr('state')}, which is {state}")
        return x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        run.writes[run.attrs["state"]] = inputs[0]
        return np.asarray(inputs[0])

    def samples(self) -> Iterable[Sample]:
        yield Sample((_NEW,), {"state": "k0"}, (_NEW,), states=(_STATE,))


class StateAppend(Operator):
    """What ``state`` was before the run with x behind it along ``axis``; the state becomes that when the run has
    ended."""

    name = "state_append"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"state": Attr("str"), "axis": Attr("int")}
    has_effect = True

    def infer(self, call: Call) -> TensorType:
        x, state, axis = call.type(0), _declared(call).type, call.axis()
        if x.dtype is not state.dtype or x.rank != state.rank:
            raise call.error(f"the state {call.attr('state')} is {state}")
        if isinstance(state.shape[axis], int):
            raise call.error(f"axis {axis} of the state {call.attr('state')}, which is {state}, cannot grow")
        for k in range(x.rank):
            if k != axis:
                call.same_dim(x.shape[k], state.shape[k], f"axis {k} of the state {call.attr('state')}")
        return x.with_shape((*x.shape[:axis], state.shape[axis] + x.shape[axis], *x.shape[axis + 1 :]))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        whole = np.concatenate([_held(run), inputs[0]], axis=run.attrs["axis"])
        run.writes[run.attrs["state"]] = whole
        return whole

    def samples(self) -> Iterable[Sample]:
        whole = np.array([[*_HELD[0], *_NEW[0]]])
        yield Sample((_NEW,), {"state": "k0", "axis": -2}, (whole,), states=(_STATE,))


OPS: tuple[Operator, ...] = (StateRead(), StateWrite(), StateAppend())
