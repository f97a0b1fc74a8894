"""Exported models on disk: the data file, and what happens when writing fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx import OnnxBackend, export, export_onnx, save
from attnc.backends.ort import OrtCpuBackend
from attnc.ir import Array, DType, Graph, OutputError, Tensor, TensorType, evaluate


def weights() -> Graph:
    """Sums of large constants of several types and layouts, and a small one."""
    rng = np.random.default_rng(0)
    graph = Graph("weights")
    x = graph.add_input("x", TensorType(DType.FLOAT32, ()))
    large = rng.normal(size=(40, 50)).astype(np.float32)
    arrays: dict[str, Array] = {
        "plain": large,
        "turned": np.asfortranarray(large * 2),
        "strided": np.ascontiguousarray(large)[::3, ::2],
        "broadcast": np.broadcast_to(large[0], (30, 50)),
        "half": large.astype(np.float16),
        "brain": large.astype(DType.BFLOAT16.numpy),
        "long": np.arange(500),
        "bits": large > 0,
        "small": np.array([1, 2, 3], np.float32),
    }
    for name, array in arrays.items():
        value = graph.add("cast", graph.add_constant(array, name), attrs={"dtype": DType.FLOAT32})[0]
        graph.add_output(graph.add("mul", value, x)[0], f"y_{name}")
    return graph


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_large_constants_lie_in_one_aligned_file(tmp_path: Path) -> None:
    graph = weights()
    export_onnx(graph, tmp_path / "m.onnx", opset=17)
    assert set(files(tmp_path)) == {"m.onnx", "m.onnx.data"}
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    data = (tmp_path / "m.onnx.data").read_bytes()
    inside = {t.name for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    assert inside == {"small"}
    for proto in model.graph.initializer:
        if proto.name not in inside:
            entry = {e.key: e.value for e in proto.external_data}
            constant = graph.value(proto.name).constant
            assert constant is not None
            assert entry["location"] == "m.onnx.data"
            assert int(entry["offset"]) % 4096 == 0
            at, length = int(entry["offset"]), int(entry["length"])
            assert data[at : at + length] == np.ascontiguousarray(constant.array).tobytes()


def test_placements_say_where_the_bytes_are(tmp_path: Path) -> None:
    graph = weights()
    placed = OnnxBackend().build(graph, tmp_path, Options())
    large = [v.constant for v in graph.constants if v.constant is not None and v.constant.nbytes > 1024]
    assert set(placed) == {t.digest for t in large}
    for tensor in large:
        place = placed[tensor.digest]
        data = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.nbytes]
        assert data == np.ascontiguousarray(tensor.array).tobytes()


@pytest.mark.parametrize("backend", [OnnxBackend, OrtCpuBackend])
def test_a_built_folder_runs(backend: type[OnnxBackend], tmp_path: Path) -> None:
    graph = weights()
    backend().build(graph, tmp_path, Options())
    feeds = {"x": np.asarray(3, np.float32)}
    want = evaluate(graph, feeds)
    for folder in (tmp_path, None):
        got = backend().load(graph, folder, Options(threads=1)).run(feeds, {})
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def test_no_data_file_without_large_constants(tmp_path: Path) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT32, (2,)))
    graph.add_output(graph.add("neg", x)[0], "y")
    export_onnx(graph, str(tmp_path / "m.onnx"))
    assert set(files(tmp_path)) == {"m.onnx"}


def test_writing_again_replaces(tmp_path: Path) -> None:
    export_onnx(weights(), tmp_path / "m.onnx", opset=17)
    first = files(tmp_path)
    export_onnx(weights(), tmp_path / "m.onnx", opset=23)
    assert set(files(tmp_path)) == set(first)
    assert files(tmp_path)["m.onnx"] != first["m.onnx"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["data", "rename", "second rename"])
def test_a_failure_leaves_what_was_there(
    moment: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    if existing:
        export_onnx(weights(), path, opset=17)
    before = files(tmp_path)
    full = OSError(28, "No space left on device")
    calls = 0
    write, replace = save._write_at, os.replace

    def failing_write(file: Any, offset: int, tensor: Tensor) -> None:
        nonlocal calls
        calls += 1
        if moment == "data" and calls == 3:
            raise full
        write(file, offset, tensor)

    def failing_replace(source: Path, target: Path) -> None:
        nonlocal calls
        if str(source).endswith(".tmp"):
            calls += 100
            if (moment, calls // 100) in (("rename", 1), ("second rename", 2)):
                raise full
        replace(source, target)

    monkeypatch.setattr(save, "_write_at", failing_write)
    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OutputError, match=r"m\.onnx: cannot be written: No space left on device"):
        export_onnx(weights(), path)
    assert files(tmp_path) == before


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        export_onnx(weights(), tmp_path / "nowhere" / "m.onnx")


def test_too_large_for_one_model() -> None:
    graph = Graph("giant")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (1,)))
    giant = Tensor(np.broadcast_to(np.float32(1), (2**15, 2**15)))
    graph.add_output(graph.add("mul", graph.add_constant(giant, "w"), x)[0], "y")
    with pytest.raises(OutputError, match=r"4\.0 GB.*export_onnx"):
        export(graph)
