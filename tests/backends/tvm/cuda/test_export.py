"""The exported folder: its file, its description, its launcher, nvcc where there is one, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.backends.tvm.cuda import export
from attnc.backends.tvm.cuda.spec import Spec
from attnc.ir import Builder, DType, Graph, MaskSet, TargetError, TensorType, UnsupportedError, UsageError, symbol
from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.running import TOLERANCE, plain
from attnc.tests.backends.tvm.cuda.variants import cached, variant

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: the CUDA toolkit has it")


def node(
    dtype: DType = DType.FLOAT32,
    width: int = 32,
    loads: tuple[DType, ...] = (),
    names: tuple[str, ...] = (),
    **attrs: Any,
) -> Any:
    graph, batch, n = Graph("g"), symbol("batch"), symbol("seq")
    q, k, v = (graph.add_input(name, TensorType(dtype, (batch, 4, n, width))) for name in "qkv")
    extra = [graph.add_input(f"load{at}", TensorType(kind, (4,))) for at, kind in enumerate(loads)]
    out = Builder(graph, "layer.3").multi("attention", q, k, v, *extra, loads=names, **attrs)[0]
    assert out.producer is not None
    return out.producer


def test_a_node_as_a_spec() -> None:
    attrs: dict[str, Any] = {"mask": "j <= i and i - j < seq", "score": "s + a[h]", "scale": 0.5, "names": ("a",)}
    made = Spec.from_node(node(loads=(DType.FLOAT16,), **attrs), "layer3", "ring")
    assert (made.heads, made.groups, made.width, made.scale, made.cache) == (4, 4, 32, 0.5, "ring")
    assert made.sizes == ("seq",)
    assert made.loads == (("a", TensorType(DType.FLOAT16, (4,))),)


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"dtype": DType.FLOAT64}, "q, k and v of float64"),
        ({"width": 300}, "head width of 300"),
        ({"weights": True}, "weights as a second result"),
        ({"empty": "mean"}, "the mean of all values"),
    ],
)
def test_what_the_kernels_lack_names_the_node(attrs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{reason}.*layer\.3; use numpy or ort"):
        Spec.from_node(node(**attrs), "layer3")


@pytest.mark.parametrize(("arch", "reason"), [("sm_75", "too old.*ort-cuda"), ("gfx90a", "not a CUDA arch")])
def test_an_arch_that_does_not_serve(arch: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        export.check_arch(arch)


@needs_tvm
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_tiles_fit_into_shared_memory(arch: str) -> None:
    """Every width, wide keys and values together; what a launch asks for is read from the file."""
    specs = [
        replace(variant("causal").spec, name=f"d{width}_{dtype}", dtype=dtype, width=width, value_width=width)
        for width in (64, 128, 256)
        for dtype in (DType.FLOAT32, DType.BFLOAT16)
    ]
    source = export.cuda_source(specs, (arch,))
    asked = [int(size) for size in re.findall(r"auto cuda_arg_\d+ = \(int64_t\)(\d+);", source)]
    assert len(asked) == sum(len(export.functions(spec)) - 1 for spec in specs)
    assert max(asked) <= {"sm_80": 163, "sm_89": 99, "sm_90": 227}[arch] * 1024


def test_tvm_absent_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(TargetError, match=r"apache-tvm, which is not installed: pip install attnc\[tvm\]"):
        export.cuda_source([variant("all").spec])
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.0")
    with pytest.raises(TargetError, match=r"need apache-tvm 0\.27\.0\.post1, but 0\.19\.0"):
        export.cuda_source([variant("all").spec])


@needs_tvm
def test_equal_names_are_refused() -> None:
    with pytest.raises(UsageError, match="different names: all, all"):
        export.cuda_source([variant("all").spec, variant("all").spec])


@needs_tvm
def test_without_nvcc_the_source_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    reason = export.export_cuda([variant("causal").spec], tmp_path)
    assert reason is not None
    assert "nvcc is not on the PATH" in reason
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention.cu", "attention.json", "launch.py"]
    source = (tmp_path / "attention.cu").read_text()
    for name in export.functions(variant("causal").spec).values():
        assert f"{name}_kernel(" in source


@needs_tvm
def test_the_same_spec_gives_the_same_file() -> None:
    spec = variant("softcap").spec
    assert export.cuda_source([spec], only=("fma",)) == export.cuda_source([spec], only=("fma",))


def launcher(folder: Path) -> Any:
    """launch.py as it lies in the folder, away from the package."""
    found = importlib.util.spec_from_file_location("launch", folder / "launch.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The launcher's attention over the file on the CPU."""
    folder = tmp_path_factory.mktemp("export")
    spec = cached(variant("alibi"), "ring").spec
    export.write_cuda([spec], folder, ("sm_80",))
    about = json.loads((folder / "attention.json").read_text())["attentions"][spec.name]
    return launcher(folder).Attention(spec.name, about, compile_host((folder / "attention.cu").read_text(), folder))


def call(attention: Any, **changes: Any) -> Any:
    case = cached(variant("alibi"), "ring")
    q, k, v = map(plain, case.inputs())
    out = plain(np.zeros_like(q))
    options: dict[str, Any] = {"m": case.m, "start": 0, "loads": {"slopes": plain(case.loads["slopes"])}, **changes}
    attention(q, k, v, out=out, **options)
    return out


@needs_tvm
@needs_gxx
@pytest.mark.parametrize("parts", [1, 3])
def test_the_launcher_runs_each_kernel(attention: Any, parts: int) -> None:
    out = call(attention, parts=parts, empty=lambda shape: plain(np.empty(shape, np.float32)))
    want = variant("alibi").reference()
    np.testing.assert_allclose(out, want, rtol=0, atol=TOLERANCE[DType.FLOAT32] * np.abs(want).max())


@needs_tvm
@needs_gxx
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": None}, "cache ring: it takes m and start"),
        ({"m": 54}, "54 keys from 0 do not fit into a cache of 53"),
        ({"start": 53}, "do not fit"),
        ({"loads": {}}, r"takes the loads slopes, not "),
        ({"sizes": {"w": 3}}, r"takes the sizes \(none\), not w"),
        ({"kernel": "mma"}, "no kernel mma; it has fma"),
        ({"parts": 2}, r"needs empty\(shape\)"),
    ],
)
def test_the_launcher_refuses(attention: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call(attention, **changes)


class Pretended:
    """As much of a tensor as the launcher looks at."""

    def __init__(self, shape: tuple[int, ...], address: int = 0) -> None:
        self.shape, self.address = shape, address

    def data_ptr(self) -> int:
        return self.address


@needs_tvm
@needs_gxx
@pytest.mark.parametrize(
    ("tensor", "sizes", "reason"),
    [
        (Pretended((1 << 16, 1 << 15)), (3,), "too large"),
        (Pretended((2, 2)), (3, (1 << 24) + 1), "size of 16777217 is too large"),
        (Pretended((2, 2), 1032), (3,), "no multiple of 16 bytes"),
    ],
)
def test_what_the_kernels_cannot_address(
    attention: Any, tensor: Pretended, sizes: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        attention._check(tensor, sizes)


@needs_tvm
@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_every_kernel(tmp_path: Path) -> None:
    """With no spills; and the library loads and says what it wants on a machine without a card."""
    from attnc.backends.tvm.cuda.resources import resources

    specs = [
        replace(variant("causal").spec, name=f"d{width}", dtype=DType.FLOAT16, width=width, value_width=width)
        for width in (64, 128)
    ]
    export.write_cuda(specs, tmp_path, export.ARCHES)
    log = export.compile_lean(specs, tmp_path)
    rows = resources((tmp_path / "attention.cu").read_text(), log)
    assert len(rows) == 2 * sum(len(export.functions(spec)) for spec in specs)
    for row in rows:
        assert row.spills == 0, row
    attention = launcher(tmp_path).load(tmp_path)["d64"]
    q = plain(np.zeros((1, 4, 3, 64), np.float16))
    with pytest.raises(ValueError, match="expected cuda"):
        attention(q, q, q, out=q)


@needs_tvm
@needs_nvcc
def test_what_nvcc_says_is_shown(tmp_path: Path) -> None:
    (tmp_path / "attention.cu").write_text("this is no C++\n")
    with pytest.raises(TargetError, match=r"nvcc failed on .*attention\.cu:\n.*error"):
        export.compile_cuda(tmp_path / "attention.cu", tmp_path / "attention.so")


def test_a_mask_without_keys_is_a_spec() -> None:
    assert Spec.from_node(node(mask="false"), "none").mask == MaskSet.none()


def test_what_ptxas_says_becomes_a_table() -> None:
    from attnc.backends.tvm.cuda.resources import Resources, resources, table

    source = (
        'extern "C" __global__ void __launch_bounds__(128) a_mma_kernel(half* p) {\n'
        "auto cuda_arg_7 = (int64_t)55296;\n  if (cuda_arg_7 >= 49152) {\n"
        "    if (::check(cudaFuncSetAttribute(::a_mma_kernel, cudaFuncAttribute, cuda_arg_7)) != 0) return -1;\n"
    )
    log = "".join(
        f"ptxas info    : Compiling entry function 'a_mma_kernel' for '{arch}'\n"
        "ptxas info    : Function properties for a_mma_kernel\n"
        f"    8 bytes stack frame, {spill} bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 175 registers, used 1 barriers\n"
        for arch, spill in (("sm_80", 0), ("sm_90", 12))
    )
    rows = resources(source, log)
    assert rows == [Resources("a_mma", "sm_80", 128, 175, 55296, 4), Resources("a_mma", "sm_90", 128, 175, 55296, 16)]
    assert "| `a_mma` | 128 | 54.0 KB | 175 | 4 B | 175 | 16 B |" in table(rows)
