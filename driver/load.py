"""Models from wherever they come: a graph, an ONNX file, a Python function, text, an artifact."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from types import FunctionType, ModuleType

from ..ir import Graph, ModelError, UsageError, parse
from . import artifact

__all__ = ["load"]

_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
_KNOWN = "a .onnx file, a .gguf file, a .attnc file, FILE.py:FUNCTION, or the folder of a checkpoint or an artifact"


def load(source: Graph | str | os.PathLike[str], longest: int | None = None, stored: bool = False) -> Graph:
    """The graph of a model.

    ``source`` is a path to a ``.onnx`` file or to a ``.attnc`` text, ``file.py:function`` (the function is called
    without arguments and returns a Graph), the folder of a checkpoint (``config.json`` and safetensors files) or of an
    artifact (the model it was compiled from), or a Graph. ``longest`` is the most tokens that the model will be given:
    a checkpoint whose positions depend on the length needs it to be causal. ``stored`` keeps weights of GGUF files in
    their blocks (those of ONNX files always stay). Raises ModelError that names the file for
    what is missing, empty, cut short or not a model, UnsupportedError for what attnc does not know, and UsageError for
    a kind of file that attnc does not read.
    """
    if isinstance(source, Graph):
        return source
    text = os.fspath(source)
    if not isinstance(text, str):
        raise UsageError(f"a model is {_KNOWN} or a Graph, not {type(source).__name__}")
    function = _FUNCTION.fullmatch(text)
    if function:
        return _call(Path(function["file"]), function["name"])
    path = Path(text)
    if _is_folder(path):
        return _from_folder(path, longest)
    if path.suffix == ".py":
        raise UsageError(f"{path}: which function returns the graph? Write {path}:FUNCTION")
    _check_file(path)
    if path.suffix == ".onnx":
        from ..frontends.onnx import load_onnx

        return load_onnx(path)
    if path.suffix == ".gguf":
        from ..frontends.gguf import load_gguf

        return load_gguf(path, stored)
    if path.suffix == ".attnc":
        return _parse_file(path)
    raise UsageError(f"{path}: attnc does not read {path.suffix or 'a file without a suffix'}; a model is {_KNOWN}")


def _is_folder(path: Path) -> bool:
    """Raises ModelError for a path that the system cannot even ask about."""
    try:
        return path.is_dir()
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    """Raises ModelError unless ``path`` is a file with something in it."""
    try:
        if not path.is_file():
            raise ModelError(f"{path}: {'this is not a file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as file:
            if not file.read(1):
                raise ModelError(f"{path}: the file is empty")
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from error


def _parse_file(path: Path) -> Graph:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the file is not text in UTF-8: {error}") from error
    try:
        return parse(text)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _from_folder(path: Path, longest: int | None) -> Graph:
    if (path / artifact.MANIFEST).is_file():
        return artifact.read(path).source()
    from ..frontends.hf import is_checkpoint, load_hf

    if is_checkpoint(path):
        return load_hf(path, longest)
    raise ModelError(
        f"{path}: this folder is not an artifact: it has no {artifact.MANIFEST}; and not a checkpoint: it has no "
        "config.json with safetensors files"
    )


def _call(path: Path, name: str) -> Graph:
    """Runs a user's Python file and calls the function in it. What it raises becomes ModelError with its place."""
    _check_file(path)
    where = path.resolve()
    spec = importlib.util.spec_from_file_location(f"attnc_model_{where.stem}", where)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(where.parent))  # as for a script: its neighbours can be imported
    sys.modules[spec.name] = module  # dataclasses and typing look their module up
    try:
        spec.loader.exec_module(module)
        found = _attribute(module, path, name)
        result = found() if callable(found) and not isinstance(found, Graph) else found
    except (Exception, SystemExit) as error:
        if isinstance(error, _NoFunctionError):
            raise ModelError(str(error)) from None
        raise ModelError(f"{_place(error, path)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(where.parent))
        sys.modules.pop(spec.name, None)
    if not isinstance(result, Graph):
        raise ModelError(f"{path}:{name} must return an attnc.Graph, not {type(result).__name__}")
    return result


class _NoFunctionError(Exception):
    """The file runs but lacks the function."""


def _is_own(module: ModuleType, value: object) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module.__name__


def _attribute(module: ModuleType, path: Path, name: str) -> object:
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if _is_own(module, value) and not key.startswith("_")]
        defined = f"; it defines {', '.join(functions)}" if functions else ""
        raise _NoFunctionError(f"{path} has no function {name}{defined}")
    found: object = getattr(module, name)
    return found


def _place(error: BaseException, path: Path) -> str:
    """``file.py:12`` (in the user's file, where the error passed through it last)."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    where = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    return f"{path}:{lines[-1]}" if lines else str(path)
