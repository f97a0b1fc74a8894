"""A program compared with its model, which is evaluated in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..ir import AttncError, DType, Graph, Value, VerifyError, evaluate
from ..ir.evaluate import check_feeds
from ..ir.operator import Array
from .feeds import cases
from .perplexity import Perplexity
from .report import Difference
from .session import Session

__all__ = ["TOLERANCES", "Verification", "compare", "tolerances", "references", "verify_program"]

TOLERANCES = {DType.FLOAT64: 1e-9, DType.FLOAT32: 1e-4, DType.FLOAT16: 2e-2, DType.BFLOAT16: 1e-1}
"""The largest relative difference by the coarsest float dtype that an output is computed in."""


@dataclass
class Verification:
    """The largest difference per output over all cases, and the sizes that were tried."""

    differences: dict[str, Difference]
    cases: list[dict[str, int]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Sizes that the model itself does not run with, with the reason."""
    perplexity: Perplexity | None = None
    """What the program makes of a text, where that was asked for or differences are expected."""

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences.values())

    def add(self, name: str, difference: Difference) -> None:
        """Notes a difference of an output; the worst counts."""
        before = self.differences.get(name)
        self.differences[name] = difference if before is None else _worse(before, difference)

    def expect(self, reason: str) -> None:
        """States why the program must differ, so that finite differences are no fault."""
        self.differences = {name: replace(d, expected=reason) for name, d in self.differences.items()}

    def check(self) -> None:
        """Raises VerifyError that names the outputs that differ too much."""
        bad = [
            f"{name} by {d.relative:.3g} (tolerance {d.tolerance:g})"
            for name, d in self.differences.items()
            if not d.ok
        ]
        if bad:
            raise VerifyError(f"the program differs from the model: {', '.join(bad)}")


def verify_program(
    session: Session,
    source: Graph,
    feeds: Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Verification:
    """Runs both on ``feeds``, or on random inputs at a few sizes. Sizes that the model itself fails at (a table of
    positions may be short) are skipped; raises the model's error when none is left."""
    allowed = tolerances(source)
    result = Verification({})
    given = [({}, check_feeds(source, feeds))] if feeds is not None else cases(source, sizes or {}, seed)
    for _, (chosen, arrays), reference in references(source, given, result):
        session.reset()
        found = session.run(arrays)
        result.cases.append(dict(chosen))
        for name, wanted in reference.items():
            result.add(name, compare(found[name], wanted, allowed[name] if tolerance is None else tolerance))
    return result


Case = tuple[dict[str, int], dict[str, Array]]
"""Sizes, and feeds of these sizes."""


def references(
    source: Graph, given: Iterable[Case], result: Verification
) -> Iterator[tuple[int, Case, dict[str, Array]]]:
    """The cases, numbered, with what the model gives in float64; those that it fails at are noted as skipped. Raises
    the model's error when none is left."""
    failure: AttncError | None = None
    ran = False
    for number, (chosen, arrays) in enumerate(given):
        try:
            reference = evaluate(source, arrays, precision=DType.FLOAT64)
        except AttncError as error:
            failure = error
            result.skipped.append(f"{_show(chosen)}: {error}")
            continue
        ran = True
        yield number, (chosen, arrays), reference
    if failure is not None and not ran:
        raise failure


def tolerances(graph: Graph) -> dict[str, float]:
    """For each output what may be lost to rounding: 0 when no float is computed on the way to it."""
    level: dict[Value, float] = {}
    for node in graph.nodes:
        read = max((level.get(value, 0.0) for value in node.operands), default=0.0)
        for value in node.outputs:
            level[value] = max(read, TOLERANCES.get(value.dtype, 0.0))
    return {output.name: level.get(output.value, 0.0) for output in graph.outputs}


def _show(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no sizes"


def _worse(a: Difference, b: Difference) -> Difference:
    """The worse of two, and all undefined elements."""
    return Difference(max(a.absolute, b.absolute), max(a.relative, b.relative), a.tolerance, a.undefined + b.undefined)


def compare(found: Array, reference: Array, tolerance: float) -> Difference:
    """The largest difference between two arrays. Infinite when the shapes differ, when one is NaN or another infinity
    where the reference is a number; elements where the reference is NaN say nothing and are counted."""
    if found.shape != reference.shape:
        return Difference(np.inf, np.inf, tolerance)
    wanted = reference.astype(np.float64)
    got = found.astype(np.float64)
    defined = ~np.isnan(wanted)
    undefined = int(wanted.size - np.count_nonzero(defined))
    got, wanted = got[defined], wanted[defined]
    if not wanted.size:
        return Difference(0.0, 0.0, tolerance, undefined)
    with np.errstate(invalid="ignore"):
        gap = np.where(got == wanted, 0.0, np.abs(got - wanted))
    gap = np.where(np.isnan(gap), np.inf, gap)
    absolute = float(gap.max())
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = float(finite.max()) if finite.size else 0.0
    relative = absolute / scale if scale else (absolute and np.inf)
    return Difference(absolute, float(relative), tolerance, undefined)
