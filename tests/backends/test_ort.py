"""ONNX Runtime as a target."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx import OnnxBackend
from attnc.backends.ort import OrtCpuBackend, OrtCudaBackend, session
from attnc.ir import (
    ArtifactError,
    AttncError,
    Builder,
    DType,
    Graph,
    TargetError,
    TensorType,
    UnsupportedError,
    UsageError,
    evaluate,
    symbol,
)
from attnc.passes.lower import lower
from attnc.tests.backends.samples import cases, since

F = DType.FLOAT32


def small(dtype: DType = F) -> Graph:
    graph = Graph("small")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(dtype, (symbol("n"), 32)))
    w = b.constant(np.random.default_rng(0).normal(size=(32, 32)).astype(dtype.numpy), "w")
    graph.add_output(b("softmax", b.matmul(x, w)), "y")
    return graph


def feeds(dtype: DType = F) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(3, 32)).astype(dtype.numpy)}


def test_check_passes_here() -> None:
    OrtCpuBackend().check()
    OnnxBackend().check()


@pytest.mark.parametrize("opset", [None, 13, 17, 23])
@pytest.mark.parametrize("dtype", [F, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64], ids=str)
def test_run(dtype: DType, opset: int | None, tmp_path: Path) -> None:
    graph, options = small(dtype), Options(opset, threads=1)
    want = evaluate(graph, feeds(dtype))["y"]
    OrtCpuBackend().build(graph, tmp_path, options)
    for folder in (None, tmp_path):
        executable = OrtCpuBackend().load(graph, folder, options)
        got = executable.run(feeds(dtype), {})["y"]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        tolerance = {DType.FLOAT16: 3e-3, DType.BFLOAT16: 3e-2}.get(dtype, 1e-5)
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)
        executable.close()


def test_a_result_outlives_the_session() -> None:
    executable = OrtCpuBackend().load(small(DType.BFLOAT16), None, Options())
    first = executable.run(feeds(DType.BFLOAT16), {})["y"]
    kept = first.copy()
    executable.run({"x": 2 * feeds(DType.BFLOAT16)["x"]}, {})
    executable.close()
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("opset", [13, 23])
def test_all_samples_after_lowering_by_what_is_supported(opset: int) -> None:
    backend, options = OrtCpuBackend(), Options(opset, threads=1)
    for case in cases(symbolic=False):
        graph = case.graph.copy()
        lower(graph, lambda node: backend.supports(node, options))
        try:
            executable = backend.load(graph, None, options)
        except UnsupportedError as error:
            lacking = since(error)
        else:
            lacking = 0
        assert lacking == 0 or lacking > opset
        if lacking:
            continue
        want = evaluate(case.graph, case.feeds, states=dict(case.states))
        got = executable.run(case.feeds, dict(case.states))
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def test_composites_are_decomposed_where_the_opset_lacks_them() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (2, 4)))
    graph.add_output(graph.add("rms_norm", x)[0], "y")
    (node,) = graph.nodes
    for backend in (OnnxBackend(), OrtCpuBackend()):
        assert backend.supports(node, Options(23))
        assert not backend.supports(node, Options(22))
        with pytest.raises(UsageError, match="opset 99"):
            backend.supports(node, Options(99))


def test_threads_are_passed_on() -> None:
    executable = OrtCpuBackend().load(small(), None, Options(threads=1))
    assert isinstance(executable, session.OrtExecutable)
    assert executable._session.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize("dtype", [F, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64], ids=str)
def test_weights_are_not_copied_into_the_model(dtype: DType) -> None:
    graph = small(dtype)
    executable = OrtCpuBackend().load(graph, None, Options(threads=1))
    assert isinstance(executable, session.OrtExecutable)
    (weights,) = executable._weights
    stored = graph.value("w").constant
    assert stored is not None
    assert weights.data_ptr() == stored.array.ctypes.data
    got = executable.run(feeds(dtype), {})["y"]
    tolerance = {DType.FLOAT16: 3e-3, DType.BFLOAT16: 3e-2}.get(dtype, 1e-5)
    want = evaluate(small(dtype), feeds(dtype))["y"]
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


def test_a_folder_without_the_model(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        OrtCpuBackend().load(small(), tmp_path, Options())


def test_a_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(AttncError, match="cannot load small for ort-cpu"):
        OrtCpuBackend().load(small(), tmp_path, Options())


def test_a_run_that_fails_names_node_and_target() -> None:
    graph = Graph("lookup")
    table, ids = graph.add_input("table", TensorType(F, (3,))), graph.add_input("ids", TensorType(DType.INT64, (2,)))
    graph.add_output(graph.add("gather", table, ids, source="embed")[0], "y")
    executable = OrtCpuBackend().load(graph, None, Options(threads=1))
    with pytest.raises(AttncError, match=r"lookup \(ort-cpu\).*embed/Gather"):
        executable.run({"table": np.zeros(3, np.float32), "ids": np.array([0, 7])}, {})


def test_the_cuda_target_says_what_to_install() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        OrtCudaBackend().check()
    else:
        with pytest.raises(TargetError, match=r"ort-cuda.*CUDAExecutionProvider.*pip install onnxruntime-gpu"):
            OrtCudaBackend().check()


@pytest.mark.parametrize("backend", [OrtCpuBackend, OrtCudaBackend])
def test_without_onnxruntime(backend: type[OrtCpuBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(TargetError, match=f"{backend.name}.*pip install onnxruntime"):
        backend().check()


def test_the_onnx_target_runs_without_onnxruntime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    OnnxBackend().build(small(), tmp_path, Options())
    for folder in (None, tmp_path):
        got = OnnxBackend().load(small(), folder, Options()).run(feeds(), {})["y"]
        np.testing.assert_allclose(got, evaluate(small(), feeds())["y"], rtol=1e-5)
