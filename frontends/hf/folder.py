"""A checkpoint folder as it lies on the disk: config.json, and tensors in one safetensors file or several."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ir import ModelError
from .safetensors import Stored, open_safetensors

__all__ = ["CONFIG", "is_checkpoint", "read_config", "read_tensors"]

CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a configuration or weights of the kind."""
    return (folder / CONFIG).is_file() or (folder / _INDEX).is_file() or any(folder.glob("*.safetensors"))


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json. Raises ModelError."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: the checkpoint has no {CONFIG}, which says what its weights are the weights of")
    return _json(folder / CONFIG)


def read_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors by name. Raises ModelError for a file that is missing or damaged, or a tensor not where it should
    be."""
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    if (folder / _SINGLE).is_file():
        return open_safetensors(folder / _SINGLE)
    found: dict[str, Stored] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        hint = f"; {pickled[0]} is a pickle, which can run anything and is not read" if pickled else ""
        raise ModelError(f"{folder}: the checkpoint has no {_SINGLE}{hint}. Save its weights as safetensors")
    _check_complete(folder, files)
    for path in files:
        for name, tensor in open_safetensors(path).items():
            if name in found:
                raise ModelError(f"{folder}: the tensor {name} is in {found[name].path.name} and in {path.name}")
            found[name] = tensor
    return found


def _check_complete(folder: Path, files: list[Path]) -> None:
    """Raises ModelError where the names of the files say that there are more."""
    for path in files:
        match = _SHARD.fullmatch(path.name)
        for number in range(1, int(match[2]) + 1) if match else ():
            other = path.with_name(f"{path.name[: match.start(1)]}{number:05}{path.name[match.end(1) :]}")  # type: ignore[union-attr]
            if not other.is_file():
                raise ModelError(f"{folder}: the shard {other.name} is missing, which {path.name} is one of the set of")


def _indexed(folder: Path) -> dict[str, Stored]:
    places = _json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{folder / _INDEX}: it has no weight_map from tensors to files")
    shards: dict[str, dict[str, Stored]] = {}
    found: dict[str, Stored] = {}
    for name, file in places.items():
        if file not in shards:
            path = folder / file
            if Path(file).name != file or "\\" in file:
                raise ModelError(f"{folder / _INDEX}: {name} is said to lie in {file!r}, outside the folder")
            if not path.is_file():
                among = sum(other == file for other in places.values())
                raise ModelError(
                    f"{folder}: the shard {file} is missing, which holds {name} and {among - 1} more tensors"
                )
            shards[file] = open_safetensors(path)
        if name not in shards[file]:
            raise ModelError(f"{folder / file}: the tensor {name} is not in it, where {_INDEX} says that it is")
        found[name] = shards[file][name]
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: this is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ModelError(f"{path}: this is not a table of fields")
    return dict(found)
