"""Which input holds the tokens, and how many of them the model's tables of positions allow."""

from __future__ import annotations

from ..ir import Graph, Node, UsageError, Use, Value
from ..ir.polynomials import polynomial
from .timing import Kind, TimingAnalysis

__all__ = ["longest", "token_input"]


def token_input(graph: Graph, analysis: TimingAnalysis, wanted: str | None = None) -> Value | None:
    """The input of the tokens' numbers: ``wanted``, the only integer input along time, or the one of several that looks
    up a table and is no mask, position or type by name. None for a model that takes vectors. Raises UsageError."""
    along = [v for v in graph.inputs if analysis[v].axes]
    if wanted is not None:
        found = [v for v in along if v.name == wanted]
        if not found:
            raise UsageError(
                f"no input along {analysis.time} is called {wanted}; they are: {', '.join(v.name for v in along)}"
            )
        return found[0]
    numbers = [v for v in along if v.dtype.is_integer]
    if len(numbers) > 1:
        looked_up = [v for v in numbers if any(_looks_up(use) for use in v.uses)]
        numbers = looked_up or numbers
    if len(numbers) > 1:
        other = ("mask", "position", "type", "segment")
        numbers = [v for v in numbers if not any(word in v.name.lower() for word in other)]
    if len(numbers) > 1:
        names = ", ".join(v.name for v in numbers)
        raise UsageError(f"{graph.name}: any of {names} could be the tokens; name one (the option --tokens)")
    return numbers[0] if numbers else None


def _looks_up(use: Use) -> bool:
    return (use.node.op.name, use.position) in (("gather", 1), ("quantised_gather", 0))


def longest(graph: Graph, analysis: TimingAnalysis) -> int | None:
    """The most tokens for which every position that is looked up in a stored table lies in it; None without one."""
    found: list[int] = []
    for node in graph.nodes:
        if node.op.name == "slice":
            found += _cut_table(analysis, node.operands[0], node)
        if node.op.name != "gather":
            continue
        table, indices = node.operands
        rows = table.shape[node.attr("axis") % table.type.rank]
        if (
            analysis[table].kind is not Kind.STATIC
            or analysis[indices].kind is not Kind.POSITION
            or not isinstance(rows, int)
        ):
            continue
        terms = polynomial(analysis.elements.element(indices))
        plain = {} if terms is None else {m: c for m, c in terms.items() if m}
        axes = {f"x{a.axis}" for a in analysis[indices].axes}
        if terms is not None and len(plain) == 1:
            ((names, step),) = plain.items()
            if len(names) == 1 and names[0] in axes and step > 0:
                found.append((rows - 1 - int(terms.get((), 0))) // int(step) + 1)
    return min(found, default=None)


def _cut_table(analysis: TimingAnalysis, table: Value, node: Node) -> list[int]:
    """A stored table that is cut to the length."""
    if analysis[table].axes:
        return []
    found = []
    for axis in analysis[node.output].axes:
        rows = table.shape[axis.axis]
        start = node.attr("starts")[node.attr("axes").index(axis.axis)]
        if isinstance(rows, int) and isinstance(start, int):
            found.append(rows - start)
    return found
