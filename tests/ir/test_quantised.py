"""Weights in few bits: rounding, packing, and GGUF's blocks, against loops over single numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attnc.ir import Graph, ModelError, ShapeError, Tensor, TensorType, UnsupportedError, evaluate, symbol
from attnc.ir.ggufblocks import GGUF_BLOCKS, from_gguf_blocks
from attnc.ir.ops import operator
from attnc.ir.quantised import QuantisedMatrix, pack_bits, quantise_matrix, unpack_bits
from attnc.ir.types import DType


def meant(m: QuantisedMatrix) -> np.ndarray:
    """The matrix [k, n], number by number in Python."""
    n = m.packed.shape[0]
    w = np.zeros((m.length, n))
    for j in range(n):
        for i in range(m.length):
            block, at = divmod(i, m.block)
            if m.bits == 8:
                q = int(m.packed[j, block, at])
                z = 128 if m.zeros is None else int(m.zeros[j, block])
            else:
                q = int(m.packed[j, block, at // 2]) >> 4 * (at % 2) & 15
                z = 8 if m.zeros is None else int(m.zeros[j, block // 2]) >> 4 * (block % 2) & 15
            w[i, j] = (q - z) * float(m.scales[j, block]) + (0 if m.offsets is None else float(m.offsets[j, block]))
    return w


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 6, 7])
def test_packing_and_unpacking(bits: int, count: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, count)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_bits(pack_bits(numbers, bits), bits, count), numbers)
    assert pack_bits(np.array([1, 2, 3]), 4).tolist() == [0x21, 0x03]


@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 32), (8, 64), (4, 16)])
@pytest.mark.parametrize("k", [64, 70])
def test_rounding_to_the_nearest(bits: int, block: int, k: int) -> None:
    w = np.random.default_rng(1).standard_normal((5, k)).astype(np.float32)
    m = quantise_matrix(w, bits, block)
    found = meant(m)
    np.testing.assert_allclose(m.dequantised(np.float64), found, rtol=1e-12, atol=1e-12)
    assert np.isfinite(found).all()
    for j in range(5):
        for start in range(0, k, block):
            part = w[j, start : start + block].astype(np.float64)
            step = (max(part.max(), 0) - min(part.min(), 0)) / (2**bits - 1)
            error = np.sqrt(np.mean((found[start : start + block, j] - part) ** 2))
            plain = np.round(part / step) * step  # rounding to a grid with 0 on it
            assert error <= np.sqrt(np.mean((plain - part) ** 2)) * 1.02
            if bits == 8:
                assert np.abs(found[start : start + block, j] - part).max() <= 1.01 * step


def test_zeros_and_single_values_are_kept() -> None:
    w = np.zeros((2, 64), np.float32)
    w[1, 3] = -2.5
    for bits in (4, 8):
        np.testing.assert_allclose(quantise_matrix(w, bits, 32).dequantised(), w.T, rtol=1e-6)


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


def q4_0(b: bytes) -> list[float]:
    low = [half(b[:2]) * ((x & 15) - 8) for x in b[2:]]
    return low + [half(b[:2]) * ((x >> 4) - 8) for x in b[2:]]


def q4_1(b: bytes) -> list[float]:
    d, m = half(b[:2]), half(b[2:4])
    low = [float(np.float32(d * (x & 15)) + np.float32(m)) for x in b[4:]]
    return low + [float(np.float32(d * (x >> 4)) + np.float32(m)) for x in b[4:]]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (x - 256 if x > 127 else x) for x in b[2:]]


def q4_k(b: bytes) -> list[float]:
    """dequantize_row_q4_K with get_scale_min_k4."""
    d, dmin, scales, q = half(b[:2]), half(b[2:4]), b[4:16], b[16:]
    y: list[float] = []
    for j in range(8):
        if j < 4:
            sc, m = scales[j] & 63, scales[j + 4] & 63
        else:
            sc = (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4)
            m = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4)
        part = q[32 * (j // 2) : 32 * (j // 2) + 32]
        y += [float(np.float32(d * sc * (x >> 4 * (j % 2) & 15)) - np.float32(dmin * m)) for x in part]
    return y


def q6_k(b: bytes) -> list[float]:
    """dequantize_row_q6_K."""
    d = half(b[208:])
    y = [0.0] * 256
    for n in range(2):
        ql, qh, sc = b[64 * n :], b[128 + 32 * n :], np.frombuffer(b[192 + 8 * n :], np.int8)
        for at in range(32):
            i = at // 16
            q1 = ((ql[at] & 15) | ((qh[at] >> 0 & 3) << 4)) - 32
            q2 = ((ql[at + 32] & 15) | ((qh[at] >> 2 & 3) << 4)) - 32
            q3 = ((ql[at] >> 4) | ((qh[at] >> 4 & 3) << 4)) - 32
            q4 = ((ql[at + 32] >> 4) | ((qh[at] >> 6 & 3) << 4)) - 32
            for k, q in enumerate((q1, q2, q3, q4)):
                y[128 * n + at + 32 * k] = d * int(sc[i + 2 * k]) * q
    return y


READERS: dict[str, Callable[[bytes], list[float]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k,
}  # fmt: skip
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def raw_blocks(kind: str, count: int) -> bytes:
    """Blocks of random bytes, whose half precisions are ordinary numbers of either sign."""
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (count, GGUF_BLOCKS[kind].nbytes)).astype(np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = rng.standard_normal(count).astype("<f2").view(np.uint8).reshape(count, 2)
    return raw.tobytes()


@pytest.mark.parametrize("kind", READERS)
def test_ggufs_blocks_are_kept_number_for_number(kind: str) -> None:
    rows, width = 3, 2 * GGUF_BLOCKS[kind].length
    raw, size = raw_blocks(kind, 2 * rows), GGUF_BLOCKS[kind].nbytes
    wanted = [READERS[kind](raw[at : at + size]) for at in range(0, len(raw), size)]
    m = from_gguf_blocks(kind, raw, rows, width)
    np.testing.assert_array_equal(m.dequantised(), np.array(wanted, np.float32).reshape(rows, width).T)
    np.testing.assert_array_equal(from_gguf_blocks(kind, np.frombuffer(raw, np.uint8), rows, width).packed, m.packed)
    assert m.bits == (8 if kind in ("Q8_0", "Q6_K") else 4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_ggufs_own_package_agrees(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows, width = 4, GGUF_BLOCKS[kind].length
    raw = np.frombuffer(raw_blocks(kind, rows), np.uint8).reshape(rows, -1)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(from_gguf_blocks(kind, raw, rows, width).dequantised(), wanted.T)


def test_wrong_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"IQ2_XS.*known: Q4_0"):
        from_gguf_blocks("IQ2_XS", b"", 1, 32)
    with pytest.raises(ModelError, match="2 rows of 32 entries does not have 18 bytes"):
        from_gguf_blocks("Q4_0", bytes(18), 2, 32)
    with pytest.raises(ModelError, match="entries"):
        from_gguf_blocks("Q4_0", bytes(18), 1, 30)


@pytest.mark.parametrize("kind", READERS)
def test_a_product_with_ggufs_blocks(kind: str) -> None:
    rows, width = 3, GGUF_BLOCKS[kind].length
    raw, size = raw_blocks(kind, rows), GGUF_BLOCKS[kind].nbytes
    w = np.array([READERS[kind](raw[at : at + size]) for at in range(0, len(raw), size)], np.float64)
    m = from_gguf_blocks(kind, raw, rows, width)
    graph = Graph("product")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), width)))
    operands = [None if a is None else graph.add_constant(Tensor(a)) for a in (m.packed, m.scales, m.zeros, m.offsets)]
    (y,) = graph.add("quantised_matmul", x, *operands, attrs={"bits": m.bits, "block": m.block})
    graph.add_output(y, "y")
    given = np.random.default_rng(2).standard_normal((4, width)).astype(np.float32)
    found = evaluate(graph, {"x": given}, DType.FLOAT64)["y"]
    np.testing.assert_allclose(found, given.astype(np.float64) @ w.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("shapes", "attrs", "reason"),
    [
        (((2, 8), (3, 2, 2), (3, 2)), {"bits": 3, "block": 4}, "bits must be 4 or 8"),
        (((2, 8), (3, 2, 3), (3, 2)), {"bits": 4, "block": 4}, r"packed must be uint8\[n, 2, 2\]"),
        (((2, 8), (3, 2, 2), (3, 1)), {"bits": 4, "block": 4}, r"scales must be \[3, 2\]"),
        (((2, 8), (3, 2, 2), (3, 2), (3, 2)), {"bits": 4, "block": 4}, r"zero points must be uint8\[3, 1\]"),
        (((2, 8), (3, 2, 2), (3, 2), None, (3, 1)), {"bits": 4, "block": 4}, "offsets"),
    ],
)
def test_operands_that_do_not_fit(
    shapes: tuple[tuple[int, ...] | None, ...], attrs: dict[str, int], reason: str
) -> None:
    graph = Graph()
    dtypes = (DType.FLOAT32, DType.UINT8, DType.FLOAT32, DType.UINT8, DType.FLOAT32)
    operands = [
        None if shape is None else graph.add_input(f"x{k}", TensorType(dtype, shape))
        for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    with pytest.raises(ShapeError, match=reason):
        graph.add(operator("quantised_matmul"), *operands, attrs=attrs)
