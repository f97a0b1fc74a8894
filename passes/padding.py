"""Whether rows of different lengths may be padded on the left: each row then gives what it gives alone.

Padding moves a row's tokens to later positions. That changes nothing where positions count only by their differences
(causal masks and windows, ALiBi, relative biases, rotary queries against rotary keys: Su et al. 2021, equation 16) or
are counted from the mask, and where no token reads the padding.
"""

from __future__ import annotations

from ..ir import Expr, Node, Value
from ..ir.affine import Domain
from ..ir.expr import Call, Const, Load, Var, loads, substitute, variables
from ..ir.simplify import Simplifier
from .cache_attention import shifted
from .causal_attention import LengthFree, length_free
from .timing import Kind, TimingAnalysis

__all__ = ["allows_padding"]


def allows_padding(analysis: TimingAnalysis, mask: Value | None) -> bool:
    """Whether rows padded on the left, with 0 in ``mask`` there, give what they give alone."""
    if mask is None:
        return False
    attentions = [n for n in analysis.graph.nodes if n.op.name == "attention" and analysis[n.operands[1]].axes]
    return all(_moves(analysis, node, mask) for node in attentions) and all(
        _is_relative(analysis, node, mask) for node in analysis.graph.nodes if node not in attentions
    )


def _moves(analysis: TimingAnalysis, node: Node, mask: Value) -> bool:
    """Whether an attention hides masked keys, and is the same when queries and keys move together."""
    free = length_free(analysis, node)
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    hides = any(_hides(part, tensors, mask) for part in _conjuncts(free.expressions.get("where")))
    return hides and node.attr("empty") != "nan" and _same_when_moved(analysis, free, tensors, node)


def _conjuncts(e: Expr | None) -> list[Expr]:
    if e is None:
        return []
    if isinstance(e, Call) and e.fn == "and":
        return [*_conjuncts(e.args[0]), *_conjuncts(e.args[1])]
    return [e]


def _hides(e: Expr, tensors: dict[str, Value], mask: Value) -> bool:
    """``mask[b, j] != 0``, or the mask itself where it is boolean."""
    match e:
        case Call("not_equal", (Load() as load, Const(value))) if value == 0:
            pass
        case Call("greater", (Load() as load, Const(value))) if value == 0:
            pass
        case Load() as load:
            pass
        case _:
            return False
    return tensors[load.tensor] is mask and load.index[-1] == Var("j")


def _same_when_moved(analysis: TimingAnalysis, free: LengthFree, tensors: dict[str, Value], node: Node) -> bool:
    if free.mask is not None and not shifted(free.mask, {"i": 1, "j": 1}).same_set(free.mask):
        return False
    shape = {"i": node.operands[0].shape[2], "j": node.operands[1].shape[2]}
    simplify = Simplifier(Domain(shape), lambda name: tensors[name].dtype if name in tensors else None)
    for e in free.expressions.values():
        kept = _without_tokens(analysis, e, tensors)
        apart = substitute(kept, {"j": Var("i") - Var("behind") + Var("ahead")})  # a key by its distance
        if "i" in variables(simplify(apart)):
            return False
    return True


def _without_tokens(analysis: TimingAnalysis, e: Expr, tensors: dict[str, Value]) -> Expr:
    """Loads at the query or the key move with it: they stand as variables of their own."""
    if isinstance(e, Load) and analysis[tensors[e.tensor]].kind is Kind.CAUSAL:
        return Var(f"token_{e.tensor}_{'_'.join(str(x) for x in e.index if isinstance(x, Var))}")
    if isinstance(e, Load):
        return Load(e.tensor, tuple(_without_tokens(analysis, x, tensors) for x in e.index))
    if isinstance(e, Call):
        return Call(e.fn, tuple(_without_tokens(analysis, x, tensors) for x in e.args))
    return e


def _is_relative(analysis: TimingAnalysis, node: Node, mask: Value) -> bool:
    """Whether a node other than attention gives the same to tokens that have moved."""
    kind = analysis[node.outputs[0]].kind
    if kind not in (Kind.CAUSAL, Kind.LAST):
        return True
    if mask in node.operands and node.op.name not in (
        "cumsum",
        "cast",
        "not_equal",
        "greater",
        "reshape",
        "mul",
        "sub",
    ):
        return False
    if node.op.name in ("cumsum", "cumprod") and not _counts(node.operands[0], mask):
        return False
    given = [v for v in node.operands if analysis[v].kind is Kind.POSITION]
    if not given or all(_is_uniform(analysis, v) for v in given):
        return node not in analysis.rules or node.op.name in ("cumsum", "cumprod")
    return node.op.name == "rope" and all(_turns_with(user, node) for user in node.output.users)


def _counts(value: Value, mask: Value) -> bool:
    """Whether a value is the mask itself, so that padding adds nothing to its sum."""
    while value is not mask:
        node = value.producer
        if node is None or node.op.name not in ("cast", "reshape"):
            return False
        value = node.operands[0]
    return True


def _is_uniform(analysis: TimingAnalysis, value: Value) -> bool:
    """Whether a value of positions is the same at all of them."""
    element = analysis.elements.element(value)
    return not loads(element) and all(f"x{a.axis}" not in str(element) for a in analysis[value].axes)


def _turns_with(attention: Node, rope: Node) -> bool:
    """Whether a rotation meets its like alone: query and key of one attention, both rotated by the same tables."""
    if attention.op.name != "attention" or rope.output in attention.operands[2:]:
        return False
    q, k = (v.producer for v in attention.operands[:2])
    both = q is not None and k is not None and q.op.name == k.op.name == "rope"
    return both and q.operands[1:] == k.operands[1:] and q.attrs == k.attrs  # type: ignore[union-attr]
