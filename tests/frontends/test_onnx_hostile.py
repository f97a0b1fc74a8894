"""Files made to harm: each is refused with a ModelError that names the place; none crashes, hangs, fills the memory or
reads outside the model's folder."""

from __future__ import annotations

import os
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import AttributeProto, TensorProto, helper

import attnc
from attnc.frontends.onnx import load_onnx
from attnc.ir import ModelError, evaluate, parse, verify

ADD = "g (float[seq, 2] x) => (float[seq, 2] y) <float[2] w = {1.0, 2.0}> { y = Add(x, w) }"
HUGE = 2**62


def model(text: str = ADD, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def refused(proto: onnx.ModelProto, message: str, folder: Path) -> None:
    """From memory and from a file, whose name must be told."""
    with pytest.raises(ModelError, match=message):
        load_onnx(proto)
    path = folder / "hostile.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=rf"(?s)hostile\.onnx.*({message})"):
        attnc.load(path)


# -- files that are no models --------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde"


@pytest.mark.parametrize(
    "content",
    [np.random.default_rng(seed).bytes(1000) for seed in range(8)]
    + [b"A text.\n" * 100, PNG, b"\0" * 4096, b"\xff" * 4096, b"\x08\x08", b"\x3a\x00", b"\x3a\xff\xff\xff\xff\x0f"],
)
def test_other_content(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"other\.onnx"):
        attnc.load(path)


def test_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "zip.onnx"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model.onnx", model().SerializeToString())
    with pytest.raises(ModelError, match=r"zip\.onnx is not an ONNX file"):
        attnc.load(path)


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    for load in (attnc.load, load_onnx):
        with pytest.raises(ModelError, match=r"folder\.onnx"):
            load(tmp_path / "folder.onnx")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
def test_pipes_and_devices_do_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    endless = tmp_path / "zero.onnx"
    endless.symlink_to("/dev/zero")
    for path in (pipe, endless):
        for load in (attnc.load, load_onnx):
            with pytest.raises(ModelError, match=path.name):
                load(path)


@pytest.mark.skipif(sys.platform == "win32", reason="sparse files are made otherwise")
def test_a_file_larger_than_any_protobuf_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"large\.onnx has 1024\.0 GB, but an ONNX file can hold 2"):
        attnc.load(path)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are others")
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.onnx"
    path.write_bytes(model().SerializeToString())
    path.chmod(0)
    with pytest.raises(ModelError, match=r"secret\.onnx.*ermission"):
        attnc.load(path)


@pytest.mark.parametrize("name", ["a" * 5000 + ".onnx", "a\0b.onnx", "\ud800.onnx"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelError):
        attnc.load(name)
    with pytest.raises(ModelError):
        load_onnx(name)


# -- external data -------------------------------------------------------------------------------------------


def external(folder: Path, *tensors: dict[str, str]) -> Path:
    """A sum of x with float[2] tensors that lie in files as the entries say."""
    nodes, initialisers = [], []
    for k, entries in enumerate(tensors):
        tensor = TensorProto(name=f"w{k}", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        initialisers.append(tensor)
        nodes.append(helper.make_node("Add", [f"x{k}", f"w{k}"], [f"x{k + 1}"]))
    values = [helper.make_tensor_value_info(f"x{k}", TensorProto.FLOAT, ["n", 2]) for k in (0, len(tensors))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initialisers)
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    )
    return path


def at(offset: object, length: object = 8, location: str = "w.bin") -> dict[str, str]:
    return {"location": location, "offset": str(offset), "length": str(length)}


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A folder with a file of weights; another lies outside."""
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\1" * 64)
    (folder / "w.bin").write_bytes(np.arange(16, dtype=np.float32).tobytes())
    (folder / "empty.bin").write_bytes(b"")
    (folder / "folder.bin").mkdir()
    return folder


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "external, but not in which file"),
        ({"offset": "0"}, "external, but not in which file"),
        (at(0, location="../secret.bin"), "not inside the model's folder"),
        (at(0, location="./../secret.bin"), "not inside the model's folder"),
        (at(0, location="folder.bin/../../secret.bin"), "not inside the model's folder"),
        (at(0, location="..\\secret.bin"), "not inside the model's folder"),
        (at(0, location="/etc/passwd"), "not inside the model's folder"),
        (at(0, location="C:\\secret.bin"), "not inside the model's folder"),
        (at(0, location="//host/share"), "not inside the model's folder"),
        (at(0, location="w.bin\0"), "not inside the model's folder"),
        (at(0, location="a" * 5000), "cannot be read"),
        (at(0, location="other.bin"), "missing"),
        (at(0, location="w.bin/x"), "cannot be read|missing"),
        (at(0, location="."), "not a file|cannot be read"),
        (at(0, location="folder.bin"), "not a file|cannot be read"),
        (at(0, location="empty.bin"), "reaches byte 8 of .*empty.bin, which has 0"),
        (at(57), r"reaches byte 65 of .*w\.bin, which has 64"),
        (at(2**63 - 1), "reaches byte"),
        (at(10**19), "not a number of bytes"),
        (at(-8), "not a number of bytes"),
        (at("0x8"), "not a number of bytes"),
        (at("8.0"), "not a number of bytes"),
        (at("٨"), "not a number of bytes"),
        (at(0, -8), "not a number of bytes"),
        (at(0, "eight"), "not a number of bytes"),
        (at(0, 64), r"has 64 bytes in w.bin, but float32\[2\] needs 8"),
    ],
)  # fmt: skip
def test_external_data(entries: dict[str, str], message: str, inside: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.onnx: tensor w0 .*({message})"):
        attnc.load(external(inside, entries))


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("target", ["../secret.bin", "/etc/passwd", "/dev/zero", "loop.bin", ".."])
def test_links_that_leave_the_folder(target: str, inside: Path) -> None:
    (inside / "loop.bin").symlink_to(target)
    for location in ("loop.bin", *(["loop.bin/secret.bin"] if target == ".." else [])):
        with pytest.raises(ModelError, match=r"model\.onnx: tensor w0 .*(leaves the model's folder|cannot be read)"):
            attnc.load(external(inside, at(0, location=location)))


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_inside_the_folder_and_a_model_that_is_one(inside: Path, tmp_path: Path) -> None:
    """A cache of downloads keeps model and data elsewhere, side by side, under links."""
    (inside / "link.bin").symlink_to("w.bin")
    path = external(inside, at(0, location="link.bin"))
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "model.onnx").symlink_to(path)
    (cache / "link.bin").symlink_to(inside / "w.bin")
    for source in (path, cache / "model.onnx"):
        graph = attnc.load(source)
        assert evaluate(graph, {"x0": np.zeros((1, 2), np.float32)})["x1"].tolist() == [[0.0, 1.0]]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes")
def test_external_data_in_a_pipe_does_not_hang(inside: Path) -> None:
    os.mkfifo(inside / "pipe.bin")
    with pytest.raises(ModelError, match=r"tensor w0 .*not a file"):
        attnc.load(external(inside, at(0, location="pipe.bin")))


def test_tensors_share_all_of_their_bytes_or_none(inside: Path) -> None:
    graph = attnc.load(external(inside, at(8), at(8), at(16), at(8, location="./w.bin")))
    assert evaluate(graph, {"x0": np.zeros((1, 2), np.float32)})["x4"].tolist() == [[10.0, 14.0]]
    for first, second in ((at(8), at(12)), (at(12), at(8)), (at(8, location="./w.bin"), at(12))):
        with pytest.raises(
            ModelError, match=r"tensor w1 has bytes \d+ to \d+ of w\.bin, which overlap those of tensor w0"
        ):
            attnc.load(external(inside, first, second))


def test_bytes_at_any_offset(inside: Path) -> None:
    (inside / "odd.bin").write_bytes(b"\0" * 3 + np.array([1, 2], np.float32).tobytes())
    graph = attnc.load(external(inside, at(3, location="odd.bin")))
    assert evaluate(graph, {"x0": np.zeros((1, 2), np.float32)})["x1"].tolist() == [[1.0, 2.0]]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_thousands_of_tensors_need_no_thousands_of_open_files(inside: Path) -> None:
    count = 300
    (inside / "many.bin").write_bytes(b"\0" * 8 * count)
    path = external(inside, *(at(8 * k, location="many.bin") for k in range(count)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20 if soft > 100 else soft, hard))
    try:
        assert len(attnc.load(path)) == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- tensors -------------------------------------------------------------------------------------------------


def _dims(*dims: int) -> Callable[[TensorProto], None]:
    def change(t: TensorProto) -> None:
        t.ClearField("dims")
        t.dims.extend(dims)

    return change


def _raw(data: bytes) -> Callable[[TensorProto], None]:
    def change(t: TensorProto) -> None:
        t.ClearField("float_data")
        t.raw_data = data

    return change


def _int8(*values: int) -> Callable[[TensorProto], None]:
    def change(t: TensorProto) -> None:
        t.ClearField("float_data")
        t.data_type = TensorProto.INT8
        t.int32_data.extend(values)

    return change


def _segment(t: TensorProto) -> None:
    t.segment.begin, t.segment.end = 0, 1


def _external_without_entries(t: TensorProto) -> None:
    t.ClearField("float_data")
    t.data_location = TensorProto.EXTERNAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_dims(HUGE), "holds 2 elements"),
        (_dims(HUGE, HUGE, HUGE), "holds 2 elements"),
        (_dims(2**32, 2**32), "holds 2 elements"),
        (_dims(-2), "negative shape"),
        (_dims(-1, -2), "negative shape"),
        (_dims(*[1] * 65, 2), "66 axes"),
        (_dims(3), "holds 2 elements"),
        (_dims(), "holds 2 elements"),
        (_raw(b""), "holds 0 bytes"),
        (_raw(b"\0" * 7), "holds 7 bytes"),
        (_raw(b"\0" * 12), "holds 12 bytes"),
        (_int8(1, 300), "no int8"),
        (_int8(1), "holds 1 elements"),
        (_segment, "segments"),
        (_external_without_entries, "external"),
        (lambda t: t.ClearField("data_type"), "element type undefined"),
        (lambda t: t.ClearField("float_data"), "holds 0 elements"),
    ],
)
def test_tensors(change: Callable[[TensorProto], None], message: str, tmp_path: Path) -> None:
    proto = model()
    change(proto.graph.initializer[0])
    refused(proto, f"tensor w .*{message}", tmp_path)


def test_bytes_that_are_no_booleans_are_true() -> None:
    proto = model("g (float[3] x) => (float[3] y) <bool[3] c = {0, 1, 1}> { y = Where(c, x, x)\n }")
    t = proto.graph.initializer[0]
    t.ClearField("int32_data")
    t.raw_data = b"\0\2\xff"
    proto.graph.node[0].CopyFrom(helper.make_node("Identity", ["c"], ["y"]))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    found = evaluate(load_onnx(proto), {"x": np.zeros(3, np.float32)})["y"]
    assert found.view(np.uint8).tolist() == [0, 1, 1]


# -- graphs --------------------------------------------------------------------------------------------------


def _set(change: Callable[[onnx.ModelProto], Any], text: str = ADD) -> onnx.ModelProto:
    proto = model(text)
    change(proto)
    return proto


def _attribute(name: str, value: Any, text: str, type: int | None = None) -> onnx.ModelProto:
    """The model with another value of an attribute of its first node."""
    proto = model(text)
    node = proto.graph.node[0]
    for a in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(a)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))
        if type is not None:
            node.attribute[-1].type = type
    return proto


CAST = "g (float[4] x) => (int64[4] y) { y = Cast<to = 7>(x) }"
SOFTMAX = "g (float[4, 4] x) => (float[4, 4] y) { y = Softmax<axis = 1>(x) }"
NEST = "g (float[4] x, bool c) => (float[4] y) { y = Neg(x) }"


def nested(depth: int) -> onnx.ModelProto:
    """If in If in If."""
    proto = model(NEST)
    inner = helper.make_node("Neg", ["x"], ["y"])
    plain = helper.make_graph([inner], "plain", [], [helper.make_empty_tensor_value_info("y")])
    proto.graph.node[0].CopyFrom(inner)
    place = proto.graph.node[0]
    for _ in range(depth):
        place.CopyFrom(helper.make_node("If", ["c"], ["y"], else_branch=plain))
        branch = place.attribute.add(name="then_branch", type=AttributeProto.GRAPH)
        branch.g.CopyFrom(plain)
        place = branch.g.node[0]
    return proto


def doubling(levels: int) -> onnx.ModelProto:
    """Functions each of which calls the one before it twice."""
    proto = model(NEST)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    opsets = list(proto.opset_import)
    nodes = [helper.make_node("Neg", ["a"], ["b"])]
    for k in range(levels):
        proto.functions.append(helper.make_function("own", f"f{k}", ["a"], ["b"], nodes, opsets))
        calls = [("a", "t"), ("t", "b")]
        nodes = [helper.make_node(f"f{k}", [a], [b], domain="own") for a, b in calls]
    proto.graph.node[0].CopyFrom(helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="own"))
    return proto


def calling(*names: str) -> onnx.ModelProto:
    """Functions that call each other in a circle."""
    proto = model(NEST)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    for k, name in enumerate(names):
        node = helper.make_node(names[(k + 1) % len(names)], ["a"], ["b"], domain="own")
        proto.functions.append(helper.make_function("own", name, ["a"], ["b"], [node], list(proto.opset_import)))
    proto.graph.node[0].CopyFrom(helper.make_node(names[0], ["x"], ["y"], domain="own"))
    return proto


def bad_text() -> onnx.ModelProto:
    """A name that is not UTF-8."""
    proto = model(ADD.replace("w", "wwww"))
    back: onnx.ModelProto = onnx.ModelProto.FromString(proto.SerializeToString().replace(b"wwww", b"w\xff\xfew"))
    return back


GRAPHS: dict[str, tuple[onnx.ModelProto, str]] = {
    "ir_version 0": (_set(lambda m: setattr(m, "ir_version", 0)), "ir_version is 0"),
    "no ir_version": (_set(lambda m: m.ClearField("ir_version")), "ir_version is 0"),
    "ir_version 10^9": (_set(lambda m: setattr(m, "ir_version", 10**9)), "ir_version.* 1000000000, .*upgrade onnx"),
    "ir_version < 0": (_set(lambda m: setattr(m, "ir_version", -1)), "ir_version is -1"),
    "no opset_import": (_set(lambda m: m.ClearField("opset_import")), "opset_import"),
    "opset 10^6": (model(opset=10**6), "opset 1000000, .*upgrade onnx"),
    "opset 2^62": (model(opset=HUGE), "upgrade onnx"),
    "opset < 0": (model(opset=-5), "opset -5"),
    "two opsets": (_set(lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx", 17))), "ai.onnx 2 times"),
    "unknown domain": (_set(lambda m: setattr(m.graph.node[0], "domain", "no.such")), r"1 operator .*1 × no\.such\.Add"),  # noqa: E501
    "no outputs": (_set(lambda m: m.graph.ClearField("output")), "no ONNX graph with outputs"),
    "output of nothing": (_set(lambda m: setattr(m.graph.output[0], "name", "z")), "nothing makes the output z"),
    "output twice": (_set(lambda m: m.graph.output.append(m.graph.output[0])), "outputs have y 2 times"),
    "input twice": (_set(lambda m: m.graph.input.append(m.graph.input[0])), "inputs have x 2 times"),
    "input without a name": (_set(lambda m: setattr(m.graph.input[0], "name", "")), "an input has no name"),
    "initialiser twice": (_set(lambda m: m.graph.initializer.append(m.graph.initializer[0])), "w is defined twice"),
    "initialiser without a name": (_set(lambda m: setattr(m.graph.initializer[0], "name", "")), "has no name"),
    "result called as an input": (_set(lambda m: m.graph.node[0].output.__setitem__(0, "x")), "x is defined twice"),
    "result called as an initialiser": (_set(lambda m: m.graph.node[0].output.__setitem__(0, "w")), "w is defined twice"),  # noqa: E501
    "result twice": (_set(lambda m: m.graph.node.append(m.graph.node[0])), "y is defined twice"),
    "reads itself": (_set(lambda m: m.graph.node[0].input.__setitem__(0, "y")), r"y \(Add\) need"),
    "reads nothing": (_set(lambda m: m.graph.node[0].input.__setitem__(0, "no")), "reads no, which nothing defines"),
    "no operator": (_set(lambda m: m.graph.node[0].ClearField("op_type")), "does not say its operator"),
    "no operands": (_set(lambda m: m.graph.node[0].ClearField("input")), r"node y \(Add\)"),
    "too many operands": (_set(lambda m: m.graph.node[0].input.extend(["x"] * 9)), r"node y \(Add\)"),
    "too many results": (_set(lambda m: m.graph.node[0].output.extend(["a", "b"])), "no output a, b"),
    "a name that is not UTF-8": (bad_text(), "not text in UTF-8"),
    "a name of 10 MB": (_set(lambda m: setattr(m.graph.node[0], "name", "n" * 10**7)), "10000000 characters"),
    "a size's name of 10 MB": (
        _set(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "s" * 10**7)),
        "10000000 characters",
    ),
    "huge input": (model(f"g (float[{HUGE}, {HUGE}] x) => (float[1] y) {{ y = Neg(x) }}"), "input x has .* elements"),
    "input with 100 axes": (
        _set(lambda m: m.graph.input[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension(dim_value=1)] * 100)),  # noqa: E501
        "input x has 102 axes",
    ),
    "attribute twice": (_set(lambda m: m.graph.node[0].attribute.append(m.graph.node[0].attribute[0]), SOFTMAX), "2 times"),  # noqa: E501
    "attribute without a type": (_attribute("axis", 1, SOFTMAX, AttributeProto.UNDEFINED), "axis has no type"),
    "attribute of the wrong type": (_attribute("axis", "one", SOFTMAX), r"y \(Softmax\).*axis"),
    "a float for an integer": (_attribute("axis", 0.5, SOFTMAX), r"y \(Softmax\).*axis"),
    "integers for an integer": (_attribute("axis", [1], SOFTMAX), r"y \(Softmax\).*axis"),
    "attribute out of range": (_attribute("axis", HUGE, SOFTMAX), r"y \(Softmax\).*axis"),
    "attribute missing": (_attribute("to", None, CAST), r"y \(Cast\).*to"),
    "no such element type": (_attribute("to", 10**6, CAST), r"y \(Cast\).*number 1000000"),
    "attribute not UTF-8": (
        _attribute("equation", b"i\xff,j->ij", 'g (float[2] x) => (float[a, b] y) { y = Einsum<equation = "i,j->ij">(x, x) }'),  # noqa: E501
        r"y \(Einsum\)",
    ),
    "subgraphs 1,000 deep": (nested(40), "more than 32 deep|nested too deeply"),
    "functions in a circle": (calling("f", "g", "h"), "function f calls itself"),
    "functions that double 30 times": (doubling(30), r"stands for \d{10} nodes"),
    "functions 100 deep": (doubling(100), "more than 32 deep"),
    "function twice": (calling("f", "f"), "f 2 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, tmp_path: Path) -> None:
    proto, message = GRAPHS[name]
    refused(proto, message, tmp_path)


def test_nesting_beyond_what_protobuf_reads(tmp_path: Path) -> None:
    """A thousand levels, as bytes: a length and a field for each."""
    content = nested(0).graph.node[0].SerializeToString()
    for _ in range(1000):
        for field in (b"\x0a", b"\x32", b"\x2a"):  # node of a graph, graph of an attribute, attribute of a node
            content = field + _varint(len(content)) + content
    path = tmp_path / "deep.onnx"
    graph = b"\x0a" + _varint(len(content)) + content + b"\x62\x03\x0a\x01y"
    path.write_bytes(b"\x08\x08\x3a" + _varint(len(graph)) + graph + b"\x42\x02\x10\x12")
    with pytest.raises(ModelError, match=r"deep\.onnx is not an ONNX file, or .* nested too deeply"):
        attnc.load(path)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def test_sparse_initialisers_are_refused(tmp_path: Path) -> None:
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("", TensorProto.INT64, [1], [0])
    proto = model()
    proto.graph.initializer.pop()
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2]))
    refused(proto, "sparse initialisers: w", tmp_path)


def test_an_initialiser_that_is_an_input_is_a_constant() -> None:
    """As models of IR version 3 and before have it."""
    proto = model()
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    graph = load_onnx(proto)
    assert [v.name for v in graph.inputs] == ["x"]
    assert evaluate(graph, {"x": np.zeros((1, 2), np.float32)})["y"].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("name", ["a\nb", 'a"b', "a\0b", "a  # b", "%a", "日本", "a = b", "const", "}"])
def test_odd_names_are_kept(name: str) -> None:
    proto = model()
    proto.graph.node[0].input[0] = proto.graph.input[0].name = proto.graph.node[0].name = name
    graph = load_onnx(proto)
    verify(graph)
    assert graph.inputs[0].name == name
    assert str(parse(str(graph))) == str(graph)


GIANTS = {
    "ConstantOfShape": ("ConstantOfShape(big)", "float[n]"),
    "Expand": ("Expand(one, big)", "int64[n]"),
    "Tile": ("Tile(one, big)", "int64[n]"),
    "Range": ("Range(first, last, first)", "int64[n]"),
    "OneHot": ("OneHot(one, last, ends)", "int64[a, b]"),
    "Pad": ("Pad(one, pads)", "int64[n]"),
    "HannWindow": ("HannWindow(last)", "float[n]"),
    "BlackmanWindow": ("BlackmanWindow(last)", "float[n]"),
}


@pytest.mark.parametrize("size", [10**9, HUGE])
@pytest.mark.parametrize("name", GIANTS)
def test_nothing_gigantic_is_computed_at_import(name: str, size: int) -> None:
    """The result is gigantic when it is run; to import and compile it takes next to nothing, or it is refused."""
    call, type = GIANTS[name]
    proto = model(f"""g (float[1] x) => ({type} y)
        <int64[1] one = {{1}}, int64 first = {{1}}, int64[2] ends = {{0, 1}}, int64[1] big, int64 last, int64[2] pads>
        {{ y = {call} }}""")
    for t in proto.graph.initializer[3:]:
        t.int64_data.extend([size] * (2 if t.name == "pads" else 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        attnc.compile(load_onnx(proto), target="numpy")
    except attnc.AttncError as error:
        assert name in str(error)  # noqa: PT017 - it may also succeed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("op", ["Mul", "Add", "Sub", "Div", "Mod", "Max", "Min", "Pow"])
def test_sizes_that_grow_without_end(op: str) -> None:
    lines = "\n".join(f"t{k + 1} = {op}(t{k}, t{k})\n s{k + 1} = {op}(t{k + 1}, n)" for k in range(200))
    proto = model(
        f"g (float[a, b] x) => (float[p, q] y) {{ t0 = Shape(x)\n n = Shape(x)\n {lines}\n y = ConstantOfShape(s200) }}"
    )
    try:
        verify(load_onnx(proto))
    except ModelError as error:
        assert "node" in str(error)  # noqa: PT017 - it may also succeed


def test_forty_unknown_operators_read_well() -> None:
    """Each with its count and its first node, the most frequent first, and what to do."""
    lines = [f"y{k}_{n} = com.example.Op{k}(x)" for k in range(40) for n in range(40 - k)]
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18, "com.example" : 1]>
        g (float[4] x) => (float[4] y0_0) {{ {chr(10).join(lines)} }}""")
    with pytest.raises(ModelError) as error:
        load_onnx(proto)
    told = str(error.value).split("\n")
    assert told[0].endswith("uses 40 operators that attnc does not know, in 820 nodes: ")
    assert told[1] == "  40 × com.example.Op0 (first y0_0)"
    assert told[40] == "  1 × com.example.Op39 (y39_0)"
    assert "Export the model with other settings" in told[41]
