"""attnc as a backend of the onnx package's own test runner: a model is imported, compiled and run as a user would.

``onnx.backend.test.BackendTest(NumpyBackend)`` runs the official suites. This module plays a user's part, so it uses
the package by its public names, which the other backends may not.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.backend.base import Backend, BackendRep

import attnc

__all__ = ["CompiledModel", "NumpyBackend", "OrtBackend", "check_case", "family_of", "node_cases"]


_MOST_HELD = 64
"""Inputs of at most one axis and this many elements may be shapes, axes, counts: what a compiler wants to know."""


class CompiledModel(BackendRep):
    """A compiled model, ready to run.

    The standard lets a model read its shapes, axes and counts from inputs of a run, on which even the rank of a result
    may depend. Where a model cannot be compiled for whatever they will be, it is compiled for the values given, with
    as few inputs fixed as will do, and anew when they change. ``held`` names those inputs.
    """

    def __init__(self, model: ModelProto, target: str) -> None:
        self.held: tuple[str, ...] = ()
        self._model = model
        self._target = target
        initialisers = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in initialisers]
        self._outputs = [value.name for value in model.graph.output]
        self._sessions: dict[tuple[bytes, ...], attnc.Session] = {}
        try:
            self._sessions[()] = _compile(model, target).session()
        except attnc.UnsupportedError as error:
            self._error = error
            if not any(_may_be_small(value) for value in model.graph.input):
                raise

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs in the model's order, for inputs in its order (or by name). Raises UnsupportedError when the
        model cannot be compiled even with its small inputs known."""
        feeds = dict(inputs) if isinstance(inputs, dict) else dict(zip(self._inputs, inputs, strict=True))
        results = self._session(feeds).run({k: v for k, v in feeds.items() if k not in self.held})
        return tuple(results[name] for name in self._outputs)

    def _session(self, feeds: dict[str, Any]) -> attnc.Session:
        key = self._key(feeds)
        if key not in self._sessions:
            program = self._specialised(feeds)
            key = self._key(feeds)
            self._sessions[key] = program.session()
        return self._sessions[key]

    def _key(self, feeds: dict[str, Any]) -> tuple[bytes, ...]:
        return tuple(repr((x.shape, x.tobytes())).encode() for x in (np.asarray(feeds[name]) for name in self.held))

    def _specialised(self, feeds: dict[str, Any]) -> attnc.Program:
        small = [name for name, x in feeds.items() if _is_small(x)]
        for count in range(1, len(small) + 1):
            for names in combinations(small, count):
                fixed = ModelProto()
                fixed.CopyFrom(self._model)
                fixed.graph.initializer.extend(numpy_helper.from_array(np.asarray(feeds[n]), n) for n in names)
                try:
                    program = _compile(fixed, self._target)
                except attnc.UnsupportedError:
                    continue
                self.held = names
                return program
        raise self._error


def _may_be_small(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return value.type.HasField("tensor_type") and tensor.HasField("shape") and len(tensor.shape.dim) <= 1


def _is_small(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.ndim <= 1 and x.size <= _MOST_HELD and x.dtype != object


def _compile(model: ModelProto, target: str) -> attnc.Program:
    # Through a file: that is how a model reaches attnc.
    with tempfile.TemporaryDirectory(prefix="attnc-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return attnc.compile(path, target=target, threads=1)


class _Backend(Backend):
    """What both backends share: everything but the target."""

    target: ClassVar[str]

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> CompiledModel:
        """The model, compiled. Raises ModelError (UnsupportedError for what attnc does not know) and, for another
        device, TargetError."""
        if not cls.supports_device(device):
            raise attnc.TargetError(f"the target {cls.target} runs on the CPU, not on {device}")
        return CompiledModel(model, cls.target)

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of a model for these inputs."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The outputs of a model of one node; ``opset_version`` in ``kwargs`` says of which operator set it is."""
        arrays = [np.asarray(array) for array in inputs]
        names = list(dict.fromkeys(name for name in node.input if name))
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, arrays, strict=True)
        ]
        results = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output if name]
        version = int(kwargs.get("opset_version", onnx.defs.onnx_opset_version()))
        opsets = [helper.make_opsetid("", version)]
        if node.domain not in ("", "ai.onnx"):
            opsets.append(helper.make_opsetid(node.domain, 1))
        graph = helper.make_graph([node], "node", given, results)
        return cls.run_model(helper.make_model(graph, opset_imports=opsets), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0] == "CPU"


class NumpyBackend(_Backend):
    """attnc with the target ``numpy``."""

    target = "numpy"


class OrtBackend(_Backend):
    """attnc with the target ``ort-cpu``."""

    target = "ort-cpu"


# -- the node cases ------------------------------------------------------------------------------------------------


@cache
def node_cases() -> dict[str, Any]:
    """The node cases that the installed onnx package ships, by name: a model, its inputs and the right outputs."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # making the cases divides by zero and overflows, on purpose
        return {case.name: case for case in load_model_tests(kind="node")}


_EXPANDED = re.compile(r"_expanded(_ver\d+)?$")


def family_of(name: str) -> str:
    """The operator that a case tests; one whose model spells out the operator's function body counts as its own."""
    cases = node_cases()
    plain = _EXPANDED.sub("", name)
    nodes = cases[plain if plain in cases else name].model.graph.node
    return str(nodes[-1].op_type)


def check_case(backend: type[Backend], name: str) -> BackendRep:
    """Runs a case the way the onnx package's runner does and compares at the case's own tolerances. Gives the prepared
    model; raises what the backend raises, and AssertionError for other outputs."""
    from onnx.backend.test.runner import Runner

    case = node_cases()[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        prepared = backend.prepare(case.model, "CPU")
        assert prepared is not None
        for inputs, outputs in case.data_sets:
            found = prepared.run([_plain(value) for value in inputs])
            Runner.assert_similar_outputs([_plain(value) for value in outputs], found, case.rtol, case.atol)
    return prepared


def _plain(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
