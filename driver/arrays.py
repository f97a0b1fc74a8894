"""Arrays that the command line reads and writes."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..ir import Graph, InputError, UsageError
from ..ir.operator import Array
from .folder import check_replaceable, new_folder

__all__ = ["check_results_folder", "read_feeds", "safe_names", "write_results"]

INDEX = "outputs.json"

_LITERAL = re.compile(r"\s*(\[.*\]|-?\d.*|true|false)\s*", re.DOTALL)


def read_feeds(graph: Graph, given: Sequence[str]) -> dict[str, Any]:
    """The feeds that ``name=file.npy``, ``name=[[1, 2]]`` (JSON) and ``file.npz`` (all inputs by name) stand for.

    Raises UsageError for another form or a name twice, InputError for a file that is not an array.
    """
    feeds: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if (equals and any(v.name == name for v in graph.inputs)) or not item.endswith(".npz"):
            if not equals:
                raise UsageError(f"an input is given as name=file.npy, name=[JSON] or file.npz, not {item!r}")
            found = {name: _literal(name, value) if _is_literal(value) else _load(Path(value), name)}
        else:
            found = _load_archive(Path(item))
        twice = sorted(set(found) & set(feeds))
        if twice:
            raise UsageError(f"the input {twice[0]} is given twice")
        feeds |= found
    types = {v.name: v.type for v in graph.inputs}
    return {
        name: _bfloat16(array) if name in types and str(types[name].dtype) == "bfloat16" else array
        for name, array in feeds.items()
    }


def _is_literal(text: str) -> bool:
    return bool(_LITERAL.fullmatch(text)) and not Path(text).is_file()


def _literal(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
        np.asarray(value)
    except ValueError as error:
        raise InputError(f"input {name}: {text!r} is not an array in JSON: {error}") from error
    return value


def _load(path: Path, name: str) -> Array:
    found = _np_load(path, f"input {name}: ")
    if not isinstance(found, np.ndarray):
        found.close()
        raise InputError(f"input {name}: {path} holds several arrays; give it without a name: -i {path}")
    return found


def _load_archive(path: Path) -> dict[str, Array]:
    found = _np_load(path, "")
    if isinstance(found, np.ndarray):
        raise InputError(f"{path} holds one array without a name: -i name={path}")
    try:
        with found:
            return {name: found[name] for name in found.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path}: not an archive of arrays: {error}") from error


def _np_load(path: Path, what: str) -> Any:
    try:
        if zipfile.is_zipfile(path) or path.suffix != ".npz":
            return np.load(path, allow_pickle=False)
        path.open("rb").close()  # says so when there is no such file
        raise ValueError("it is not an archive")
    except FileNotFoundError:
        raise InputError(f"{what}there is no file {path}") from None
    except OSError as error:
        raise InputError(f"{what}{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{what}{path} is not an array in NumPy's format: {error}") from error


def _bfloat16(array: Any) -> Any:
    """NumPy's format has no bfloat16: it comes back as two raw bytes an element."""
    import ml_dtypes

    raw = isinstance(array, np.ndarray) and array.dtype.kind == "V" and array.dtype.itemsize == 2
    return array.view(ml_dtypes.bfloat16) if raw else array


def safe_names(names: Sequence[str]) -> dict[str, str]:
    """A file name without odd characters for each name; no two are equal, in any case of letters."""
    chosen: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        base = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].lstrip(".-") or "output"
        candidate, number = base, 1
        while candidate.lower() in taken:
            number += 1
            candidate = f"{base}_{number}"
        taken.add(candidate.lower())
        chosen[name] = candidate
    return chosen


def write_results(folder: Path, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Writes each output as ``name.npy``, and an index ``outputs.json`` of names, files, dtypes and shapes, which it
    gives back. All or nothing; results of an earlier run are replaced. bfloat16 is written as float32."""
    index = {}
    with new_folder(folder, _foreign) as new:
        for name, file in safe_names(list(outputs)).items():
            array = outputs[name]
            index[name] = {"file": f"{file}.npy", "dtype": array.dtype.name, "shape": list(array.shape)}
            np.save(new / f"{file}.npy", array.astype(np.float32) if array.dtype.kind == "V" else array)
        (new / INDEX).write_text(json.dumps({"outputs": index}, indent=1) + "\n", encoding="utf-8")
    return index


def check_results_folder(folder: Path) -> None:
    """Raises OutputError when results may not be written there."""
    check_replaceable(folder, _foreign)


def _foreign(path: Path) -> str | None:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))["outputs"]
        listed = {INDEX, *(entry["file"] for entry in index.values())}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return "it is not empty and holds no results of attnc"
    extra = sorted({p.name for p in path.iterdir()} - listed)
    return f"it holds {extra[0]}, which is no result of attnc" if extra else None
