"""Convolutions, pooling, resizing, transforms, recurrent layers and scatters, at several sizes of one import."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import UnsupportedError
from attnc.tests.frontends.judges import Array, agree, draw, model, reference, runtime

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def one_node(
    op: str, x: list[int | str], *constants: Array | None, outputs: int = 1, opset: int = 18, **attrs: Any
) -> onnx.ModelProto:
    """A node that reads the input x and constants."""
    names = ["x", *(f"c{k}" if c is not None else "" for k, c in enumerate(constants))]
    kept = [numpy_helper.from_array(c, f"c{k}") for k, c in enumerate(constants) if c is not None]
    results = [f"y{k}" for k in range(outputs)]
    rank = {"LSTM": [4, 3, 3], "GRU": [4, 3], "RNN": [4, 3]}.get(op, [len(x)] * outputs)
    infos = [
        helper.make_tensor_value_info(y, INT64 if op == "TopK" and k else FLOAT, [f"{y}_{d}" for d in range(r)])
        for k, (y, r) in enumerate(zip(results, rank, strict=True))
    ]
    node = helper.make_node(op, names, results, **attrs)
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", FLOAT, x)], infos, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


IMAGES = [{"x": draw(2, 4, n, m)} for n, m in ((7, 9), (8, 8), (5, 12))]
SPACE: list[int | str] = ["batch", 4, "h", "w"]


@pytest.mark.parametrize(
    "attrs",
    [
        {"strides": [2, 1], "pads": [1, 0, 2, 1]},
        {"dilations": [2, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
        {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
        {"auto_pad": "VALID"},
    ],
)
def test_convolution(attrs: dict[str, Any]) -> None:
    agree(one_node("Conv", SPACE, draw(6, 4, 3, 2), draw(6), **attrs), *IMAGES, tolerance=1e-5)
    agree(one_node("Conv", SPACE, draw(6, 2, 3, 2), group=2, **attrs), *IMAGES, tolerance=1e-5)


@pytest.mark.parametrize(
    "attrs",
    [
        {"strides": [2, 3], "pads": [1, 0, 2, 1]},
        {"strides": [2, 2], "output_padding": [1, 0], "dilations": [2, 1]},
        {"pads": [3, 2, 3, 1]},
        {"strides": [2, 2], "group": 2},
    ],
)
def test_transposed_convolution(attrs: dict[str, Any]) -> None:
    agree(one_node("ConvTranspose", SPACE, draw(4, 3, 3, 2), draw(3 * attrs.get("group", 1)), **attrs), *IMAGES,
          tolerance=1e-5)  # fmt: skip


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    "attrs",
    [
        {"strides": [2, 2], "pads": [1, 0, 1, 1]},
        {"strides": [3, 2], "ceil_mode": 1, "pads": [1, 1, 1, 0]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    ],
)
def test_pooling(op: str, attrs: dict[str, Any]) -> None:
    if op == "LpPool" and "ceil_mode" in attrs:
        return  # the runtime's LpPool drops the last window
    agree(one_node(op, SPACE, kernel_shape=[3, 2], opset=19, **attrs), *IMAGES, tolerance=1e-5)


def test_pooling_counts_the_padding_where_it_is_asked_to() -> None:
    attrs: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1, "strides": [2, 2]}
    agree(one_node("AveragePool", SPACE, opset=19, **attrs), *IMAGES, tolerance=1e-5)
    agree(one_node("AveragePool", SPACE, opset=19, ceil_mode=1, **attrs), *IMAGES, judge=reference, tolerance=1e-5)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pooling(op: str) -> None:
    agree(one_node(op, SPACE), *IMAGES, tolerance=1e-5)


COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")


@pytest.mark.parametrize(("mode", "coordinates"), [*itertools.product(("nearest", "linear"), COORDINATES)])
def test_resizing_to_a_size(mode: str, coordinates: str) -> None:
    """Also from the very size asked for, which changes nothing."""
    sizes = np.array([2, 4, 8, 5])
    proto = one_node("Resize", [2, 4, "h", "w"], None, None, sizes, mode=mode,
                     coordinate_transformation_mode=coordinates)  # fmt: skip
    agree(proto, *IMAGES, {"x": draw(2, 4, 8, 5)}, judge=runtime, tolerance=2e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5])
def test_resizing_by_a_scale(mode: str, scale: float) -> None:
    scales = np.array([1, 1, scale, 2 * scale], np.float32)
    agree(one_node("Resize", SPACE, None, scales, mode=mode), *IMAGES, tolerance=2e-5)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_layers(op: str, direction: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    dirs = 2 if direction == "bidirectional" else 1
    w, r, bias = draw(dirs, gates * 5, 3), draw(dirs, gates * 5, 5), draw(dirs, gates * 10)
    attrs: dict[str, Any] = {"hidden_size": 5, "direction": direction}
    proto = one_node(op, ["n", "b", 3], w, r, bias, outputs=3 if op == "LSTM" else 2, **attrs)
    agree(proto, *({"x": draw(n, b, 3)} for n, b in ((1, 2), (7, 1), (4, 3))), tolerance=1e-5)


@pytest.mark.parametrize(
    ("attrs", "extra", "reason"),
    [
        ({"activations": ["Relu", "Tanh", "Tanh"]}, [], "activations are Relu, Tanh, Tanh"),
        ({"clip": 1.0}, [], "clipped gates"),
        ({"input_forget": 1}, [], "peepholes and coupled gates"),
        ({}, [None, np.array([4, 3], np.int32)], "the lengths"),
        ({}, [None, None, None, None, draw(1, 15)], "peepholes"),
    ],
)
def test_recurrent_layers_that_are_refused(attrs: dict[str, Any], extra: list[Any], reason: str) -> None:
    proto = one_node("LSTM", [4, 2, 3], draw(1, 20, 3), draw(1, 20, 5), *extra, outputs=3, hidden_size=5, **attrs)
    with pytest.raises(UnsupportedError, match=reason):
        load_onnx(proto)


@pytest.mark.parametrize(("opset", "inverse"), [(17, 0), (17, 1), (20, 0)])
def test_fourier_transforms(opset: int, inverse: int) -> None:
    constants = [None, np.array(1)] if opset == 20 else []
    attrs = {"axis": 1} if opset < 20 else {}
    proto = one_node("DFT", ["b", "n", 2], *constants, opset=opset, inverse=inverse, **attrs)
    agree(proto, *({"x": draw(2, n, 2)} for n in (1, 2, 7, 64)), judge=reference, tolerance=2e-5)


def test_operands_that_were_attributes() -> None:
    """TopK before opset 10, Upsample before 9 and Scatter before 11."""
    agree(model("g (float[n, 5] x) => (float[n, 2] y, int64[n, 2] i) { y, i = TopK<k = 2>(x) }", 9), {"x": draw(3, 5)})
    twice = model("g (float[n, 1, h, 3] x) => (float[n, 1, a, b] y) { y = Upsample<scales = [1., 1., 2., 3.]>(x) }", 7)
    agree(twice, {"x": draw(1, 1, 2, 3)}, {"x": draw(2, 1, 5, 3)})
    scatter = (
        """g (float[n, 3] x, int64[m, 3] i, float[m, 3] u) => (float[n, 3] y) { y = Scatter<axis = 0>(x, i, u) }"""
    )
    given = {"x": draw(4, 3), "i": np.array([[0, 1, 2], [3, 3, 0]]), "u": draw(2, 3)}
    agree(model(scatter, 9), given)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatters(reduction: str) -> None:
    text = f"""g (float[n, 3] x, int64[m, 1] i, float[m, 3] u, int64[m, 3] j) => (float[n, 3] y, float[n, 3] z) {{
        y = ScatterND<reduction = "{reduction}">(x, i, u)
        z = ScatterElements<axis = 0, reduction = "{reduction}">(x, j, u)
    }}"""
    given = {"i": np.array([[2], [0]]), "u": draw(2, 3), "j": np.array([[0, 1, -1], [3, 2, 0]])}
    agree(model(text), given | {"x": draw(4, 3)}, given | {"x": draw(5, 3)})
