"""What a compilation found and did, as data and as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..ir import Dim, Graph, Node
from ..passes.base import Refusal

__all__ = ["AttentionReport", "CacheReport", "Difference", "RefusalReport", "Report", "attentions_of"]


@dataclass(frozen=True)
class AttentionReport:
    """One attention: where it comes from, its sizes, and what a query may see."""

    node: str
    heads: int | str
    kv_heads: int | str
    head_dim: int | str
    scale: float
    mask: str | None
    mask_words: str
    score: str
    loads: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheReport:
    """One state that keeps results between runs, and why that changes no result. ``kind`` as in ``CacheState``, ``size``
    in bytes as a formula of the sizes; ``length`` is the number of tokens seen."""

    state: str
    type: str
    proof: str
    kind: str = "append"
    node: str = ""
    size: str = ""


@dataclass(frozen=True)
class RefusalReport:
    """A rewrite that was not made, at which node, and why."""

    what: str
    node: str
    reason: str


@dataclass(frozen=True)
class Difference:
    """How far an output lies from the model as it was loaded, computed in float64.

    ``absolute`` is the largest |program - reference|; ``relative`` is that divided by the largest |reference|.
    ``undefined`` counts the elements where the reference is NaN, which are left out.
    """

    absolute: float
    relative: float
    tolerance: float
    undefined: int = 0

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance


@dataclass
class Report:
    """Everything that there is to say about a compilation."""

    attentions: list[AttentionReport] = field(default_factory=list)
    caches: list[CacheReport] = field(default_factory=list)
    refusals: list[RefusalReport] = field(default_factory=list)
    operators_before: dict[str, int] = field(default_factory=dict)
    operators_after: dict[str, int] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What the passes did, by pass."""

    def add_refusals(self, refusals: Iterable[Refusal]) -> None:
        self.refusals += [RefusalReport(r.what, r.node, r.reason) for r in refusals]

    def to_dict(self) -> dict[str, Any]:
        """The report in dicts, lists, texts and numbers; ``json.dumps`` takes it."""
        data = asdict(self)
        for attention in data["attentions"]:
            attention["loads"] = list(attention["loads"])
        for name, difference in self.differences.items():
            data["differences"][name]["ok"] = difference.ok
            for key in ("absolute", "relative"):  # JSON has no infinity
                value = data["differences"][name][key]
                data["differences"][name][key] = value if value == value and abs(value) != float("inf") else str(value)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that ``to_dict`` gave. Raises KeyError, TypeError or ValueError for anything else."""
        report = cls(
            attentions=[AttentionReport(**{**a, "loads": tuple(a["loads"])}) for a in data["attentions"]],
            caches=[CacheReport(**c) for c in data["caches"]],
            refusals=[RefusalReport(**r) for r in data["refusals"]],
            operators_before={str(k): int(v) for k, v in data["operators_before"].items()},
            operators_after={str(k): int(v) for k, v in data["operators_after"].items()},
            notes={str(k): [str(n) for n in v] for k, v in data["notes"].items()},
        )
        for name, d in data["differences"].items():
            report.differences[name] = Difference(
                float(d["absolute"]), float(d["relative"]), float(d["tolerance"]), int(d["undefined"])
            )
        return report

    def text(self) -> str:
        """The report for people, ending in a newline."""
        lines = [
            f"operators: {sum(self.operators_before.values())} in the model, "
            f"{sum(self.operators_after.values())} in the program"
        ]
        lines += [f"  {name}: {'; '.join(notes)}" for name, notes in self.notes.items() if notes]
        lines.append(f"attentions: {len(self.attentions) or 'none'}")
        for a in self.attentions:
            heads = f"{a.heads} heads" + (f" on {a.kv_heads} key heads" if a.kv_heads != a.heads else "")
            lines.append(f"  {a.node}: {heads} of width {a.head_dim}, scale {a.scale:g}")
            lines.append(f"    mask: {a.mask_words}" + (f" = {a.mask}" if a.mask else ""))
            if a.score != "s":
                lines.append(f"    score: {a.score}")
            if a.loads:
                lines.append(f"    reads: {', '.join(a.loads)}")
        if self.caches:
            lines.append(f"caches: {len(self.caches)}")
            lines += [f"  {c.state} ({c.kind}): {c.type}, {c.size or '?'} bytes; {c.proof}" for c in self.caches]
        if self.refusals:
            lines.append(f"refused: {len(self.refusals)}")
            lines += [f"  {r.what} at {r.node}: {r.reason}" for r in self.refusals]
        if self.differences:
            lines.append("largest differences from the model in float64:")
            lines += [f"  {name}: {_difference_text(d)}" for name, d in self.differences.items()]
        return "\n".join(lines) + "\n"


def _difference_text(d: Difference) -> str:
    verdict = "ok" if d.ok else f"above the tolerance of {d.tolerance:g}"
    undefined = f", {d.undefined} undefined elements left out" if d.undefined else ""
    return f"{d.absolute:.3g} absolute, {d.relative:.3g} relative: {verdict}{undefined}"


def attentions_of(graph: Graph) -> list[AttentionReport]:
    """Every ``attention`` node of a graph and its regions, in execution order."""
    return [_attention(node) for node in graph.walk() if node.op.name == "attention"]


def _attention(node: Node) -> AttentionReport:
    q, k = node.operands[0], node.operands[1]
    mask, where = node.attr("mask"), node.attr("where")
    words = [mask.words()] if mask is not None else []
    words += [f"where {where}"] if where is not None else []
    return AttentionReport(
        node=node.source or str(node.output),
        heads=_size(q.type.shape[1]),
        kv_heads=_size(k.type.shape[1]),
        head_dim=_size(q.type.shape[3]),
        scale=float(node.attr("scale")),
        mask=mask.text if mask is not None else None,
        mask_words=" and ".join(words) or "none: every query sees every key",
        score=str(node.attr("score")),
        loads=tuple(node.attr("loads")),
    )


def _size(d: Dim) -> int | str:
    return d if isinstance(d, int) else str(d)
