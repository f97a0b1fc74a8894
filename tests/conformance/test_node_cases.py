"""The onnx package's node cases on attnc: each passes or is on the list of what is left out, and not both."""

from __future__ import annotations

import string
from collections import Counter
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attnc import TargetError, UnsupportedError
from attnc.backends.conformance import NumpyBackend, OrtBackend, check_case, family_of, node_cases
from attnc.tests.conformance.left_out import LEFT_OUT, reason_for

ATTENTION = {"Attention": 93, "FlexAttention": 11, "LinearAttention": 14}
"""How many cases each has; as many again spell out its function body."""

COMPLETE = {
    *ATTENTION, "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Softmax", "LogSoftmax", "Gelu", "Swish",
    "SwiGLU", "TensorScatter", "CausalConvWithState",
}  # fmt: skip
"""Operators of which nothing is left out."""

BACKENDS = {backend.target: backend for backend in (NumpyBackend, OrtBackend)}


@cache
def families() -> dict[str, str]:
    return {name: family_of(name) for name in node_cases()}


# A test per letter: making the cases takes seconds, so that they are not made when tests are only collected.
@pytest.mark.parametrize("letter", string.ascii_uppercase)
@pytest.mark.parametrize("target", BACKENDS)
def test_a_case_passes_or_is_left_out(target: str, letter: str) -> None:
    wrong = []
    for name in [name for name, family in families().items() if family.startswith(letter)]:
        entry = reason_for(name, target)
        try:
            check_case(BACKENDS[target], name)
        except Exception as error:
            if entry is None:
                wrong.append(f"{name}: {_short(error)}")
            elif entry.refused != isinstance(error, UnsupportedError):
                wrong.append(f"{name} is left out ({entry.family}), but fails in another way: {_short(error)}")
        else:
            if entry is not None:
                wrong.append(f"{name} passes: take it off the list of what is left out ({entry.family})")
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong])


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def test_the_letters_cover_every_case() -> None:
    assert {family[0] for family in families().values()} <= set(string.ascii_uppercase)


def test_what_is_left_out_is_little_and_nothing_of_the_attention_family() -> None:
    counts = Counter(families().values())
    for family, count in ATTENTION.items():
        assert counts[family] >= 2 * count
    assert set(counts) >= COMPLETE
    left = {name for name in node_cases() if reason_for(name, "numpy") is not None}
    assert not {families()[name] for name in left} & COMPLETE
    assert len(node_cases()) - len(left) >= 1500


@pytest.mark.parametrize("entry", LEFT_OUT, ids=lambda entry: entry.family)
def test_an_entry_leaves_something_out(entry: object) -> None:
    assert any(reason_for(name, target) is entry for name in node_cases() for target in BACKENDS)


# -- the backend classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", BACKENDS)
def test_a_node_runs(target: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    node = helper.make_node("Gemm", ["a", "b"], ["y"], transB=1, alpha=2.0)
    (y,) = BACKENDS[target].run_node(node, [x, x + 1])
    np.testing.assert_allclose(y, 2 * x @ (x + 1).T)
    (y,) = BACKENDS[target].run_node(helper.make_node("Clip", ["a"], ["y"], max=3.0), [x], opset_version=6)
    np.testing.assert_array_equal(y, np.minimum(x, 3))


def test_a_model_runs_with_inputs_in_order_or_by_name() -> None:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    made = [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n"])]
    graph = helper.make_graph([helper.make_node("Sub", ["x", "y"], ["z"])], "g", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    one, two = (np.array([k], np.float32) for k in (1, 2))
    assert NumpyBackend.run_model(model, [one, two]) == (-one,)
    assert NumpyBackend.run_model(model, {"y": one, "x": two}) == (one,)


def axes_model() -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"]),
        helper.make_tensor_value_info("axes", TensorProto.INT64, [1]),
    ]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)], "g", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_what_a_shape_depends_on_is_held_and_may_change() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    prepared = NumpyBackend.prepare(axes_model())
    for axis in (0, 1, 0):
        (y,) = prepared.run([x, np.array([axis])])
        np.testing.assert_array_equal(y, x.sum(axis))
        assert prepared.held == ("axes",)


def test_a_model_that_cannot_be_compiled_says_why() -> None:
    given = [helper.make_tensor_value_info("x", TensorProto.STRING, [2])]
    made = [helper.make_tensor_value_info("y", TensorProto.STRING, [2])]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    with pytest.raises(UnsupportedError, match="element type string"):
        NumpyBackend.run_model(model, [np.array(["a", "b"])])


def test_only_the_cpu_is_there() -> None:
    assert NumpyBackend.supports_device("CPU:0")
    assert not OrtBackend.supports_device("CUDA")
    with pytest.raises(TargetError, match="CUDA"):
        NumpyBackend.prepare(axes_model(), "CUDA")
