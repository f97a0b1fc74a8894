"""Runs the attentions of a compiled folder. Needs apache-tvm-ffi, and nothing else of ours: the file goes with it.

    attentions = load("folder")
    attentions["layer0"](q, k, v, out=out)                    # any CUDA tensors that speak DLPack: torch, cupy
    attentions["layer0"](q, k, v, out=out, m=4096, parts=16, empty=torch_empty)      # few queries, many keys

Work goes to the current stream of torch where torch is loaded, as apache-tvm-ffi has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Attention", "load"]

_MOST_ELEMENTS = (1 << 31) - 1
_LONGEST = 1 << 24
_ALIGNMENT = 16
_MOST_BLOCKS = 65535


def load(folder: str | Path) -> dict[str, Attention]:
    """The attentions by name. Raises FileNotFoundError when the folder holds no compiled library."""
    import tvm_ffi

    folder = Path(folder)
    description = json.loads((folder / "attention.json").read_text(encoding="utf-8"))
    library = folder / "attention.so"
    if not library.exists():
        raise FileNotFoundError(f"{library} is missing: attention.cu was not compiled, which needs nvcc")
    module = tvm_ffi.load_module(str(library))
    return {name: Attention(name, about, module) for name, about in description["attentions"].items()}


class Attention:
    """One attention. ``about`` is its entry in attention.json."""

    def __init__(self, name: str, about: Mapping[str, Any], module: Any) -> None:
        self.name, self.about = name, about
        self.functions = {kind: module[function] for kind, function in about["functions"].items()}

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any,
        loads: Mapping[str, Any] | None = None,
        m: int | None = None,
        start: int | None = None,
        sizes: Mapping[str, int] | None = None,
        kernel: str | None = None,
        parts: int = 1,
        empty: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:
        """Fills ``out`` [b, heads, n, value width] from q [b, heads, n, width], k and v [b, groups, m, …].

        For a cache, k and v are [b, groups, capacity, …], ``m`` is how many keys there are, and ``start`` where the
        first lies in a ring. ``loads`` and ``sizes`` hold what the expressions read. ``kernel`` is "fma" or "mma" (the
        default where there is one). With ``parts`` > 1 as many blocks share the keys of a query, through float32
        tensors that ``empty(shape)`` makes. All tensors are compact. Raises ValueError for what does not fit.
        """
        about, loads, sizes = self.about, loads or {}, sizes or {}
        for what, given, wanted in (("loads", loads, about["loads"]), ("sizes", sizes, about["sizes"])):
            if set(given) != set(wanted):
                raise ValueError(
                    f"{self.name} takes the {what} {', '.join(wanted) or '(none)'}, not {', '.join(given)}"
                )
        batch, _, n, _ = q.shape
        if batch > _MOST_BLOCKS:
            raise ValueError(f"{self.name}: a batch of {batch} is more than {_MOST_BLOCKS}, which a grid may have")
        keys = self._keys(int(k.shape[2]), m, start)
        tensors = [loads[name] for name in about["loads"]]
        for x in (q, k, v, out, *tensors):
            self._check(x, (n, keys, *sizes.values()))
        if not batch or not n:
            return
        numbers = [sizes[name] for name in about["sizes"]]
        places = [] if about["cache"] == "none" else [keys] if about["cache"] == "linear" else [keys, start]
        kernel = kernel or ("mma" if "mma" in self.functions else "fma")
        if parts <= 1:
            self._function(kernel)(q, k, v, *tensors, out, *places, *numbers)
            return
        if empty is None:
            raise ValueError(f"{self.name} in {parts} parts needs empty(shape), which makes a float32 tensor")
        shape = (parts, batch, about["heads"], n)
        sums, stats = empty((*shape, about["value_width"])), empty((*shape, 2))
        self._function(f"{kernel}_split")(q, k, v, *tensors, sums, stats, *places, *numbers)
        self._function("merge")(sums, stats, *tensors, out, keys, *numbers)

    def _function(self, kind: str) -> Any:
        if kind not in self.functions:
            raise ValueError(f"{self.name} has no kernel {kind}; it has {', '.join(self.functions)}")
        return self.functions[kind]

    def _keys(self, capacity: int, m: int | None, start: int | None) -> int:
        cache = self.about["cache"]
        if (m is None) != (cache == "none") or (start is None) != (cache != "ring"):
            wanted = {"none": "neither m nor start", "linear": "m", "ring": "m and start"}[cache]
            raise ValueError(f"{self.name} has the cache {cache}: it takes {wanted}")
        keys = capacity if m is None else m
        if not 0 <= keys <= capacity or (start is not None and not 0 <= start < max(capacity, 1)):
            raise ValueError(f"{self.name}: {keys} keys from {start or 0} do not fit into a cache of {capacity}")
        return keys

    def _check(self, x: Any, sizes: tuple[int, ...]) -> None:
        """The kernels compute indices in 32 bits and copy 16 bytes at once."""
        elements = 1
        for extent in x.shape:
            elements *= int(extent)
        if elements > _MOST_ELEMENTS or max(sizes) > _LONGEST:
            raise ValueError(f"{self.name}: a tensor of shape {tuple(x.shape)} or a size of {max(sizes)} is too large")
        if _address(x) % _ALIGNMENT:
            raise ValueError(f"{self.name}: a tensor starts at an address that is no multiple of {_ALIGNMENT} bytes")


def _address(x: Any) -> int:
    """Where a tensor of torch or cupy begins; 0 for others, which have to see to it themselves."""
    if hasattr(x, "data_ptr"):
        return int(x.data_ptr())
    return int(getattr(getattr(x, "data", None), "ptr", 0))
