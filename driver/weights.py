"""Constants in files: written as safetensors, read as memory maps, known by digest."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ..backends.base import Placement
from ..ir import ArtifactError, DType, Graph, Tensor, TensorType

__all__ = ["MappedWeights", "large_tensors", "tensors_of", "write_safetensors"]

_CODES = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}

_ALIGNMENT = 64


def large_tensors(graph: Graph) -> list[Tensor]:
    """The tensors whose data the text of a graph does not show: constants and what states begin as. Not hashed."""
    inner = [region for node in graph.walk() for region in node.regions]
    found = []
    for one in (graph, *inner):
        constants = [value.constant for value in one.constants]
        found += [*constants, *(state.initial for state in one.states.values())]
    return [tensor for tensor in found if tensor is not None and not tensor.is_inline]


def tensors_of(graphs: Iterable[Graph]) -> dict[str, Tensor]:
    """The large tensors of the graphs by digest."""
    found: dict[str, Tensor] = {}
    for graph in graphs:
        for tensor in large_tensors(graph):
            found.setdefault(tensor.digest, tensor)
    return found


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Placement]:
    """Writes the tensors and says where in the file each lies. Wide elements come first, so that all are aligned, and
    of one width those of whole cache lines, so that these begin at one and vectors read them in place; one tensor at a
    time is in memory. Format: https://huggingface.co/docs/safetensors"""
    order = sorted(
        tensors, key=lambda name: (-tensors[name].dtype.bits, tensors[name].nbytes % _ALIGNMENT != 0, name)
    )  # fmt: skip
    header: dict[str, object] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    placed = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        start = file.tell()
        for name in order:
            tensor = tensors[name]
            data = np.ascontiguousarray(tensor.array)
            data = data.astype(data.dtype.newbyteorder("<"), copy=False) if data.dtype.kind in "iuf" else data
            placed[name] = Placement(path.name, start, tensor.nbytes)
            file.write(data.reshape(-1).view(np.uint8).data)
            start += tensor.nbytes
    return placed


class MappedWeights:
    """Constants of an artifact, memory-mapped read-only. Calling it with a digest and a type gives the tensor."""

    def __init__(self, folder: Path, table: Mapping[str, Placement]) -> None:
        """Maps the files at once: what happens to the folder later does not matter. Raises ArtifactError."""
        self._folder = folder
        self._table = table
        self._maps = {name: _map(folder / name) for name in sorted({place.file for place in table.values()})}

    def __call__(self, digest: str, type: TensorType) -> Tensor:
        """Raises ArtifactError when the table lacks the digest or its entry does not fit the type."""
        place = self._table.get(digest)
        if place is None:
            raise ArtifactError(f"{self._folder}: the table of weights has no {digest}, which the program needs")
        shape = tuple(int(str(d)) for d in type.shape)
        if math.prod(shape) * type.dtype.numpy.itemsize != place.nbytes:
            raise ArtifactError(f"{self._folder}: the weight {digest} has {place.nbytes} bytes, which is not a {type}")
        data = np.frombuffer(self._maps[place.file], np.uint8, place.nbytes, place.offset)
        tensor = Tensor(data.view(type.dtype.numpy).reshape(shape))
        tensor.digest = digest  # the files' hashes have been checked: no need to read the data again
        return tensor


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from error
