"""Products with weights in few bits on ONNX Runtime, in standard ONNX, and in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from attnc.backends.base import Options
from attnc.backends.numpy import NumpyBackend
from attnc.backends.onnx import OnnxBackend, export_onnx
from attnc.backends.onnx.writer import export, write
from attnc.backends.ort import OrtCpuBackend
from attnc.ir import Graph, Tensor, TensorType, evaluate, symbol
from attnc.ir.quantised import pack_bits
from attnc.ir.types import DType
from attnc.passes.lower import lower

CASES = [
    (bits, block, k, zeros, offsets)
    for bits in (4, 8)
    for block, k in ((32, 96), (16, 64), (64, 64), (32, 70), (128, 200))
    for zeros, offsets in ((False, False), (True, False), (True, True))
]


def product(
    bits: int, block: int, k: int, zeros: bool, offsets: bool, n: int = 7
) -> tuple[Graph, dict[str, np.ndarray], np.ndarray]:
    """The graph of two products with one x, feeds, and the weights of the first [k, n] in float64."""
    rng = np.random.default_rng(bits + block + k)
    blocks = -(-k // block)
    graph = Graph("product")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("batch"), symbol("seq"), k)))
    first = np.zeros((0, 0))
    for number in range(2):
        q = rng.integers(0, 2**bits, (n, blocks, block))
        z = rng.integers(0, 2**bits, (n, blocks)) if zeros else np.full((n, blocks), 2 ** (bits - 1))
        s = (rng.random((n, blocks)) / 2**bits).astype(np.float32)
        o = (rng.standard_normal((n, blocks)) / 4).astype(np.float32) if offsets else None
        w = (q - z[..., None]) * s.astype(np.float64)[..., None] + (0 if o is None else o[..., None])
        operands = [
            graph.add_constant(Tensor(a)) if a is not None else None
            for a in (pack_bits(q, bits), s, pack_bits(z, bits) if zeros else None, o)
        ]
        (y,) = graph.add("quantised_matmul", x, *operands, attrs={"bits": bits, "block": block}, source="layer")
        graph.add_output(y, f"y{number}")
        first = w.reshape(n, -1)[:, :k].T if number == 0 else first
    return graph, {"x": rng.standard_normal((2, 3, k)).astype(np.float32)}, first


@pytest.mark.parametrize(("bits", "block", "k", "zeros", "offsets"), CASES)
def test_onnxruntimes_own_kernel(bits: int, block: int, k: int, zeros: bool, offsets: bool, tmp_path: Path) -> None:
    graph, feeds, w = product(bits, block, k, zeros, offsets)
    backend, options = OrtCpuBackend(), Options(threads=1)
    lower(graph, lambda node: backend.supports(node, options))
    placed = backend.build(graph, tmp_path, options)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    if offsets and k % block:
        assert "MatMulNBits" not in kinds
    else:
        assert kinds.count("MatMulNBits") == 2
        assert kinds.count("ReduceSum") == (1 if offsets else 0)  # the sums are shared by both products
        packed = [v.constant for v in graph.constants if v.constant is not None and v.type.rank == 3]
        assert all(t.nbytes <= 1024 or t.digest in placed for t in packed)
    want = feeds["x"].astype(np.float64) @ w
    scale = np.abs(want).max()
    for folder in (None, tmp_path):
        found = backend.load(graph, folder, options).run(feeds, {})["y0"]
        assert np.abs(found - want).max() < 0.02 * scale  # x is rounded to 8 bits there
    exact = evaluate(graph, feeds, DType.FLOAT64)["y0"]
    np.testing.assert_allclose(exact, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("bits", "block", "k", "zeros", "offsets"), CASES)
def test_standard_onnx(bits: int, block: int, k: int, zeros: bool, offsets: bool, tmp_path: Path) -> None:
    graph, feeds, w = product(bits, block, k, zeros, offsets)
    want = feeds["x"].astype(np.float64) @ w
    export_onnx(graph, tmp_path / "file.onnx", 21)
    model = onnx.load(tmp_path / "file.onnx")
    onnx.checker.check_model(model, full_check=True)
    kinds = [node.op_type for node in model.graph.node]
    assert ("DequantizeLinear" in kinds) == (not offsets or k % block == 0)
    assert {node.domain for node in model.graph.node} == {""}
    if "DequantizeLinear" in kinds and bits == 4:
        assert onnx.TensorProto.UINT4 in {t.data_type for t in model.graph.initializer}
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "file.onnx", settings, providers=["CPUExecutionProvider"])
    found = session.run(["y0"], feeds)[0]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_the_onnx_target_runs_it_from_memory_and_from_files(tmp_path: Path) -> None:
    graph, feeds, w = product(4, 32, 256, True, False, n=33)
    want = feeds["x"].astype(np.float64) @ w
    backend, options = OnnxBackend(), Options(threads=1)
    backend.build(graph, tmp_path, options)
    for folder in (None, tmp_path):
        found = backend.load(graph, folder, options).run(feeds, {})["y0"]
        assert np.abs(found - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize(("bits", "offsets"), [(4, False), (8, True)])
def test_before_blocks_it_is_written_out(opset: int, bits: int, offsets: bool) -> None:
    graph, feeds, w = product(bits, 32, 70, True, offsets)
    model = export(graph, opset)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = feeds["x"].astype(np.float64) @ w
    np.testing.assert_allclose(session.run(["y0"], feeds)[0], want, rtol=1e-4, atol=1e-4)


def test_small_bytes_of_two_types_are_not_one_initialiser() -> None:
    """Four bits and eight bits with the same bytes."""
    graph = Graph("both")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (1, 32)))
    data = np.full((1, 1, 16), 0x77, np.uint8)
    scale = np.ones((1, 1), np.float32)
    (y,) = graph.add("quantised_matmul", x, graph.add_constant(data), graph.add_constant(scale), attrs={"block": 32})
    graph.add_output(y, "y")
    graph.add_output(graph.add("neg", graph.add_constant(data.reshape(16).view(np.int8)))[0], "z")
    model = export(graph)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y_found, z = session.run(None, {"x": np.ones((1, 32), np.float32)})
    assert y_found.item() == -32
    np.testing.assert_array_equal(z, np.full(16, -0x77, np.int8))


def test_numpy_dequantises_a_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, feeds, w = product(4, 32, 96, True, True)
    executable = NumpyBackend().load(graph, None, Options())
    want = feeds["x"].astype(np.float64) @ w
    np.testing.assert_allclose(executable.run(feeds, {})["y0"], want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("attnc.ir.ops.quantised.dequantise_blocks", None)
    np.testing.assert_allclose(executable.run(feeds, {})["y0"], want, rtol=1e-4, atol=1e-4)


def test_the_product_of_x_that_is_computed_on_the_way() -> None:
    """Sums over blocks of a value that a node makes, which gets its name later."""
    graph, feeds, w = product(4, 32, 64, True, True)
    x = graph.inputs[0]
    first = next(iter(graph.nodes))
    with graph.insert_before(first):
        (half,) = graph.add("mul", x, graph.add_constant(np.float32(0.5)))
    for node in list(graph.nodes)[1:]:
        graph.set_input(node, 0, half)
    exported = write(graph, OrtCpuBackend()._dialect(Options()))
    assert [n.op_type for n in exported.model.graph.node].count("ReduceSum") == 1
    found = OrtCpuBackend().load(graph, None, Options(threads=1)).run(feeds, {})["y0"]
    want = 0.5 * feeds["x"].astype(np.float64) @ w
    assert np.abs(found - want).max() < 0.02 * np.abs(want).max()
