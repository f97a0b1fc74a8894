"""What a compilation found and did, as data and as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..ir import Dim, Graph, Node, Value
from ..passes.base import Refusal, Replaced
from .scorewords import score_words

__all__ = ["AttentionReport", "CacheReport", "Difference", "RefusalReport", "Report", "attentions_of"]


@dataclass(frozen=True)
class AttentionReport:
    """One attention: where it comes from, its sizes, what a query may see, and how well keys fit.

    ``mask`` is the text of a set and ``where`` a condition beside it. ``score`` is an expression of s, ``inner`` the
    product that s sums. ``empty`` says what a query without a visible key gets. ``loads`` names the tensors that
    expressions read, ``load_kinds`` says of each what it is. ``replaced`` counts the operators that the attention
    stands for, by name, of which ``shared`` are counted at other attentions too.
    """

    node: str
    heads: int | str
    kv_heads: int | str
    head_dim: int | str
    scale: float
    mask: str | None
    mask_words: str
    score: str
    loads: tuple[str, ...] = ()
    value_dim: int | str = 0
    where: str | None = None
    score_words: str = ""
    inner: str = "q * k"
    normalise: str = "softmax"
    empty: str = "zeros"
    sink: str | None = None
    weights: bool = False
    load_kinds: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    shared: int = 0

    def lines(self) -> list[str]:
        """For people, a line each."""
        heads = f"{self.heads} heads" + (f" on {self.kv_heads} key heads" if self.kv_heads != self.heads else "")
        values = f", values of width {self.value_dim}" if self.value_dim not in (0, self.head_dim) else ""
        lines = [f"{self.node}: {heads} of width {self.head_dim}{values}, scale {self.scale:g}"]
        lines.append(f"  mask: {self.mask_words}" + (f" = {self.mask}" if self.mask else ""))
        if self.score != "s":
            lines.append(f"  score: {self.score_words or self.score}")
            lines += [f"    = {self.score}"] if self.score_words not in ("", self.score) else []
        if self.inner != "q * k":
            lines.append(f"  each s sums: {self.inner}")
        if self.normalise != "softmax":
            lines.append(f"  weights: {_NORMALISE[self.normalise]}")
        if self.sink is not None:
            lines.append(f"  sink: {self.sink}")
        if self.empty != "zeros":
            lines.append(f"  a query without a key gets: {_EMPTY[self.empty]}")
        if self.weights:
            lines.append("  its weights are read too")
        lines += [f"  reads {name}: {self.load_kinds.get(name, 'a tensor')}" for name in self.loads]
        if self.replaced:
            counts = ", ".join(f"{count} {name}" for name, count in self.replaced.items())
            shared = f" ({self.shared} of them for other attentions too)" if self.shared else ""
            lines.append(f"  replaced {sum(self.replaced.values())} operators{shared}: {counts}")
        return lines


_EMPTY = {"mean": "the mean of all values", "nan": "NaN", "zeros": "zeros"}
_NORMALISE = {"sum": "scores divided by their sum", "none": "the scores themselves"}


@dataclass(frozen=True)
class CacheReport:
    """One state that keeps results between runs, and why that changes no result. ``kind`` as in ``CacheState``;
    ``size`` in bytes as a formula of the sizes, where ``length`` is the number of tokens seen."""

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
    ``undefined`` counts the elements where the reference is NaN, which are left out. ``expected`` says why the program
    must differ, such as weights in few bits: then any finite difference is fine, and it is shown.
    """

    absolute: float
    relative: float
    tolerance: float
    undefined: int = 0
    expected: str = ""

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance or (bool(self.expected) and self.relative < float("inf"))

    def words(self) -> str:
        """For people."""
        verdict = "ok"
        if self.relative > self.tolerance:
            verdict = f"above the tolerance of {self.tolerance:g}"
            verdict += f", which is expected: {self.expected}" if self.expected else ""
        undefined = f", {self.undefined} undefined elements left out" if self.undefined else ""
        return f"{self.absolute:.3g} absolute, {self.relative:.3g} relative: {verdict}{undefined}"


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
                float(d["absolute"]),
                float(d["relative"]),
                float(d["tolerance"]),
                int(d["undefined"]),
                str(d.get("expected", "")),
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
        lines += [f"  {line}" for a in self.attentions for line in a.lines()]
        if self.caches:
            lines.append(f"caches: {len(self.caches)}")
            for c in self.caches:
                size = f"{'at most ' if c.kind == 'ring' else ''}{c.size or '?'} bytes"
                lines.append(f"  {c.state} ({c.kind}): {c.type}, {size}; {c.proof}")
        if self.refusals:
            lines.append(f"refused: {len(self.refusals)}")
            lines += [f"  {r.what} at {r.node}: {r.reason}" for r in self.refusals]
        if self.differences:
            lines.append("largest differences from the model in float64:")
            lines += [f"  {name}: {d.words()}" for name, d in self.differences.items()]
        return "\n".join(lines) + "\n"


def attentions_of(graph: Graph, replaced: Iterable[Replaced] = ()) -> list[AttentionReport]:
    """Every ``attention`` node of a graph and its regions, in execution order. ``replaced`` is what the passes told."""
    known: dict[str, list[Replaced]] = {}
    for entry in replaced:
        known.setdefault(entry.node, []).append(entry)
    result = []
    for node in graph.walk():
        if node.op.name == "attention":
            entries = known.get(node.source)
            result.append(_attention(node, entries.pop(0) if entries else None))
    return result


def _attention(node: Node, replaced: Replaced | None) -> AttentionReport:
    q, k, v = node.operands[:3]
    mask, where, sink = node.attr("mask"), node.attr("where"), node.attr("sink")
    words = [mask.words()] if mask is not None else []
    words += [f"where {where}"] if where is not None else []
    loads = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    fixed = {name for name, x in loads.items() if x.constant is not None}
    score, scale, inner = node.attr("score"), float(node.attr("scale")), str(node.attr("inner"))
    return AttentionReport(
        node=node.source or str(node.output),
        heads=_size(q.type.shape[1]),
        kv_heads=_size(k.type.shape[1]),
        head_dim=_size(q.type.shape[3]),
        scale=scale,
        mask=mask.text if mask is not None else None,
        mask_words=" and ".join(words) or "none: every query sees every key",
        score=str(score),
        loads=tuple(loads),
        value_dim=_size(v.type.shape[3]),
        where=None if where is None else str(where),
        score_words=score_words(score, scale, fixed, "q·k" if inner == "q * k" else f"sum({inner})"),
        inner=inner,
        normalise=node.attr("normalise"),
        empty=node.attr("empty"),
        sink=None if sink is None else str(sink),
        weights=bool(node.attr("weights")),
        load_kinds={name: _kind(x) for name, x in loads.items()},
        replaced={} if replaced is None else dict(replaced.operators),
        shared=0 if replaced is None else replaced.shared,
    )


def _kind(value: Value) -> str:
    """What a tensor is: ``input attention_mask: int64[batch, seq]``, ``constant float32[4]``, ``computed by …``."""
    if value.constant is not None:
        return f"constant {value.type}"
    node = value.producer
    if node is None:
        return f"input {value.name}: {value.type}"
    return f"computed by {node.op.name}{f' at {node.source}' if node.source else ''}: {value.type}"


def _size(d: Dim) -> int | str:
    return d if isinstance(d, int) else str(d)
