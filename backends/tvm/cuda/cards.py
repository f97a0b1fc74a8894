"""What cards can do, by public figures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CARDS", "Card", "card_of"]


@dataclass(frozen=True)
class Card:
    """Of one multiprocessor and clock: ``tensor`` multiply-adds of half precision by ``mma.sync``, ``fma`` of float32,
    ``special`` functions such as exp2, ``shared`` bytes from shared memory, ``integer`` operations. ``clock`` in Hz;
    ``memory`` and ``l2`` in bytes/s of the whole card; ``room``: bytes of shared memory of a multiprocessor."""

    name: str
    arch: str
    multiprocessors: int
    clock: float
    tensor: float
    fma: float
    memory: float
    l2: float
    room: int
    special: float = 16.0
    shared: float = 128.0
    integer: float = 64.0
    registers: int = 1 << 16
    warps: int = 64
    blocks: int = 32


_MMA_SYNC = 0.63
"""What part of Hopper's tensor throughput ``mma.sync`` reaches; the rest takes ``wgmma``. Luo et al. 2025, Dissecting
the NVIDIA Hopper Architecture through Microbenchmarking (arXiv:2501.12084)."""

# Multiprocessors, clocks, TFLOP/s and bandwidths: NVIDIA A100 Tensor Core GPU Architecture (2020: 312 TFLOP/s dense at
# 1.41 GHz, 5120 bytes of L2 a clock), NVIDIA H100 Tensor Core GPU Architecture (2022: 989 TFLOP/s dense at 1.83 GHz),
# H200 data sheet (4.8 TB/s). Rates of instructions and shared memory: CUDA C++ Programming Guide, throughput of native
# arithmetic instructions and technical specifications of compute capabilities 8.0 and 9.0.
CARDS = {
    "A100": Card("A100 SXM 80 GB", "sm_80", 108, 1.41e9, 1024, 64, 2.04e12, 5120 * 1.41e9, 164 << 10),
    "H100": Card("H100 SXM", "sm_90", 132, 1.83e9, _MMA_SYNC * 2048, 128, 3.35e12, 5120 * 1.83e9, 228 << 10),
    "H200": Card("H200 SXM", "sm_90", 132, 1.83e9, _MMA_SYNC * 2048, 128, 4.8e12, 5120 * 1.83e9, 228 << 10),
}


def card_of(arch: str) -> Card:
    """The card that stands for an arch: the first of it, else the A100 below sm_90 and the H100 from there on."""
    for card in CARDS.values():
        if card.arch == arch:
            return card
    number = "".join(c for c in arch if c.isdigit())
    return CARDS["H100" if number and int(number) >= 90 else "A100"]
