"""Sizes and shapes as exporters write them for whole architectures, in models of a few nodes.

ONNX Runtime says what each model gives; the sizes are symbolic at import.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnc
from attnc import AttncError, ModelError

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Inputs = dict[str, tuple[int, Sequence[str | int]]]


def ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def floats(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32), name)


def saved(path: Path, nodes: list[onnx.NodeProto], inputs: Inputs, constants: list[onnx.TensorProto]) -> Path:
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in nodes[-1].output],
        constants,
    )  # fmt: skip
    file = path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), file)
    return file


def agree(file: Path, *feeds: dict[str, Any]) -> None:
    """The import, and what is compiled from it for ONNX Runtime, give what ONNX Runtime gives for the file."""
    graph = attnc.load(file)
    assert str(attnc.parse(str(graph), {v.constant.digest: v.constant for v in graph.constants if v.constant})) == str(
        graph
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    compiled = attnc.compile(graph, target="ort-cpu").session()
    for feed in feeds:
        want = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
        for got in (attnc.evaluate(graph, feed), compiled.run(feed)):
            for name, array in want.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def rows(count: int, width: int = 4) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(count).standard_normal((count, width)).astype(np.float32)


SIZE = [
    helper.make_node("Shape", ["x"], ["whole"]),
    helper.make_node("Gather", ["whole", "place"], ["size"], axis=0),
]
"""``size``: the number of rows of x."""


def test_a_table_that_is_read_from_size_before_its_end(tmp_path: Path) -> None:
    """ALiBi of MPT: ``table[128 - seq :]``, whose bound is negative where the sequence is too long."""
    nodes = [
        *SIZE,
        helper.make_node("Sub", ["length", "size"], ["start"]),
        helper.make_node("Slice", ["table", "start", "end", "axis"], ["part"]),
        helper.make_node("Add", ["x", "part"], ["y"]),
    ]
    constants = [ints("place", 0), ints("length", 8), ints("end", 2**63 - 1), ints("axis", 0), floats("table", 8, 4)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, constants)
    agree(file, *({"x": rows(n)} for n in (1, 2, 7, 8)))
    with pytest.raises(AttncError):
        attnc.evaluate(attnc.load(file), {"x": rows(11)})


@pytest.mark.parametrize("step", [1, -1])
def test_a_bound_of_unknown_sign_counts_from_the_back_where_it_is_negative(tmp_path: Path, step: int) -> None:
    nodes = [
        *SIZE,
        helper.make_node("Sub", ["length", "size"], ["start"]),
        helper.make_node("Slice", ["table", "start", "end", "axis", "step"], ["y"]),
    ]
    end = 2**63 - 1 if step > 0 else -(2**63)
    constants = [ints("place", 0), ints("length", 4), ints("end", end), ints("axis", 0), ints("step", step)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, [*constants, floats("table", 6, 4)])
    agree(file, *({"x": rows(n)} for n in range(1, 13)))


def test_padding_to_a_multiple_and_chunks(tmp_path: Path) -> None:
    """Chunked scans and windows: rows are padded by (8 - size % 8) % 8 and read as chunks of 8."""
    nodes = [
        *SIZE,
        helper.make_node("Mod", ["size", "eight"], ["over"]),
        helper.make_node("Sub", ["eight", "over"], ["lack"]),
        helper.make_node("Mod", ["lack", "eight"], ["width"]),
        helper.make_node("Concat", ["zeros", "width", "zero"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("Add", ["size", "seven"], ["rounded"]),
        helper.make_node("Div", ["rounded", "eight"], ["count"]),
        helper.make_node("Concat", ["count", "eight", "four"], ["shape"], axis=0),
        helper.make_node("Reshape", ["padded", "shape"], ["chunks"]),
        helper.make_node("ReduceSum", ["chunks", "one"], ["sums"], keepdims=1),
        helper.make_node("Add", ["chunks", "sums"], ["y"]),
    ]
    numbers = {"place": 0, "eight": 8, "seven": 7, "four": 4, "one": 1, "zero": 0}
    constants = [*(ints(name, value) for name, value in numbers.items()), ints("zeros", 0, 0)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, constants)
    assert str(attnc.load(file).outputs[0].value.shape[0]) == "((seq + 7) // 8)"
    agree(file, *({"x": rows(n)} for n in (1, 7, 8, 9, 16)))


def test_a_division_whose_top_may_be_negative(tmp_path: Path) -> None:
    """Lengths behind strided convolutions, (size - kernel) // stride + 1 in integers, fit the convolution's own."""
    nodes = [
        helper.make_node("Shape", ["x"], ["whole"]),
        helper.make_node("Gather", ["whole", "place"], ["size"], axis=0),
        helper.make_node("Sub", ["size", "kernel"], ["room"]),
        helper.make_node("Div", ["room", "stride"], ["steps"]),
        helper.make_node("Add", ["steps", "one"], ["length"]),
        helper.make_node("Conv", ["x", "weight"], ["sound"], strides=[5]),
        helper.make_node("Concat", ["one", "two", "two", "length"], ["shape"], axis=0),
        helper.make_node("Reshape", ["sound", "shape"], ["y"]),
    ]
    constants = [ints("place", 2), ints("kernel", 10), ints("stride", 5), ints("one", 1), ints("two", 2)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, [1, 1, "samples"])}, [*constants, floats("weight", 4, 1, 10)])
    agree(file, *({"x": rows(1, n)[None]} for n in (10, 14, 15, 63)))


@pytest.mark.parametrize("fmod", [0, 1])
def test_division_towards_zero_of_sizes(tmp_path: Path, fmod: int) -> None:
    op = helper.make_node("Mod", ["room", "stride"], ["number"], fmod=1)
    nodes = [
        *SIZE,
        helper.make_node("Sub", ["size", "kernel"], ["room"]),
        op if fmod else helper.make_node("Div", ["room", "stride"], ["number"]),
        helper.make_node("Add", ["number", "kernel"], ["length"]),
        helper.make_node("ConstantOfShape", ["length"], ["y"]),
    ]
    constants = [ints("place", 0), ints("kernel", 10), ints("stride", 3)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, constants)
    agree(file, *({"x": rows(n)} for n in range(1, 16)))


def test_two_choices_for_one_sum(tmp_path: Path) -> None:
    """Relative tables that are read from max(9 - size, 0) to size + 9, as relative shifts do."""
    nodes = [
        *SIZE,
        helper.make_node("Sub", ["nine", "size"], ["start"]),
        helper.make_node("Add", ["eight", "size"], ["end"]),
        helper.make_node("Slice", ["table", "start", "end", "axis"], ["part"]),
        helper.make_node("Add", ["size", "size"], ["twice"]),
        helper.make_node("Sub", ["twice", "one"], ["width"]),
        helper.make_node("Concat", ["width", "four"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Add", ["zeros", "part"], ["y"]),
    ]
    numbers = {"place": 0, "nine": 9, "eight": 8, "axis": 0, "one": 1, "four": 4}
    constants = [*(ints(name, value) for name, value in numbers.items()), floats("table", 17, 4)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, constants)
    agree(file, *({"x": rows(n)} for n in (1, 2, 9)))


def test_all_positions_of_a_tensor_of_ones(tmp_path: Path) -> None:
    """The TorchScript exporter writes a range of indices as NonZero of ConstantOfShape."""
    one = helper.make_tensor("one", INT64, [1], [1])
    nodes = [
        *SIZE,
        helper.make_node("ConstantOfShape", ["size"], ["ones"], value=one),
        helper.make_node("NonZero", ["ones"], ["found"]),
        helper.make_node("Squeeze", ["found", "zero"], ["positions"]),
        helper.make_node("Gather", ["x", "positions"], ["same"], axis=0),
        helper.make_node("Add", ["x", "same"], ["y"]),
    ]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4])}, [ints("place", 0), ints("zero", 0)])
    assert [str(d) for d in attnc.load(file).outputs[0].value.shape] == ["seq", "4"]
    agree(file, {"x": rows(1)}, {"x": rows(5)})


def test_computed_parts_make_up_the_whole(tmp_path: Path) -> None:
    """A mixture of experts: tokens are split by counts and put together again."""
    nodes = [
        helper.make_node("Split", ["x", "counts"], ["a", "b", "c"], axis=0),
        helper.make_node("Neg", ["b"], ["negative"]),
        helper.make_node("Concat", ["a", "negative", "c"], ["joined"], axis=0),
        helper.make_node("Add", ["x", "joined"], ["y"]),
    ]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["seq", 4]), "counts": (INT64, [3])}, [])
    agree(file, *({"x": rows(5), "counts": np.array(counts)} for counts in ([2, 2, 1], [0, 5, 0], [5, 0, 0])))
    with pytest.raises(AttncError):
        attnc.evaluate(attnc.load(file), {"x": rows(5), "counts": np.array([2, 2, 0])})


def test_constant_parts_say_what_a_size_is(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["x", "parts"], ["a", "b"], axis=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["batch", 4])}, [ints("parts", 1, 1)])
    assert attnc.load(file).inputs[0].shape == (2, 4)
    agree(file, {"x": rows(2)})


def test_constant_parts_of_what_no_size_can_be(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Split", ["rows", "parts"], ["a", "b"], axis=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    constants = [ints("flat", -1, 4), ints("parts", 5, 5)]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["batch", "seq", 4])}, constants)
    with pytest.raises(ModelError, match=r"\[5, 5\] do not add up to the size batch\*seq .* the export was made with"):
        attnc.load(file)


def test_a_reshape_says_that_two_sizes_are_two_others(tmp_path: Path) -> None:
    """A mask [batch, seq] whose sizes have names of their own, taken in the shape that the tokens give."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["mask", "shape"], ["same"]),
        helper.make_node("Add", ["x", "same"], ["y"]),
    ]
    file = saved(tmp_path, nodes, {"x": (FLOAT, ["s31", "s46"]), "mask": (FLOAT, ["s80", "s9"])}, [])
    graph = attnc.load(file)
    assert graph.inputs[0].type == graph.inputs[1].type
    agree(file, {"x": rows(2, 3), "mask": rows(2, 3)})
