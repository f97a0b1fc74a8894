"""What can be said about a model before it is imported: unknown versions, and all unknown operators at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import onnx
from onnx import NodeProto

from ...ir import ModelError, UnsupportedError
from .bodies import has_body, most_operands
from .files import Model
from .order import node_title
from .structure import Functions, plain_domain
from .table import HANDLERS

__all__ = ["check_operators", "check_version"]


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
    """Raises UnsupportedError that lists every operator that has no handler and no function body, with the number of
    its nodes and the first of them, the most frequent first; and ModelError for a node with more operands than its
    operator takes, of which some would be ignored."""
    missing: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    known: dict[tuple[str, str, int], tuple[bool, int | None]] = {}
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
            version = versions.get(key[0], 0)
            if (*key, version) not in known:
                known[*key, version] = (key in HANDLERS or has_body(node, version), most_operands(node, version))
            is_known, most = known[*key, version]
            if most is not None and len(node.input) > most:
                raise ModelError(
                    f"{model.label}: node {node_title(node)} has {len(node.input)} operands; its operator takes {most}"
                )
            if not is_known:
                missing[key] += 1
                first.setdefault(key, node_title(node).rpartition(" (")[0])
    if missing:
        count = sum(missing.values())
        raise UnsupportedError(
            f"{model.label} uses {len(missing)} operator{'s' * (len(missing) > 1)} that attnc does not know, in "
            f"{count} node{'s' * (count > 1)}: {_listed(missing, first)}. "
            "Export the model with other settings (a plain opset 18 export without contrib operators), or make these "
            "operators functions of the model (onnx local functions)"
        )


def _listed(missing: Counter[tuple[str, str]], first: Mapping[tuple[str, str], str]) -> str:
    """On one line where it is short, else one operator a line."""
    parts = [
        f"{count} × {domain + '.' if domain else ''}{op} ({'first ' if count > 1 else ''}{first[domain, op]})"
        for (domain, op), count in sorted(missing.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ", ".join(parts) if len(parts) <= 4 else "\n  " + "\n  ".join(parts) + "\n"
