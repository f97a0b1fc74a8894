"""A model under construction: inputs, parameters, scopes, outputs."""

from __future__ import annotations

import inspect
import keyword
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...ir import (
    Builder,
    Dim,
    DType,
    Graph,
    ModelError,
    ShapeError,
    SymDim,
    TensorType,
    UsageError,
    Value,
    dtype_of,
    parse_dim,
    verify,
)
from ...ir import Tensor as Constant
from .tensor import Number, Operand, Shape, Tensor

__all__ = ["Model"]

Initialiser = Callable[[np.random.Generator, tuple[int, ...]], ArrayLike]
Weights = Mapping[str, ArrayLike] | Callable[[str, tuple[int, ...]], ArrayLike]


def _fan_in(axis: int) -> Initialiser:
    return lambda rng, shape: rng.normal(scale=1 / np.sqrt(max(1, shape[axis])), size=shape)


INITIALISERS: Mapping[str, Initialiser] = {
    "fan_in": _fan_in(0),
    "fan_in_rows": _fan_in(-2),
    "fan_in_last": _fan_in(-1),
    "normal": lambda rng, shape: rng.normal(scale=0.02, size=shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "ones": lambda rng, shape: np.ones(shape),
}
"""How a parameter begins when no weights are given: normal with variance 1 by the size of the first axis, the last but
one or the last, normal with deviation 0.02, 0, 1."""


class Model:
    """Collects a graph. Every line of Python that adds to it is remembered and named in errors.

        model = Model("two_layer", weights=arrays)          # or without weights: seeded random ones
        x = model.input("x", "float32", ["batch", "seq", 64])
        model.output("y", linear(relu(linear(x, 128, "up")), 64, "down"))
        graph = model.graph

    ``weights`` maps parameter names (with their scopes, ``h.0.attn.query.weight``) to arrays; a missing name or a
    wrong shape raises ModelError. It may be a function too, which gets a name and a shape and gives the array.

    For the weights of a checkpoint: with ``transposed`` the matrices of the layers that multiply (``dense``, experts)
    are [out, in] in ``weights``, as PyTorch has them; they are read as views, nothing is copied. With ``lines`` off
    nodes remember their scopes alone, not the line of Python, which is one for all layers there.
    """

    def __init__(
        self,
        name: str = "model",
        weights: Weights | None = None,
        seed: int = 0,
        dtype: DType | str = "float32",
        parent: Model | None = None,
        *,
        transposed: bool = False,
        lines: bool = True,
    ) -> None:
        self._graph = Graph(name)
        self.weights = weights
        self.seed = seed
        self.dtype = dtype_of(dtype)
        self.parent = parent
        self.transposed: bool = parent.transposed if parent else transposed
        self.lines: bool = parent.lines if parent else lines
        self.parameters: dict[str, Tensor] = {}
        self.captures: dict[Tensor, Tensor] = {}
        self._captured: dict[Value, Tensor] = {}
        self._scopes: list[str] = list(parent._scopes) if parent else []
        self._loads: dict[str, Tensor] = {}
        self._builder = Builder(self._graph, self.place)

    # -- the graph -------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph built so far, verified. Raises ModelError when it has no output."""
        if not self._graph.outputs:
            raise ModelError(f"the model {self._graph.name} has no output; call model.output(name, tensor)")
        verify(self._graph, "the graph API")
        return self._graph

    def input(self, name: str, dtype: DType | str, shape: Shape) -> Tensor:
        """An input. Sizes are numbers or names: ``["batch", "seq"]``."""
        type = TensorType(dtype_of(dtype), tuple(self.dim(d) for d in shape))
        return Tensor(self, self._graph.add_input(name, type))

    def output(self, name: str, tensor: Tensor) -> Tensor:
        """Makes a tensor a result of the model."""
        self._graph.add_output(self.own(tensor).value, name)
        return tensor

    def dim(self, size: Dim | str) -> Dim:
        """A dimension: a number, a dimension, or text such as ``"2*seq"``."""
        if isinstance(size, SymDim):
            return size
        if isinstance(size, str):
            return parse_dim(size)
        try:
            if not isinstance(size, bool):
                return operator.index(size)
        except TypeError:
            pass
        raise ShapeError(f"a dimension is a whole number or text, not {size!r}, at {self.place()}")

    # -- parameters and constants ----------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Within the block, parameter names begin with ``name.``; an empty name changes nothing."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def full_name(self, name: str) -> str:
        return ".".join(part for part in (*self._scopes, name) if part)

    def parameter(self, name: str, shape: Sequence[int], init: str = "fan_in", *, transposed: bool = False) -> Tensor:
        """The weight ``name`` (within the scopes at hand); the same name gives the same tensor again.

        With ``transposed`` the last two axes are swapped in ``weights``, if there are any. Raises ModelError when
        ``weights`` lacks it or has another shape.
        """
        full = self.full_name(name)
        root = self._root
        if full not in root.parameters:
            array = root._initial(full, tuple(int(d) for d in shape), init, transposed)
            value = root._graph.add_constant(Constant(array, root.dtype), full)
            root.parameters[full] = Tensor(root, value)
        found = root.parameters[full]
        if found.shape != tuple(shape):
            raise ModelError(f"parameter {full} is {list(found.shape)}, not {list(shape)}, at {self.place()}")
        return self.own(found)

    def _initial(self, name: str, shape: tuple[int, ...], init: str, transposed: bool) -> ArrayLike:
        if init not in INITIALISERS:
            raise UsageError(f"no initial value is called {init}; known: {', '.join(INITIALISERS)}")
        if self.weights is None:
            return INITIALISERS[init](np.random.default_rng([self.seed, zlib.crc32(name.encode())]), shape)
        stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        if callable(self.weights):
            array = np.asarray(self.weights(name, stored))
        elif name in self.weights:
            array = np.asarray(self.weights[name])
        else:
            raise ModelError(f"the weights have no {name} {list(stored)}, asked for at {self.place()}")
        if array.shape != stored:
            raise ModelError(f"the weight {name} is {list(array.shape)}, not {list(stored)}, at {self.place()}")
        return np.swapaxes(array, -1, -2) if transposed else array

    def constant(self, data: ArrayLike, dtype: DType | str | None = None, name: str = "") -> Tensor:
        """A constant tensor; floats take the model's dtype unless told otherwise."""
        array = np.asarray(data)
        wanted = dtype_of(dtype) if dtype is not None else self.dtype if array.dtype.kind == "f" else None
        return Tensor(self, self._graph.add_constant(Constant(array, wanted), name))

    def arange(self, size: Dim | str, dtype: DType | str = "int64", start: Dim = 0) -> Tensor:
        """start, start + 1, … of shape [size]."""
        return self.op("iota", shape=(self.dim(size),), dtype=dtype_of(dtype), start=start)

    def rename(self, tensor: Tensor, name: str) -> None:
        """Calls the value of a tensor of this model ``name``, within the scopes at hand and made unique. Inputs and
        parameters keep their names."""
        if tensor.value.producer is not None:
            self._graph.rename(tensor.value, self.full_name(name))

    def size(self, size: Dim | str) -> Tensor:
        """A dimension as an int64 scalar."""
        return self.op("size", value=self.dim(size))

    # -- operators -------------------------------------------------------------------------------------------

    def op(self, name: str, *inputs: Operand | None, **attrs: Any) -> Tensor:
        """Any operator of the IR; the first result. Numbers take the dtype of the first tensor."""
        return self.multi(name, *inputs, **attrs)[0]

    def multi(
        self, name: str, *inputs: Operand | None, regions: Sequence[Graph] = (), **attrs: Any
    ) -> tuple[Tensor, ...]:
        """Any operator of the IR; all results."""
        inner = self._innermost(inputs)
        if inner is not self:
            return inner.multi(name, *inputs, regions=regions, **attrs)
        operands: list[Value | Number | None] = [self.own(x).value if isinstance(x, Tensor) else x for x in inputs]
        return tuple(Tensor(self, v) for v in self._builder.multi(name, *operands, regions=regions, **attrs))

    def _innermost(self, inputs: Sequence[Operand | None]) -> Model:
        """The model among those of the inputs that lies deepest within this one: an operator on a tensor of a body and
        one from outside belongs to the body, whichever comes first."""
        found = self
        for x in inputs:
            around = x.model if isinstance(x, Tensor) else None
            while around is not None and around is not found:
                around = around.parent
            if isinstance(x, Tensor) and around is found:
                found = x.model
        return found

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor as this model sees it: a tensor of an enclosing model is captured as an input of the region."""
        if tensor.model is self:
            return tensor
        if tensor.value in self._captured:
            return self._captured[tensor.value]
        if self.parent is None:
            raise ModelError(
                f"{tensor!r} belongs to the model {tensor.model._graph.name}, not {self._graph.name}, at {self.place()}"
            )
        outer = self.parent.own(tensor)
        constant = outer.value.constant
        if constant is not None:
            inner = Tensor(self, self._graph.add_constant(constant, outer.name))
        else:
            name = self._graph.unique_name(outer.name or "captured")
            inner = Tensor(self, self._graph.add_input(name, outer.value.type))
            self.captures[outer] = inner
        self._captured[tensor.value] = inner
        return inner

    def load_name(self, tensor: Tensor) -> str:
        """An identifier under which scores and masks read the tensor; one for a model and the regions within it."""
        root = self._root
        for name, known in root._loads.items():
            if known.value is tensor.value:
                return name
        last = tensor.name.rsplit(".", 1)[-1]
        base = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in last) or "t"
        base = base if base.isidentifier() else f"t_{base}"
        base = f"{base}_" if base in _RESERVED or keyword.iskeyword(base) else base
        name, number = base, 1
        while name in root._loads:
            name, number = f"{base}_{number}", number + 1
        root._loads[name] = tensor
        return name

    def loaded(self, name: str) -> Tensor:
        """The tensor that ``load_name`` gave this name. Raises ModelError."""
        known = self._root._loads
        if name not in known:
            raise ModelError(
                f"no tensor is called {name} in a score or mask; pass tensors={{{name!r}: …}}, at {self.place()}"
            )
        return known[name]

    @property
    def _root(self) -> Model:
        root = self
        while root.parent is not None:
            root = root.parent
        return root

    def place(self) -> str:
        """The user's line, with the scopes: ``h.0.attn gpt2.py:31``."""
        frame = inspect.currentframe() if self.lines else None
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if not module.startswith(_INSIDE):
                scope = self.full_name("")
                return f"{scope} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}".strip()
            frame = frame.f_back
        return self.full_name("")


_RESERVED = frozenset({"s", "b", "h", "i", "j", "n", "m", "q", "k", "d", "inf", "nan"})
_INSIDE = (__name__.rsplit(".", 2)[0] + ".", __name__.split(".frontends")[0] + ".ir.", "contextlib")
