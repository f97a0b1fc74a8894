"""Artifacts: a program as a folder.

    attnc.json           what it is and how it was made; sizes and hashes of the other files; where each weight lies
    program.attnc        the final graph as text
    prepare.attnc        the graph of the encoder half, where there is one; the backend's files for it lie in prepare/
    source.attnc         the model as it was loaded, as text
    weights.safetensors  the constants that the backend did not put into files of its own
    tokenizer.json       what turns text into tokens and back, where it is known
    chat_template.jinja  what turns a conversation into text, where there is one
    …                    the backend's own files

Opening one reads and checks; it executes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..backends.base import Backend, Options, Placement
from ..ir import ArtifactError, AttncError, Graph, OutputError, parse
from ..ir.cacheplan import CachePlan
from .folder import check_replaceable, new_folder
from .report import Report
from .stamps import LARGE, Stamps
from .targets import attnc_version
from .weights import MappedWeights, tensors_of, write_safetensors
from .words import Words

__all__ = ["MANIFEST", "Contents", "check_output", "is_artifact", "read", "write"]

FORMAT = 1
MANIFEST = "attnc.json"
PROGRAM = "program.attnc"
PREPARE = "prepare.attnc"
PREPARE_FOLDER = "prepare"
SOURCE = "source.attnc"
WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"


@dataclass
class Contents:
    """What an artifact held when it was read. The graphs are parsed when asked for; their weights are memory-mapped."""

    folder: Path
    target: str
    options: Options
    report: Report
    version: str
    _texts: Mapping[str, str] = field(repr=False)
    _weights: MappedWeights = field(repr=False)
    plan: CachePlan | None = None
    words: Words | None = None
    wordless: str = ""
    """Why there are no words, where that is known."""

    def program(self) -> Graph:
        """The final graph."""
        return self._graph(PROGRAM)

    @property
    def has_prepare(self) -> bool:
        """Whether there is an encoder half."""
        return PREPARE in self._texts

    def prepare(self) -> Graph:
        """The graph of the encoder half."""
        return self._graph(PREPARE)

    def source(self) -> Graph:
        """The model as it was loaded."""
        return self._graph(SOURCE)

    def _graph(self, name: str) -> Graph:
        try:
            return parse(self._texts[name], self._weights)
        except ArtifactError:
            raise
        except AttncError as error:
            raise ArtifactError(f"{self.folder / name}: {error}") from error


def is_artifact(path: Path) -> bool:
    """Whether a folder says that it is an artifact, intact or not."""
    return path.is_dir() and (path / MANIFEST).is_file()


def check_output(path: Path) -> None:
    """Raises OutputError when an artifact may not be written at ``path``."""
    check_replaceable(path, _foreign)


def _foreign(path: Path) -> str | None:
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        listed = {MANIFEST, *data["files"]} if isinstance(data["format"], int) and data["attnc"] else set()
    except (OSError, ValueError, TypeError, KeyError):
        return "it is not empty and not an artifact of attnc"
    if not listed:
        return "it is not empty and not an artifact of attnc"
    extra = sorted(_files(path) - listed)
    return f"it holds {extra[0]}, which is not part of the artifact" if extra else None


def _files(folder: Path) -> set[str]:
    """The files of a folder, but for what Python compiles of those that it imports from there."""
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return {p.as_posix() for p in found if "__pycache__" not in p.parts}


def write(
    path: Path,
    graph: Graph,
    source: Graph,
    backend: Backend,
    target: str,
    options: Options,
    report: Report,
    *,
    plan: CachePlan | None = None,
    prepare: Graph | None = None,
    words: Words | None = None,
    wordless: str = "",
) -> None:
    """Writes an artifact; the backend builds its part. An older artifact at ``path`` is replaced in one step.

    Raises OutputError, after which everything is as it was, when ``path`` holds something else or cannot be written.
    """
    with new_folder(path, _foreign) as folder:
        placed = dict(backend.build(graph, folder, options))
        if prepare is not None:
            placed = _build_prepare(prepare, folder / PREPARE_FOLDER, backend, options) | placed
        reserved = {MANIFEST, PROGRAM, PREPARE, SOURCE, WEIGHTS, TOKENIZER, TEMPLATE} & _files(folder)
        if reserved:
            raise OutputError(f"the backend {target} wrote {', '.join(sorted(reserved))}, which is attnc's own name")
        (folder / PROGRAM).write_text(str(graph), encoding="utf-8")
        (folder / SOURCE).write_text(str(source), encoding="utf-8")
        graphs = [graph, source]
        if prepare is not None:
            (folder / PREPARE).write_text(str(prepare), encoding="utf-8")
            graphs.append(prepare)
        rest = {digest: t for digest, t in tensors_of(graphs).items() if digest not in placed}
        if rest:
            placed |= write_safetensors(folder / WEIGHTS, rest)
        if words is not None:
            (folder / TOKENIZER).write_text(words.tokenizer_json, encoding="utf-8")
            if words.template is not None:
                (folder / TEMPLATE).write_text(words.template, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "attnc": attnc_version(),
            "target": target,
            "options": {"opset": options.opset, "threads": options.threads, "extra": dict(options.extra)},
            "inputs": [{"name": v.name, "type": str(v.type)} for v in graph.inputs],
            "outputs": [{"name": o.name, "type": str(o.value.type)} for o in graph.outputs],
            "states": [
                {"name": s.name, "type": str(s.type), "description": s.description}
                for s in ({**prepare.states, **graph.states} if prepare is not None else graph.states).values()
            ],
            "files": {
                name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
                for name in sorted(_files(folder))
            },
            "weights": {
                digest: {"file": p.file, "offset": p.offset, "nbytes": p.nbytes} for digest, p in sorted(placed.items())
            },
            "report": report.to_dict(),
        }
        if plan is not None:
            manifest["plan"] = plan.to_dict()
        if prepare is not None:
            manifest["prepare"] = {"inputs": [{"name": v.name, "type": str(v.type)} for v in prepare.inputs]}
        if words is not None:
            manifest["words"] = {
                "tokens": dict(words.tokens),
                "ends": list(words.ends),
                "start": words.start,
                "chat": words.template is not None,
            }
        elif wordless:
            manifest["words"] = {"missing": wordless}
        text = json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _build_prepare(graph: Graph, folder: Path, backend: Backend, options: Options) -> dict[str, Placement]:
    """The backend's part of the encoder half, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return {
        digest: Placement(f"{PREPARE_FOLDER}/{place.file}", place.offset, place.nbytes)
        for digest, place in backend.build(graph, folder, options).items()
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest without its checksum, in a form that does not depend on spaces or order."""
    plain = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read(path: Path, whole: bool = False) -> Contents:
    """Checks an artifact: the manifest, and that every file is there with its size and hash. Large files that were
    hashed before and have not been touched since are not hashed again, unless ``whole`` asks for it. Raises
    ArtifactError that names the file and what differs."""
    where = path / MANIFEST
    if not path.is_dir():
        kind = "is not a folder" if path.exists() else "does not exist"
        raise ArtifactError(f"{path}: an artifact is a folder; this {kind}")
    try:
        manifest = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: this folder is not an artifact: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: cannot be read: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise ArtifactError(f"{where}: this is not the description of an artifact: it states no format")
    if manifest["format"] != FORMAT:
        raise ArtifactError(
            f"{where}: the format is {manifest['format']} and this attnc reads {FORMAT}; "
            f"it was written by attnc {manifest.get('attnc', 'of an unknown version')}"
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ArtifactError(f"{where}: it was altered: its content does not fit its checksum")
    try:
        contents = _contents(path, manifest, whole)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{where}: an entry is missing or wrong: {type(error).__name__}: {error}") from error
    return contents


def _contents(path: Path, manifest: Mapping[str, Any], whole: bool) -> Contents:
    files = {str(name): (int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    for name in files:
        _check_inside(path, name)
    texts = (PROGRAM, SOURCE, *([PREPARE] if "prepare" in manifest else []))
    for name in texts:
        if name not in files:
            raise ArtifactError(f"{path / MANIFEST}: the list of files lacks {name}")
    said = manifest.get("words", {})
    spoken = {TOKENIZER, *({TEMPLATE} if said.get("chat") else ())} if "tokens" in said else set()
    if spoken - set(files):
        raise ArtifactError(f"{path / MANIFEST}: the list of files lacks {min(spoken - set(files))}")
    table = {}
    for digest, entry in manifest["weights"].items():
        place = Placement(str(entry["file"]), int(entry["offset"]), int(entry["nbytes"]))
        if place.file not in files:
            raise ArtifactError(f"{path / MANIFEST}: the weight {digest} lies in {place.file}, which is not listed")
        if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > files[place.file][0]:
            raise ArtifactError(f"{path / MANIFEST}: the weight {digest} lies outside {place.file}")
        table[str(digest)] = place
    stamps = Stamps(path)
    for name, (size, digest) in files.items():
        _check_file(path / name, size, digest, None if size < LARGE else stamps, whole)
    stamps.save()
    options = manifest["options"]
    return Contents(
        path,
        str(manifest["target"]),
        Options(options["opset"], options["threads"], dict(options["extra"])),
        Report.from_dict(manifest["report"]),
        str(manifest["attnc"]),
        {name: _read_text(path / name) for name in texts},
        MappedWeights(path, table),
        CachePlan.from_dict(manifest["plan"]) if "plan" in manifest else None,
        _words(path, said),
        str(said.get("missing", "")),
    )


def _words(path: Path, said: Mapping[str, Any]) -> Words | None:
    if "tokens" not in said:
        return None
    template = _read_text(path / TEMPLATE) if said["chat"] else None
    tokens = {str(name): str(token) for name, token in said["tokens"].items()}
    start = None if said["start"] is None else int(said["start"])
    return Words(_read_text(path / TOKENIZER), template, tokens, tuple(int(end) for end in said["ends"]), start)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from error


def _check_inside(path: Path, name: str) -> None:
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name and "\0" not in name and pure.parts
    if not inside or not (path / name).resolve().is_relative_to(path.resolve()):
        raise ArtifactError(f"{path / MANIFEST}: the file {name!r} would lie outside the artifact")


def _check_file(path: Path, size: int, digest: str, stamps: Stamps | None, whole: bool) -> None:
    try:
        if not path.is_file():
            raise ArtifactError(f"{path}: the file is missing")
        before = path.stat()
        if before.st_size != size:
            raise ArtifactError(f"{path}: it was altered: it has {before.st_size} bytes instead of {size}")
        if stamps is not None and not whole and stamps.knows(path, digest):
            return
        hashed = _sha256(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    if hashed != digest:
        raise ArtifactError(f"{path}: it was altered: its SHA-256 is {hashed[:16]}… instead of {digest[:16]}…")
    if stamps is not None:
        stamps.note(path, digest, before)
