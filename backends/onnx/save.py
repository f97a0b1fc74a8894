"""An ONNX model on disk, its large constants in one file beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx

from ...ir import Graph, OutputError, Tensor
from ..base import Placement
from .emitter import declared
from .kernels import Dialect
from .writer import DEFAULT_OPSET, Exported, check_opset, to_tensor_proto, write

__all__ = ["ALIGNMENT", "EXTERNAL_ABOVE", "export_onnx", "save"]

EXTERNAL_ABOVE = 1024
"""Constants of more bytes than this lie in the data file."""

ALIGNMENT = 4096
"""Where constants begin in the data file, so that each can be memory-mapped by itself."""

_CHUNK = 1 << 20


def export_onnx(graph: Graph, path: str | os.PathLike[str], opset: int = DEFAULT_OPSET) -> None:
    """Writes the graph as ONNX to ``path``, its constants above 1 KiB to ``path`` + ``.data``.

    Raises UnsupportedError that names the node for what ONNX cannot say, UsageError for an unknown opset, and
    OutputError when the files cannot be written; then what was at ``path`` before is still there.
    """
    save(write(graph, Dialect(check_opset(opset))), Path(path))


def save(exported: Exported, path: Path) -> dict[str, Placement]:
    """Writes the model and its data file; gives, by initialiser, where its bytes lie. Raises OutputError."""
    large = {name: t for name, t in exported.initialisers.items() if t.nbytes > EXTERNAL_ABOVE}
    data = path.with_name(path.name + ".data")
    placed = _place(large, data.name)
    for name, tensor in exported.initialisers.items():
        proto = _external(name, tensor, placed[name]) if name in placed else to_tensor_proto(name, tensor)
        exported.model.graph.initializer.append(proto)
    try:
        with _replacing(path, data) as (new_model, new_data):
            if large:
                with new_data.open("wb") as file:
                    for name, tensor in large.items():
                        _write_at(file, placed[name].offset, tensor)
            new_model.write_bytes(exported.model.SerializeToString())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return placed


def _place(tensors: Mapping[str, Tensor], file: str) -> dict[str, Placement]:
    placed = {}
    at = 0
    for name, tensor in tensors.items():
        placed[name] = Placement(file, at, tensor.nbytes)
        at += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return placed


def _external(name: str, tensor: Tensor, place: Placement) -> onnx.TensorProto:
    kind, dims = declared(tensor)
    proto = onnx.TensorProto(
        name=name,
        data_type=kind,
        dims=dims,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", place.file), ("offset", place.offset), ("length", place.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def _write_at(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    """Writes a tensor row by row in little-endian order, never holding a second copy of it."""
    file.write(b"\0" * (offset - file.tell()))
    bits = tensor.array.view(f"u{tensor.dtype.numpy.itemsize}")
    if bits.flags.c_contiguous and sys.byteorder == "little":
        file.write(bits.reshape(-1).view(np.uint8).data)
        return
    chunks = np.nditer(bits, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=_CHUNK)
    for chunk in chunks:
        file.write(np.asarray(chunk).astype(bits.dtype.newbyteorder("<")).tobytes())


@contextmanager
def _replacing(*paths: Path) -> Iterator[list[Path]]:
    """Temporary names beside ``paths``; those that exist at the end take their places, all or none."""
    mark = f".{os.getpid()}.tmp"
    new = [p.with_name(f"{p.name}{mark}") for p in paths]
    old = [p.with_name(f"{p.name}{mark}.old") for p in paths]
    moved: list[tuple[Path, Path]] = []
    try:
        yield new
        for path, fresh, backup in zip(paths, new, old, strict=True):
            if not fresh.exists():
                continue
            if path.exists():
                os.replace(path, backup)
                moved.append((backup, path))
            os.replace(fresh, path)
            moved.append((path, fresh))
    except BaseException:
        for source, target in reversed(moved):
            os.replace(source, target)
        raise
    finally:
        for leftover in (*new, *old):
            with suppress(OSError):
                leftover.unlink()
