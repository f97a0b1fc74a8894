"""docs/cuda.md shows the kernel that is generated."""

from __future__ import annotations

import re
from pathlib import Path

from attnc.tests.backends.tvm.cuda.cpu import needs_tvm
from attnc.tests.backends.tvm.cuda.variants import spec

PAGE = Path(__file__).parents[4] / "docs" / "cuda.md"


def kernel() -> str:
    from attnc.backends.tvm.cuda.export import cuda_source

    shown = spec(
        "layer0", "j <= i and i - j < 256", score="30 * tanh(s / 30)", width=64, value_width=64, heads=12, groups=4
    )
    source = cuda_source([shown], only=("fma",))
    start, end = source.rindex('extern "C" __global__'), source.index("#include <tvm/ffi/c_api.h>")
    return source[start:end].rstrip() + "\n"


@needs_tvm
def test_the_kernel_of_the_page() -> None:
    shown = re.search(r"```cuda\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == kernel()
