"""The CUDA attention kernels on a GPU: first whether they are right, then how fast they are.

    python benchmarks/gpu.py build FOLDER      # writes and compiles the kernels; needs attnc, TVM and nvcc, no GPU
    python benchmarks/gpu.py run FOLDER        # needs the folder, apache-tvm-ffi, NumPy and torch, and a GPU

``run`` compares every variant with float64 on the card and stops at the first that is wrong. Speed is measured only
after that: TFLOP/s (4·n·m·d per head, half of it for causal masks, visible pairs for windows) beside torch's
scaled_dot_product_attention by its flash and cuDNN kernels, and FlexAttention for windows and softcap; decoding as
bytes of keys and values a second, beside what a copy on the same card reaches.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

WINDOW, CAP, SEED = 256, 20.0, 11
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, MODEL = 16384, 2048
"""Batch × length and heads × width of every measurement, as in the FlashAttention papers."""
DECODED = ((1, 16384), (1, 131072), (16, 8192), (64, 4096))
"""Batch and length of the cache of what is decoded."""
NARROW = ("float16", "bfloat16")
TOLERANCE = {"float32": 4e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of the largest value: roundings of float32, and two of the narrow types'."""

Meaning = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """``about`` is what the compiler is told; ``seen``, ``score`` and ``sink`` are the same in torch."""

    name: str
    about: Mapping[str, Any] = field(default_factory=dict)
    seen: Meaning | None = None
    score: Meaning | None = None
    sink: Meaning | None = None
    loads: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    heads: int = 8
    groups: int = 8
    width: int = 64
    cache: str = "none"


def _late(x: Any) -> Any:
    return x.j <= x.i + x.m - x.n


CAUSAL = "j <= i + m - n"
CASES = (
    Case("full"),
    Case("causal", {"mask": CAUSAL}, _late),
    Case("causal_128", {"mask": CAUSAL}, _late, width=128, heads=4, groups=4),
    Case("causal_256", {"mask": CAUSAL}, _late, width=256, heads=2, groups=2),
    Case("window", {"mask": f"{CAUSAL} and i + m - n - j < 100"}, lambda x: _late(x) & (x.i + x.m - x.n - x.j < 100)),
    Case("prefix", {"mask": "j <= i or j < 300"}, lambda x: (x.j <= x.i) | (x.j < 300)),
    Case("gaps", {"mask": "j < 70 or j >= 600"}, lambda x: (x.j < 70) | (x.j >= 600)),
    Case(
        "alibi", {"mask": CAUSAL, "score": "s + slopes[h] * (j - i)"}, _late,
        lambda x: x.s + x.slopes[x.h] * (x.j - x.i), loads={"slopes": ("float32", 8)},
    ),
    Case("softcap", {"mask": CAUSAL, "score": "3 * tanh(s / 3)"}, _late, lambda x: 3 * (x.s / 3).tanh()),
    Case(
        "bias", {"score": "s + table[h, max(min(j - i, 40), -40) + 40]"}, None,
        lambda x: x.s + x.table[x.h, (x.j - x.i).clamp(-40, 40) + 40], loads={"table": ("float32", 8, 81)},
    ),
    Case(
        "sink", {"mask": CAUSAL, "sink": "sinks[h]"}, _late, sink=lambda x: x.sinks[x.h],
        loads={"sinks": ("float32", 8)},
    ),
    Case("gqa", {"mask": CAUSAL}, _late, groups=2),
    Case(
        "padding", {"mask": CAUSAL, "where": "j < lengths[b]"}, lambda x: _late(x) & (x.j < x.lengths[x.b]),
        loads={"lengths": ("int64", "batch")},
    ),
    Case("linear", {"mask": CAUSAL}, _late, groups=2, cache="linear"),
    Case("ring", {"mask": CAUSAL}, _late, groups=2, cache="ring"),
)  # fmt: skip
SPEEDS = (
    *(Case(f"speed_full_{d}", {}, heads=MODEL // d, groups=MODEL // d, width=d) for d in (64, 128)),
    *(Case(f"speed_causal_{d}", {"mask": "j <= i"}, heads=MODEL // d, groups=MODEL // d, width=d) for d in (64, 128)),
    Case("speed_window", {"mask": f"j <= i and i - j < {WINDOW}"}, heads=16, groups=16, width=128),
    Case("speed_softcap", {"mask": "j <= i", "score": f"{CAP} * tanh(s / {CAP})"}, heads=16, groups=16, width=128),
    Case("speed_decode", {"mask": CAUSAL}, heads=32, groups=8, width=128),
    Case("speed_decode_mha", {"mask": CAUSAL}, heads=16, groups=16, width=128),
)


def names(case: Case) -> Iterator[tuple[str, str]]:
    """The attentions of a case: one for each type, with the type."""
    for dtype in NARROW if case.name.startswith("speed") else ("float32", *NARROW):
        yield f"{case.name}_{dtype}", dtype


# -- build -------------------------------------------------------------------------------------------------------------


def build(folder: Path) -> int:
    """Writes the folder. The only part that imports attnc."""
    from attnc.backends.tvm.cuda.export import export_cuda
    from attnc.backends.tvm.cuda.spec import Spec
    from attnc.ir import DType, MaskSet, TensorType, symbol
    from attnc.ir.expr import parse

    specs = []
    for case in (*CASES, *SPEEDS):
        given: dict[str, Any] = {
            key: MaskSet(text) if key == "mask" else parse(text) for key, text in case.about.items()
        }
        loads = tuple(
            (name, TensorType(DType(dtype), tuple(symbol(d) if isinstance(d, str) else d for d in shape)))
            for name, (dtype, *shape) in case.loads.items()
        )
        for name, dtype in names(case):
            shape = (case.heads, case.groups, case.width, case.width)
            specs.append(Spec(name, DType(dtype), *shape, case.width**-0.5, loads=loads, cache=case.cache, **given))
    folder.mkdir(parents=True, exist_ok=True)
    reason = export_cuda(specs, folder)
    print(f"{len(specs)} attentions in {folder}" + (f", not compiled: {reason}" if reason else ""))
    return 1 if reason else 0


# -- correctness -------------------------------------------------------------------------------------------------------


class Names:
    """What a meaning reads: axes, sizes and loads."""

    s: Any

    def __init__(
        self, torch: Any, case: Case, batch: int, n: int, m: int, loads: Mapping[str, Any], device: str
    ) -> None:
        self.n, self.m = n, m
        for axis, (name, extent) in enumerate(zip("bhij", (batch, case.heads, n, m), strict=True)):
            setattr(self, name, torch.arange(extent, device=device).reshape([-1 if a == axis else 1 for a in range(4)]))
        for name, tensor in loads.items():
            setattr(self, name, tensor.double() if tensor.is_floating_point() else tensor)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def reference(torch: Any, case: Case, q: Any, k: Any, v: Any, loads: Mapping[str, Any]) -> Any:
    """The definition in float64: all scores, then all weights."""
    q, k, v = q.double(), *(x.double().repeat_interleave(case.heads // case.groups, 1) for x in (k, v))
    x = Names(torch, case, q.shape[0], q.shape[2], k.shape[2], loads, str(q.device))
    x.s = q @ k.transpose(-1, -2) * case.width**-0.5
    s = case.score(x) if case.score else x.s
    if case.seen:
        s = s.masked_fill(~case.seen(x), -math.inf)
    if case.sink:
        s = torch.cat([s, case.sink(x).expand(*s.shape[:3], 1).double()], -1)
    return s.softmax(-1).nan_to_num(0)[..., : k.shape[2]] @ v


def correctness(torch: Any, attentions: Mapping[str, Any], device: str, lengths: tuple[tuple[int, int], ...]) -> bool:
    """Prints a line for each variant, type and kernel; whether all were right."""
    good = True
    for case in CASES:
        for name, dtype in names(case):
            if name not in attentions:
                continue
            attention, worst = attentions[name], {}
            for n, m in lengths:
                q, k, v, loads, options = inputs(torch, case, dtype, 2, n, m, device)
                want = reference(torch, case, q, k, v, loads)
                if case.cache != "none":
                    k, v, options = in_cache(torch, case, k, v)
                for kernel in attention.functions:
                    if kernel == "merge":
                        continue
                    out = torch.full_like(q, 77)
                    split = {"parts": 5, "empty": lambda shape: torch.empty(shape, device=device)}
                    more = split if kernel.endswith("_split") else {}
                    attention(q, k, v, out=out, loads=loads, kernel=kernel.removesuffix("_split"), **options, **more)
                    error = float((out.double() - want).abs().max() / want.abs().max())
                    worst[kernel] = max(worst.get(kernel, 0.0), error if math.isfinite(error) else math.inf)
            right = all(error <= TOLERANCE[dtype] for error in worst.values())
            good = good and right
            figures = ", ".join(f"{kernel} {error:.1e}" for kernel, error in worst.items())
            print(f"{'ok   ' if right else 'WRONG'} {name:22} {figures}", flush=True)
    return good


def inputs(torch: Any, case: Case, dtype: str, batch: int, n: int, m: int, device: str) -> Any:
    torch.manual_seed(SEED)
    kind = getattr(torch, dtype)
    q = torch.randn(batch, case.heads, n, case.width, device=device).to(kind)
    k, v = (torch.randn(batch, case.groups, m, case.width, device=device).to(kind) for _ in range(2))
    loads = {}
    for name, (load, *shape) in case.loads.items():
        sizes = [batch if size == "batch" else size for size in shape]
        if load == "int64":
            loads[name] = torch.randint(m // 2 + 1, m + 1, sizes, device=device)
        else:
            loads[name] = torch.rand(sizes, device=device) * 0.5
    return q, k, v, loads, {}


def in_cache(torch: Any, case: Case, k: Any, v: Any) -> Any:
    """Keys and values in a cache with more room, NaN where nothing is; a ring begins before its end."""
    m = k.shape[2]
    capacity = m + 13
    start = (capacity - m // 3) % capacity if case.cache == "ring" else 0
    at = (start + torch.arange(m, device=k.device)) % capacity
    rooms = []
    for x in (k, v):
        room = torch.full((*x.shape[:2], capacity, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
        room[:, :, at] = x
        rooms.append(room)
    return *rooms, {"m": m, **({"start": start} if case.cache == "ring" else {})}


# -- speed -------------------------------------------------------------------------------------------------------------


def milliseconds(torch: Any, run: Callable[[], Any], repeats: int = 20) -> float:
    """The median of single runs, measured by events on the stream."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def visible_pairs(case: Case, n: int) -> float:
    if "window" in case.name:
        return sum(min(i + 1, WINDOW) for i in range(n))
    return n * (n + 1) / 2 if "mask" in case.about else float(n) * n


def speed(torch: Any, attentions: Mapping[str, Any], device: str = "cuda") -> None:
    print(f"\nTFLOP/s, {TOKENS} tokens, {MODEL} channels\n")
    print("| case | n | fma | mma | flash | cuDNN | Flex |\n|---|---|---|---|---|---|---|")
    for case in SPEEDS:
        if "decode" in case.name:
            continue
        for name, dtype in names(case):
            for n in LENGTHS:
                batch = TOKENS // n
                q, k, v, loads, _ = inputs(torch, case, dtype, batch, n, n, device)
                out = torch.empty_like(q)
                flops = 4.0 * batch * case.heads * case.width * visible_pairs(case, n)
                ours = [
                    partial(attentions[name], q, k, v, out=out, loads=loads, kernel=kernel) for kernel in ("fma", "mma")
                ]
                row = [timed(torch, each) for each in (*ours, *peers(torch, case, q, k, v))]
                cells = " | ".join("-" if ms is None else f"{flops / ms / 1e9:.0f}" for ms in row)
                print(f"| {name.removeprefix('speed_')} | {n} | {cells} |", flush=True)


def timed(torch: Any, run: Callable[[], Any] | None) -> float | None:
    """None where a peer does not take the case; what it says goes to stderr."""
    if run is None:
        return None
    try:
        return milliseconds(torch, run)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def peers(torch: Any, case: Case, q: Any, k: Any, v: Any) -> list[Callable[[], Any] | None]:
    """torch's flash and cuDNN kernels, where they have the mask, and FlexAttention for windows and softcap."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def library(backend: Any) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal="causal" in case.name)

        return run

    if "window" not in case.name and "softcap" not in case.name:
        return [library(SDPBackend.FLASH_ATTENTION), library(SDPBackend.CUDNN_ATTENTION), None]
    windowed = "window" in case.name

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < WINDOW) if windowed else j <= i

    def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CAP * torch.tanh(s / CAP)

    blocks = create_block_mask(seen, None, None, q.shape[2], k.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    score = None if windowed else capped
    return [None, None, lambda: compiled(q, k, v, score_mod=score, block_mask=blocks)]


def decode(torch: Any, attentions: Mapping[str, Any], device: str = "cuda", most: int = 1 << 30) -> None:
    """One new token over a long cache: time is the reading of keys and values."""
    source = torch.empty(most, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / milliseconds(torch, lambda: target.copy_(source)) / 1e6
    print(f"\nGB/s of keys and values; a copy reaches {copy:.0f}\n")
    print("| case | batch | m | parts | GB/s | of the copy |\n|---|---|---|---|---|---|")
    for case in SPEEDS:
        if "decode" not in case.name:
            continue
        for name, dtype in names(case):
            for batch, m in DECODED:
                q, k, v, loads, _ = inputs(torch, case, dtype, batch, 1, m, device)
                out, best = torch.empty_like(q), (math.inf, 0)
                for waves in (1, 2, 4, 8):
                    parts = max(2, min(processors(torch) * waves // (batch * case.groups), m // 128))
                    run = partial(
                        attentions[name], q, k, v, out=out, loads=loads, parts=parts, empty=kept(torch, device)
                    )
                    best = min(best, (milliseconds(torch, run), parts))
                rate = 2 * k.numel() * k.element_size() / best[0] / 1e6
                print(
                    f"| {name.removeprefix('speed_')} | {batch} | {m} | {best[1]} | {rate:.0f} | {rate / copy:.0%} |",
                    flush=True,
                )


def kept(torch: Any, device: str) -> Callable[[tuple[int, ...]], Any]:
    """Makes tensors that the next call finds again: a decoder keeps them."""
    made: dict[tuple[int, ...], Any] = {}

    def empty(shape: tuple[int, ...]) -> Any:
        if shape not in made:
            made[shape] = torch.empty(shape, device=device)
        return made[shape]

    return empty


def processors(torch: Any) -> int:
    """The streaming multiprocessors of the card."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def load(folder: Path) -> dict[str, Any]:
    """The attentions of the folder, by the launcher that lies in it."""
    spec = importlib.util.spec_from_file_location("attention_launch", folder / "launch.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attentions: dict[str, Any] = module.load(folder)
    return attentions


def run(folder: Path) -> int:
    import torch

    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device on this machine, so that nothing was run and nothing is claimed")
        return 2
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, sm_{card.major}{card.minor}, {processors(torch)} SMs, torch {torch.__version__}")
    attentions = load(folder)
    if not correctness(torch, attentions, "cuda", ((1, 1), (1, 777), (63, 65), (700, 1001))):
        print("a variant is wrong: speed is not measured")
        return 1
    speed(torch, attentions)
    decode(torch, attentions)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    return build(options.folder) if options.command == "build" else run(options.folder)


if __name__ == "__main__":
    sys.exit(main())
