"""What can be said about a model before it is imported: unknown versions, and all unknown operators at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import onnx
from onnx import FunctionProto, NodeProto

from ...ir import ModelError, UnsupportedError
from .bodies import has_body
from .files import Model
from .table import HANDLERS

__all__ = ["Functions", "check_operators", "check_version", "plain_domain"]

Functions = Mapping[tuple[str, str, str], FunctionProto]
"""(domain, name, overload) → local function."""


def plain_domain(domain: str) -> str:
    """The domain, with the long name of the standard one shortened to nothing."""
    return "" if domain == "ai.onnx" else domain


def check_version(model: Model, version: int) -> None:
    """Raises when the standard operators are of a version that does not exist yet: they may mean something else."""
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise UnsupportedError(
            f"{model.label} uses opset {version}, but the installed onnx package knows opsets up to {newest} only; "
            "upgrade onnx, or export the model with an older opset"
        )
    if version < 1:
        raise ModelError(f"{model.label} says that it uses opset {version}; there is none before 1")


def check_operators(model: Model, functions: Functions, opsets: Mapping[str, int]) -> None:
    """Raises UnsupportedError that lists every operator that has no handler and no function body."""
    missing: Counter[tuple[str, str]] = Counter()
    pending: list[tuple[Iterable[NodeProto], Mapping[str, int]]] = [(model.proto.graph.node, opsets)]
    seen: set[tuple[str, str, str]] = set()
    while pending:
        nodes, versions = pending.pop()
        for node in nodes:
            key = (plain_domain(node.domain), node.op_type)
            local = (*key, node.overload)
            if local in functions and local not in seen:
                seen.add(local)
                function = functions[local]
                pending.append((function.node, {plain_domain(e.domain): e.version for e in function.opset_import}))
            if node.op_type != "If":  # of an If, one branch may never be imported
                pending += [(a.g.node, versions) for a in node.attribute if a.HasField("g")]
            if local in functions:
                continue
            if key not in HANDLERS and not has_body(node, versions.get(key[0], 0)):
                missing[key] += 1
    if missing:
        listed = ", ".join(
            f"{count} × {domain + '.' if domain else ''}{op}" for (domain, op), count in sorted(missing.items())
        )
        raise UnsupportedError(
            f"{model.label} uses operators that attnc does not know: {listed}. "
            "Export the model with other settings (a plain opset 18 export without contrib operators), or make these "
            "operators functions of the model (onnx local functions)"
        )
