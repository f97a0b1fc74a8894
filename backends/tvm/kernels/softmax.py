"""What distinguishes one attention from another: score, condition, sink, and what a query without keys gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from ....ir.expr import Expr, parse
from ....ir.ops.attention import SCORE
from ..spec import Kernel, Read
from .emit import number, same
from .exprs import Lowering
from .scalar import exp_nonpositive, wide
from .tree import Scope, store

__all__ = ["Variant"]


class Variant:
    """The expressions of an attention kernel, and the loads that they read: the trees behind the first three."""

    def __init__(self, kernel: Kernel, scope: Scope) -> None:
        self.scope = scope
        self.kernel = kernel
        self.dtype = wide(kernel.option("dtype"))
        self.score = parse(kernel.option("score"))
        self.where = _parsed(kernel.option("where"))
        self.sink = _parsed(kernel.option("sink"))
        self.softmax = kernel.option("normalise") == "softmax"
        self.is_plain = self.score == SCORE and self.where is None
        self.empty = kernel.option("empty")
        self.loads = dict(zip(kernel.option("loads"), kernel.trees[3:], strict=False))

    def sizes(self, n: Any, m: Any) -> dict[str, Any]:
        """The sizes by the names that expressions have for them."""
        named = {name: self.scope.size(size) for name, size in self.kernel.option("names")}
        return {**named, "n": n, "m": m}

    def load(self, name: str, index: Sequence[Any]) -> Any:
        tree = self.loads[name]
        assert isinstance(tree, Read)
        return self.scope.load(tree, index)

    def lowering(self, names: Mapping[str, Any]) -> Lowering:
        return Lowering(names, self.load, self.dtype)

    def scored(self, names: Mapping[str, Any]) -> tuple[Any, Any | None]:
        """The score of ``names["s"]``, and whether the condition with loads holds (None where there is none)."""
        lowering = self.lowering(names)
        return lowering.number(self.score), None if self.where is None else lowering.condition(self.where)

    def lone(self, names: Mapping[str, Any], peak: Any, scope: Scope, out: Read, m: Any) -> None:
        """Of a query that has seen no key: NaN, or the mean of all values, written over what its row has."""
        if self.empty == "zeros":
            return
        emit, dtype = scope.emit, self.dtype
        place = [names["b"], names["h"], names["i"]]
        target = scope.pointers[out.pointer]
        with emit.when(same(peak, -tirx.infinity(dtype))), emit.loop(scope.size(out.shape[3]), name="x") as x:
            if self.empty == "nan":
                value: Any = tirx.infinity(dtype) - tirx.infinity(dtype)
            else:
                held = self.kernel.trees[2 if self.kernel.kind == "attention" else -1]
                assert isinstance(held, Read)
                mean = emit.local(dtype, 1, "mean")
                emit.store(mean, 0, tirx.const(0.0, dtype))
                group = tirx.floordiv(names["h"], number(self.kernel.option("repeat")))
                with emit.loop(m, name="j") as j:
                    emit.store(mean, 0, mean[number(0)] + scope.load(held, [names["b"], group, j, x]))
                value = mean[number(0)] / tirx.Cast(dtype, m)
            store(emit, target, scope.flat(out, [*place, x]), value, out.dtype)

    def factor(self, names: Mapping[str, Any], peak: Any, total: Any, dtype: str) -> Any:
        """What the weighted sum of a row is multiplied by."""
        one, zero = tirx.const(1.0, dtype), tirx.const(0.0, dtype)
        how = self.kernel.option("normalise")
        if how == "none":
            return one
        if self.sink is not None:
            sink = self.lowering(names).number(self.sink)
            minus = -tirx.infinity(dtype)
            top = tirx.max(peak, sink)
            safe = tirx.Select(same(top, minus), zero, top)
            inner = exp_nonpositive(peak - safe, dtype)
            total = total * inner + exp_nonpositive(sink - safe, dtype)
            return inner / tirx.Select(same(total, zero), one, total)
        return one / tirx.Select(same(total, zero), one, total)


def _parsed(text: str | None) -> Expr | None:
    return None if text is None else parse(text)
