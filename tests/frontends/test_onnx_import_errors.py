"""ONNX files that are damaged, inconsistent or not known: every message names the file and the place."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
import onnx.parser
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import ModelError, UnsupportedError, evaluate

ADD = "g (float[seq, 2] x) => (float[seq, 2] y) <float[2] w = {1.0, 2.0}> { y = Add(x, w) }"


def model(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(content)
    return path


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*missing\.onnx"):
        load_onnx(tmp_path / "missing.onnx")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        load_onnx(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.onnx is empty"):
        load_onnx(write(tmp_path, b""))


def test_not_a_protobuf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.onnx is not an ONNX file"):
        load_onnx(write(tmp_path, b"#!/bin/sh\necho this is not a model\n"))


def test_a_truncated_file(tmp_path: Path) -> None:
    whole = model(ADD).SerializeToString()
    for length in range(1, len(whole), 7):
        with pytest.raises(ModelError, match=r"model\.onnx"):
            load_onnx(write(tmp_path, whole[:length]))


def test_no_graph(tmp_path: Path) -> None:
    proto = onnx.ModelProto(ir_version=8)
    with pytest.raises(ModelError, match="holds no ONNX graph"):
        load_onnx(write(tmp_path, proto.SerializeToString()))


@pytest.mark.parametrize(("version", "message"), [(999, "opset 999, but .*upgrade onnx"), (0, "opset 0")])
def test_operator_sets_that_do_not_exist(version: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_onnx(model(ADD, version))


def test_no_operator_set() -> None:
    proto = model(ADD)
    del proto.opset_import[:]
    with pytest.raises(ModelError, match="opset_import"):
        load_onnx(proto)


MIXED = """g (float[seq, 6] x, int64[seq] p) => (float[a, b, c] y) <float[6] w = {1, 2, 3, 4, 5, 6}> {
    n = Shape<start = 0, end = 1>(x)
    rest = Constant<value = int64[2] {2, 3}>()
    t = Concat<axis = 0>(n, rest)
    axis = Constant<value = int64[1] {-1}>()
    m = ReduceMean<keepdims = 1>(x, axis)
    d = Sub(x, m)
    s = Softmax<axis = -1>(d)
    g1 = Gather<axis = 0>(s, p)
    l = LayerNormalization<axis = -1>(g1, w, w)
    r = Transpose<perm = [1, 0]>(l)
    f = Gemm<transB = 1, alpha = 0.5>(r, r)
    e = MatMul(l, f)
    y = Reshape(e, t)
}"""


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.integers(0, 255), st.integers(0, 10**9), st.integers(0, 255))
def test_damaged_bytes_never_surprise(first: int, value: int, second: int, other: int) -> None:
    """Whatever two bytes become, the import works or says what is wrong."""
    content = bytearray(model(MIXED).SerializeToString())
    content[first % len(content)] = value
    content[second % len(content)] = other
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(content))
    except DecodeError:
        return
    with contextlib.suppress(ModelError):
        load_onnx(proto)


# -- external data -------------------------------------------------------------------------------------------


def external(folder: Path, **changes: str) -> Path:
    """ADD with w in weights.bin, its external_data entries changed."""
    (folder / "weights.bin").write_bytes(b"\0" * 64 + np.array([1, 2], np.float32).tobytes())
    proto = model(ADD)
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "weights.bin", "offset": "64", "length": "8"} | changes).items():
        tensor.external_data.add(key=key, value=value)
    return write(folder, proto.SerializeToString())


def test_external_data_is_mapped_not_read(tmp_path: Path) -> None:
    graph = load_onnx(external(tmp_path))
    constant = graph.constants[0].constant
    assert constant is not None
    base: Any = constant.array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj, mmap.mmap)
    assert evaluate(graph, {"x": np.zeros((1, 2), np.float32)})["y"].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "/etc/passwd"}, "not inside the model's folder"),
        ({"location": "../weights.bin"}, "not inside the model's folder"),
        ({"location": "a/../../weights.bin"}, "not inside the model's folder"),
        ({"location": "..\\weights.bin"}, "not inside the model's folder"),
        ({"location": ""}, r"said to be external, but not in which file \(location\)"),
        ({"location": "other.bin"}, "other.bin, which is missing"),
        ({"offset": "68"}, "reaches byte 76 of .*weights.bin, which has 72"),
        ({"offset": "-8"}, "external offset '-8', which is not a number of bytes"),
        ({"length": "12"}, r"12 bytes in .*weights.bin, but float32\[2\] needs 8"),
        ({"offset": "x"}, "external offset 'x', which is not a number of bytes"),
        ({"offset": "6.4e1"}, "external offset '6.4e1', which is not a number of bytes"),
        ({"offset": "9" * 5000}, "external offset '9999.*', which is not a number of bytes"),
    ],
)
def test_external_data_that_is_not_there(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=f"tensor w .*{message}"):
        load_onnx(external(tmp_path, **changes))


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_external_data_through_a_link_that_leaves_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    path = external(inside)
    (inside / "weights.bin").rename(tmp_path / "weights.bin")
    (inside / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match=r"tensor w .*leaves the model's folder"):
        load_onnx(path)


def test_external_data_of_a_model_in_memory(tmp_path: Path) -> None:
    proto = onnx.load(external(tmp_path), load_external_data=False)
    with pytest.raises(ModelError, match=r"tensor w .*load the model from its path"):
        load_onnx(proto)


# -- tensors -------------------------------------------------------------------------------------------------


def test_a_tensor_with_too_few_bytes() -> None:
    proto = model(ADD)
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.raw_data = b"1234"
    with pytest.raises(ModelError, match=r"tensor w holds 4 bytes, but float32\[2\] needs 8"):
        load_onnx(proto)


@pytest.mark.parametrize("code", [TensorProto.STRING, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, 99])
def test_element_types_that_are_not_known(code: int) -> None:
    if code != TensorProto.INT4:  # constants may be of 4 bits
        proto = model(ADD)
        proto.graph.initializer[0].data_type = code
        with pytest.raises(UnsupportedError, match="tensor w has element type"):
            load_onnx(proto)
    proto = model(ADD)
    proto.graph.input[0].type.tensor_type.elem_type = code
    with pytest.raises(UnsupportedError, match="input x has element type"):
        load_onnx(proto)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint8", "int32", "uint64", "bool"])
@pytest.mark.parametrize("raw", [True, False])
def test_tensors_of_every_storage(dtype: str, raw: bool) -> None:
    import ml_dtypes

    array = np.array([0, 1, 1, 0]).astype(getattr(ml_dtypes, dtype, None) or dtype)
    tensor = numpy_helper.from_array(array, "w")
    if not raw:
        tensor = helper.make_tensor("w", tensor.data_type, [4], array.astype(np.float64).tolist())
    node = helper.make_node("Identity", ["w"], ["y"])
    info = helper.make_tensor_value_info("y", tensor.data_type, [4])
    proto = helper.make_model(
        helper.make_graph([node], "g", [], [info], [tensor]), opset_imports=[helper.make_opsetid("", 18)]
    )
    found = evaluate(load_onnx(proto), {})["y"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


# -- graphs --------------------------------------------------------------------------------------------------


def test_all_unknown_operators_are_listed_at_once() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18, "com.example" : 1]>
        g (float[4] x) => (float[4] y) {
            a = com.example.Frobnicate(x)
            b = com.example.Frobnicate(a)
            c = com.example.Twist(b)
            y = NoSuchOperator(c)
        }""")
    with pytest.raises(UnsupportedError) as error:
        load_onnx(proto)
    for part in ("2 × com.example.Frobnicate", "1 × com.example.Twist", "1 × NoSuchOperator"):
        assert part in str(error.value)


def test_unknown_operators_inside_loops_are_listed_too() -> None:
    proto = model("""g (float x, int64 trips) => (float last) {
        yes = Constant<value = bool {1}>()
        last = Loop (trips, yes, x) <
            body = b (int64 i, bool c, float s) => (bool d, float t) { d = Identity(c)\n t = NoSuchOperator(s) }
        >
    }""")
    with pytest.raises(UnsupportedError, match="1 × NoSuchOperator"):
        load_onnx(proto)


def test_an_operand_that_nothing_defines() -> None:
    with pytest.raises(ModelError, match=r"node y \(Add\) reads w, which nothing defines"):
        load_onnx(model("g (float[4] x) => (float[4] y) { y = Add(x, w) }"))


def test_an_output_that_nothing_makes() -> None:
    with pytest.raises(ModelError, match="nothing makes the output z"):
        load_onnx(model("g (float[4] x) => (float[4] z) { y = Neg(x) }"))


def test_a_name_defined_twice() -> None:
    with pytest.raises(ModelError, match=r"the name t is defined twice, the second time by t \(Exp\)"):
        load_onnx(model("g (float[4] x) => (float[4] y) { t = Neg(x)\n t = Exp(x)\n y = Neg(t) }"))


def test_a_cycle() -> None:
    with pytest.raises(ModelError, match=r"a \(Add\), b \(Neg\) need each other's results"):
        load_onnx(model("g (float[4] x) => (float[4] a) { a = Add(x, b)\n b = Neg(a) }"))


def test_a_function_that_calls_itself() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        g (float[4] x) => (float[4] y) { y = own.f(x) }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        f(v) => (w) { w = own.f(v) }""")
    with pytest.raises(ModelError, match="f calls itself"):
        load_onnx(proto)


def test_shapes_that_do_not_fit_name_node_operator_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, model("g (float[2, 3] x) => (float[2, 2] y) { y = MatMul(x, x) }").SerializeToString())
    with pytest.raises(ModelError, match=r"model\.onnx: node y \(MatMul\): .*2.*3"):
        load_onnx(path)


def test_a_shape_of_unknown_rank_that_is_data() -> None:
    with pytest.raises(
        UnsupportedError, match=r"node y \(Reshape\): shape \(s\) is int64\[n_size\], computed from data"
    ):
        load_onnx(model("g (float[4] x, int64[n] s) => (float[a, b] y) { y = Reshape(x, s) }"))


def test_an_input_that_is_a_sequence() -> None:
    proto = model(ADD)
    proto.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(proto.graph.input[0].type))
    with pytest.raises(UnsupportedError, match="input x is not a tensor but sequence"):
        load_onnx(proto)


def test_an_input_without_a_rank() -> None:
    proto = model(ADD)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedError, match="input x has no shape"):
        load_onnx(proto)


def test_squeezing_whatever_is_one() -> None:
    with pytest.raises(UnsupportedError, match=r"node y \(Squeeze\).*seq.*give it axes"):
        load_onnx(model("g (float[seq, 1] x) => (float[a] y) { y = Squeeze(x) }"))


def test_an_attribute_that_is_not_known() -> None:
    """A newer operator set may give an operator a new attribute: to ignore it would be wrong numbers."""
    proto = model("g (float[4] x) => (float[4] y) { y = Relu<leak = 0.5>(x) }")
    with pytest.raises(UnsupportedError, match=r"node y \(Relu\): .*attribute leak"):
        load_onnx(proto)
