"""Attention kernels as one CUDA C++ file, and a library of it where nvcc is at hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ....ir import TargetError, UsageError
from ..tuning import CudaTile
from .cards import Card, card_of
from .spec import SHARED, Spec, fits_tensor_cores

__all__ = [
    "ARCHES",
    "check_tvm",
    "compile_cuda",
    "compile_lean",
    "cuda_source",
    "export_cuda",
    "functions",
    "nvcc_command",
    "portable_command",
    "write_cuda",
]

ARCHES = ("sm_80", "sm_90")
VERSIONS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
"""The versions that the kernels were tried with; the API moves, and other ffi versions crash."""


def check_tvm() -> None:
    """Raises TargetError that says what to install where TVM is absent or of another version."""
    for package, wanted in VERSIONS.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise TargetError(f"CUDA kernels need {package}, which is not installed: pip install attnc[tvm]") from None
        if found != wanted:
            raise TargetError(
                f"CUDA kernels need {package} {wanted}, but {found} is installed: pip install {package}=={wanted}"
            )


def functions(spec: Spec, split: bool = True) -> dict[str, str]:
    """The functions of the file for one attention, by what they do: "fma" serves always, "mma" half precisions,
    "fma_split" or "mma_split" and then "merge" few queries over many keys."""
    names = {"fma": f"{spec.name}_fma"}
    if fits_tensor_cores(spec):
        names["mma"] = f"{spec.name}_mma"
    if split:
        names |= {f"{kind}_split": f"{name}_split" for kind, name in names.items()}
        names["merge"] = f"{spec.name}_merge"
    return names


def cuda_source(
    specs: Sequence[Spec],
    arches: Sequence[str] = ARCHES,
    split: bool = True,
    only: Sequence[str] = (),
    tiles: Mapping[str, CudaTile] | None = None,
) -> str:
    """One CUDA C++ file with the functions of all attentions; ``only`` some kinds of them. Tiles fit each arch and are
    those that the cost model takes for the first, unless ``tiles`` gives others, by function.

    Raises TargetError for a missing or wrong TVM and for an arch that is too old, UsageError for equal names and for a
    tile that a kernel cannot have.
    """
    check_tvm()
    for arch in arches:
        check_arch(arch)
    shared = min(shared_memory(arch) for arch in arches)
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError(f"attentions of one file need different names: {', '.join(spec.name for spec in specs)}")
    from .building import source_of

    made: dict[str, Any] = {}
    card = card_of(arches[0])
    for spec in specs:
        for kind, name in functions(spec, split).items():
            if not only or kind in only:
                made[name] = _function(spec, kind, name, shared, card, (tiles or {}).get(name))
    return source_of(made, arches[0])


def _function(spec: Spec, kind: str, name: str, shared: int, card: Card, tile: CudaTile | None) -> Any:
    from dataclasses import replace

    from .attention_fma import attention_fma, fma_tiling
    from .attention_mma import attention_mma, mma_tiling
    from .merge import merge

    if kind == "merge":
        return merge(spec, name)
    split = kind.endswith("_split")
    if kind.startswith("mma"):
        return attention_mma(replace(spec, name=name), mma_tiling(spec, split, shared, card, tile))
    return attention_fma(replace(spec, name=name), fma_tiling(spec, split, shared, card, tile))


def shared_memory(arch: str) -> int:
    """Bytes of shared memory that a block may have: NVIDIA's CUDA C++ Programming Guide, compute capabilities."""
    large = {"80": SHARED, "87": SHARED, "90": 227 << 10, "100": 227 << 10, "103": 227 << 10, "110": 227 << 10}
    return large.get(arch.removeprefix("sm_").rstrip("af"), 99 << 10)


def check_arch(arch: str) -> None:
    number = arch.removeprefix("sm_").rstrip("af")
    if not number.isdigit() or not arch.startswith("sm_"):
        raise TargetError(f"not a CUDA arch: {arch}; known: sm_80, sm_86, sm_89, sm_90 and later")
    if int(number) < 80:
        raise TargetError(f"{arch} is too old: the kernels need sm_80 or later; ort-cuda runs on older cards")


def _codes(arches: Sequence[str]) -> list[str]:
    """Code for every arch, and PTX of the newest for cards to come."""
    numbers = [arch.removeprefix("sm_") for arch in arches]
    codes = [f"arch=compute_{number},code=sm_{number}" for number in numbers[:-1]]
    return [*codes, f"arch=compute_{numbers[-1]},code=[sm_{numbers[-1]},compute_{numbers[-1]}]"]


def portable_command(source: str, library: str, arches: Sequence[str] = ARCHES) -> str:
    """What compiles a program's file in its folder, where there are nvcc and apache-tvm-ffi, as a shell reads it."""
    codes = " ".join(f"-gencode '{code}'" for code in _codes(arches))
    return (
        f"nvcc -std=c++17 -O3 -shared -Xcompiler -fPIC {codes} \\\n"
        f"     -I$(tvm-ffi-config --includedir) -I$(tvm-ffi-config --dlpack-includedir) -L$(tvm-ffi-config --libdir) "
        f"-ltvm_ffi -o {library} {source}"
    )


def nvcc_command(source: Path, library: Path, arches: Sequence[str] = ARCHES, cudart: str = "shared") -> list[str]:
    """What compiles the file. ``cudart`` says whether CUDA's runtime is linked into the library, "static", or has to be
    installed beside it, "shared"."""
    from tvm_ffi import libinfo

    includes = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    folder = Path(libinfo.find_libtvm_ffi()).parent
    return [
        "nvcc", "-std=c++17", "-O3", "-t", "0", "-shared", "-Xcompiler", "-fPIC", f"-cudart={cudart}", "-Xptxas", "-v",
        *(part for code in _codes(arches) for part in ("-gencode", code)), *(f"-I{path}" for path in includes),
        f"-L{folder}", "-ltvm_ffi", "-o", str(library), str(source),
    ]  # fmt: skip


def compile_cuda(source: Path, library: Path, arches: Sequence[str] = ARCHES, cudart: str = "shared") -> str:
    """Compiles by nvcc and gives what ptxas says of registers, shared memory and spills.

    Raises TargetError without nvcc, or with its message when it fails.
    """
    for arch in arches:
        check_arch(arch)
    if shutil.which("nvcc") is None:
        raise TargetError(
            f"nvcc is not on the PATH, so that {source} is not compiled; install the CUDA toolkit, or compile the "
            "file where there is one, as docs/cuda.md shows"
        )
    done = subprocess.run(nvcc_command(source, library, arches, cudart), capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"nvcc failed on {source}:\n{done.stderr.strip()[-4000:]}")
    return done.stderr


def export_cuda(specs: Sequence[Spec], folder: Path, arches: Sequence[str] = ARCHES) -> str | None:
    """``write_cuda``, and compiles ``attention.so``; kernels that spill registers get the cost model's next tile.

    Gives None, or why there is no library: without nvcc the source is still written. Raises as ``cuda_source`` does.
    """
    write_cuda(specs, folder, arches)
    try:
        compile_lean(specs, folder, arches)
    except TargetError as error:
        return str(error)
    return None


def compile_lean(specs: Sequence[Spec], folder: Path, arches: Sequence[str] = ARCHES) -> str:
    """Compiles what ``write_cuda`` wrote, as ``compile_cuda`` does. As long as kernels spill registers, which depends
    on nvcc too, they get the cost model's next tile, and the file is written anew."""
    tiles: dict[str, CudaTile] = {}
    tried: dict[str, set[CudaTile]] = {}
    source, library = folder / "attention.cu", folder / "attention.so"
    while True:
        log = compile_cuda(source, library, arches)
        others = _leaner(specs, arches, source.read_text(encoding="utf-8"), log, tiles, tried)
        if not others:
            return log
        tiles |= others
        write_cuda(specs, folder, arches, tiles)


_TRIES = 4
"""How many tiles of a kernel are compiled at most until one does not spill."""


def _leaner(
    specs: Sequence[Spec],
    arches: Sequence[str],
    source: str,
    log: str,
    tiles: Mapping[str, CudaTile],
    tried: dict[str, set[CudaTile]],
) -> dict[str, CudaTile]:
    """The next tiles, by function, of the kernels that spilled by nvcc's log."""
    from .resources import resources
    from .search import candidates_of

    shared, card = min(shared_memory(arch) for arch in arches), card_of(arches[0])
    spilled = {row.kernel for row in resources(source, log) if row.spills}
    found = {}
    for spec in specs:
        for kind, name in functions(spec).items():
            if name not in spilled or kind == "merge":
                continue
            candidates = [c.tile for c in candidates_of(spec, kind, card, shared)]
            seen = tried.setdefault(name, set())
            seen.add(tiles.get(name, candidates[0]))
            left = [tile for tile in candidates if tile not in seen]
            if left and len(seen) < _TRIES:
                found[name] = left[0]
    return found


def write_cuda(
    specs: Sequence[Spec],
    folder: Path,
    arches: Sequence[str] = ARCHES,
    tiles: Mapping[str, CudaTile] | None = None,
) -> None:
    """Writes ``attention.cu``, ``attention.json`` (what its functions take) and ``launch.py`` (loads the library, needs
    apache-tvm-ffi alone) into a folder that exists. Raises as ``cuda_source`` does, before anything is written."""
    source = cuda_source(specs, arches, tiles=tiles)
    (folder / "attention.cu").write_text(source, encoding="utf-8")
    description = {"attentions": {spec.name: describe(spec) for spec in specs}, "arches": list(arches)}
    (folder / "attention.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("launch.py"), folder / "launch.py")


def describe(spec: Spec) -> Mapping[str, Any]:
    """What the launcher has to know of one attention, as JSON holds it."""
    return {
        "functions": functions(spec), "dtype": str(spec.dtype), "heads": spec.heads, "groups": spec.groups,
        "width": spec.width, "value_width": spec.value_width, "loads": [name for name, _ in spec.loads],
        "sizes": list(spec.sizes), "cache": spec.cache,
    }  # fmt: skip
