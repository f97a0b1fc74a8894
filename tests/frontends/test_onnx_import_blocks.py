"""Weights in blocks of few bits in ONNX files: they stay so, and mean what ONNX Runtime makes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnc
from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, evaluate
from attnc.ir.quantised import pack_bits

RNG = np.random.default_rng(12)


def model(nodes: list[onnx.NodeProto], constants: dict[str, Any], x: list[Any], ids: bool = False) -> bytes:
    kind = TensorProto.INT64 if ids else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "blocks",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, name) for name, a in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return data


def runtime(data: bytes, feeds: dict[str, np.ndarray], optimised: bool = False) -> np.ndarray:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    if not optimised:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(data, settings, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def n_bits(bits: int, level: int, k: int = 96, n: int = 24, zeros: str = "packed") -> bytes:
    blocks = k // 32
    constants: dict[str, np.ndarray] = {
        "q": RNG.integers(0, 256, (n, blocks, 4 * bits)).astype(np.uint8),
        "s": (RNG.random(n * blocks) / 2**bits).astype(np.float32),  # flat, as older files have it
        "bias": RNG.standard_normal(n).astype(np.float32),
    }
    if zeros == "packed":
        constants["z"] = RNG.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    if zeros == "float":
        constants["z"] = (RNG.random((n, blocks)) * 2**bits).astype(np.float32)
    operands = ["x", "q", "s", "z" if zeros else "", "", "bias"]
    attrs: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": 32, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", operands, ["y"], "product", domain="com.microsoft", **attrs)
    return model([node], constants, ["batch", "seq", k])


def ops(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["", "packed"])
def test_a_file_with_few_bits_stays_one(bits: int, zeros: str, tmp_path: Path) -> None:
    """At accuracy level 4, as generators write it: the same kernel on the same bytes."""
    data = n_bits(bits, 4, zeros=zeros)
    (tmp_path / "m.onnx").write_bytes(data)
    program = attnc.compile(tmp_path / "m.onnx", "ort-cpu", threads=1)
    assert [n for n in ops(program.graph) if n != "add"] == ["quantised_matmul"]
    assert program.rounding
    feeds = {"x": RNG.standard_normal((2, 3, 96)).astype(np.float32)}
    found, wanted = program.session().run(feeds)["y"], runtime(data, feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    program.save(tmp_path / "out")
    again = attnc.load(tmp_path / "out")
    np.testing.assert_allclose(evaluate(again, feeds)["y"], wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize(("bits", "kept"), [(4, True), (8, False)])
def test_what_is_not_to_be_rounded_is_not(bits: int, kept: bool, tmp_path: Path) -> None:
    """Without accuracy level 4 the product is exact: in 4 bits by ONNX Runtime's kernel, in 8 by floats."""
    data = n_bits(bits, 0)
    (tmp_path / "m.onnx").write_bytes(data)
    program = attnc.compile(tmp_path / "m.onnx", "ort-cpu", threads=1, verify=True)
    assert ("quantised_matmul" in ops(program.graph)) == kept
    assert program.rounding == ""
    assert program.report.differences["y"].relative < 1e-5
    feeds = {"x": RNG.standard_normal((2, 3, 96)).astype(np.float32)}
    np.testing.assert_allclose(program.session().run(feeds)["y"], runtime(data, feeds), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [0, 4])
def test_zero_points_that_are_floats(level: int, tmp_path: Path) -> None:
    data = n_bits(4, level, zeros="float")
    (tmp_path / "m.onnx").write_bytes(data)
    assert "quantised_matmul" in ops(load_onnx(tmp_path / "m.onnx"))
    feeds = {"x": RNG.standard_normal((2, 3, 96)).astype(np.float32)}
    wanted = runtime(data, feeds)
    np.testing.assert_allclose(evaluate(load_onnx(tmp_path / "m.onnx"), feeds)["y"], wanted, rtol=1e-4, atol=1e-4)
    found = attnc.compile(tmp_path / "m.onnx", "ort-cpu", threads=1).session().run(feeds)["y"]
    assert np.abs(found - wanted).max() < (0.02 if level else 1e-5) * np.abs(wanted).max()


# -- DequantizeLinear before a product --------------------------------------------------------------------------------

INTEGERS = {
    "uint4": (0, 16, ml_dtypes.uint4), "int4": (-8, 8, ml_dtypes.int4), "uint8": (0, 256, np.uint8),
    "int8": (-128, 128, np.int8),
}  # fmt: skip


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("form", ["matmul", "transpose", "gemm"])
def test_dequantised_by_blocks_before_a_product(form: str, kind: str, zeros: bool, tmp_path: Path) -> None:
    low, high, dtype = INTEGERS[kind]
    k, n, axis = 96, 24, 0 if form == "matmul" else 1
    shape, cut = ((k, n), (k // 32, n)) if axis == 0 else ((n, k), (n, k // 32))
    constants: dict[str, Any] = {"s": (RNG.random(cut) / (high - low)).astype(np.float32)}
    constants["q"] = RNG.integers(low, high, shape).astype(dtype)
    if zeros:
        constants["z"] = RNG.integers(low, high, cut).astype(dtype)
    names = ["q", "s", "z"] if zeros else ["q", "s"]
    nodes = [helper.make_node("DequantizeLinear", names, ["w"], "dequantise", axis=axis, block_size=32)]
    if form == "transpose":
        nodes.append(helper.make_node("Transpose", ["w"], ["t"], "turn", perm=[1, 0]))
    if form == "gemm":
        constants["bias"] = RNG.standard_normal(n).astype(np.float32)
        nodes.append(helper.make_node("Gemm", ["x", "w", "bias"], ["y"], "product", transB=1, alpha=0.5))
    else:
        nodes.append(helper.make_node("MatMul", ["x", "w" if form == "matmul" else "t"], ["y"], "product"))
    data = model(nodes, constants, ["n", k])
    (tmp_path / "m.onnx").write_bytes(data)
    graph = load_onnx(tmp_path / "m.onnx")
    (product,) = (node for node in graph.nodes if node.op.name == "quantised_matmul")
    assert product.attr("bits") == (4 if kind.endswith("4") else 8)
    assert "matmul" not in ops(graph)
    feeds = {"x": RNG.standard_normal((5, k)).astype(np.float32)}
    wanted = runtime(data, feeds)
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], wanted, rtol=1e-4, atol=1e-4)
    found = attnc.compile(tmp_path / "m.onnx", "ort-cpu", threads=1).session().run(feeds)["y"]
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_blocks_that_a_product_does_not_sum_over_stay_floats(tmp_path: Path) -> None:
    """The blocks lie along the columns."""
    constants = {"q": RNG.integers(0, 256, (32, 64)).astype(np.uint8), "s": RNG.random((32, 2)).astype(np.float32)}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1, block_size=32),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    data = model(nodes, constants, ["n", 32])
    (tmp_path / "m.onnx").write_bytes(data)
    graph = load_onnx(tmp_path / "m.onnx")
    assert "quantised_matmul" not in ops(graph)
    feeds = {"x": RNG.standard_normal((5, 32)).astype(np.float32)}
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], runtime(data, feeds), rtol=1e-4, atol=1e-3)


# -- rows of a table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32])
def test_rows_of_a_table(bits: int, block: int, zeros: bool, tmp_path: Path) -> None:
    rows, length = 40, 96
    blocks = length // block
    constants = {
        "q": pack_bits(RNG.integers(0, 2**bits, (rows, length)), bits),
        "s": RNG.random((rows, blocks)).astype(np.float32),
    }
    if zeros:
        constants["z"] = pack_bits(RNG.integers(0, 2**bits, (rows, blocks)), bits)
    names = ["q", "x", "s", "z"] if zeros else ["q", "x", "s"]
    attrs: dict[str, Any] = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", names, ["y"], "rows", domain="com.microsoft", **attrs)
    data = model([node], constants, ["batch", "seq"], ids=True)
    (tmp_path / "m.onnx").write_bytes(data)
    assert ops(load_onnx(tmp_path / "m.onnx")) == ["quantised_gather"]
    feeds = {"x": RNG.integers(0, rows, (2, 5))}
    wanted = runtime(data, feeds)
    for target in ("numpy", "ort-cpu"):
        found = attnc.compile(tmp_path / "m.onnx", target, threads=1, verify=True).session().run(feeds)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["uint4", "int4"])
@pytest.mark.parametrize("shape", [(3, 5), (4,), ()])
def test_constants_of_4_bits(kind: str, raw: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    low, high, dtype = INTEGERS[kind]
    q = np.asarray(RNG.integers(low, high, shape)).astype(dtype)
    if raw:
        tensor = numpy_helper.from_array(q, "q")
    else:
        code = TensorProto.UINT4 if kind == "uint4" else TensorProto.INT4
        tensor = helper.make_tensor("q", code, shape, q.astype(np.int8).reshape(-1).tolist())
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("Mul", ["w", "x"], ["y"])]
    data = onnx.load_from_string(model(nodes, {"s": np.array(0.5, np.float32)}, [1]))
    data.graph.initializer.append(tensor)
    found = evaluate(load_onnx(data), {"x": np.ones(1, np.float32)})["y"]
    np.testing.assert_array_equal(found.reshape(-1), 0.5 * q.astype(np.float32).reshape(-1))


def test_constants_of_4_bits_that_are_cut_short() -> None:
    tensor = numpy_helper.from_array(np.zeros(5, ml_dtypes.uint4), "q")
    tensor.raw_data = tensor.raw_data[:-1]
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("Mul", ["w", "x"], ["y"])]
    data = onnx.load_from_string(model(nodes, {"s": np.array(0.5, np.float32)}, [1]))
    data.graph.initializer.append(tensor)
    with pytest.raises(attnc.ModelError, match="tensor q holds 2 bytes"):
        load_onnx(data)


def test_what_attnc_exports_in_few_bits_comes_back_so(tmp_path: Path) -> None:
    graph = load_onnx(onnx.load_from_string(n_bits(4, 4)))
    program = attnc.compile(graph, "onnx", opset=21)
    program.save(tmp_path / "out")
    again = load_onnx(tmp_path / "out" / "model.onnx")
    assert "quantised_matmul" in ops(again)
    assert "matmul" not in ops(again)
    feeds = {"x": RNG.standard_normal((2, 3, 96)).astype(np.float32)}
    np.testing.assert_allclose(evaluate(again, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-4, atol=1e-4)
