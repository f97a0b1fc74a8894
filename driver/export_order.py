"""Attention that counts tokens by their order in a row, and what padding on the left does to that.

Padding moves a row's queries and keys alike. An attention whose mask and scores say the same of queries and keys that
have moved together gives each row what it gives alone: causal masks, windows, biases by distance. So does a bias that
is linear in the position (ALiBi, Press et al. 2022): moving adds one number to a query's scores, and a softmax takes
that out again.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Expr, MaskSet, Node, SymDim, Value, symbols
from ..ir.affine import Domain
from ..ir.expr import Call, Const, Load, Var, substitute, variables
from ..ir.simplify import Simplifier
from ..passes.cache_attention import shifted

__all__ = ["counts_by_order", "why_not_moved"]

_PLACES = frozenset({"i", "j"})
_APART = {"j": Var("i") - Var("behind") + Var("ahead")}
"""A key by its distance from the query: any whole number as a difference of two sizes."""


def counts_by_order(node: Node) -> bool:
    """Whether an attention looks at the places of query and key in other ways than that a key must not come later."""
    q, k = node.operands[0].shape[2], node.operands[1].shape[2]
    where = node.attr("where")
    if any(_is_placed(e) for e in (node.attr("score"), node.attr("inner"), where, node.attr("sink")) if e is not None):
        return True
    mask: MaskSet | None = node.attr("mask")
    if mask is None or mask.is_all:
        return False
    sizes = sorted(symbols(k - q)) if isinstance(k - q, SymDim) else []
    causal = MaskSet(f"[{', '.join(sizes)}] -> {{ [b, h, i, j] : j <= i + ({k - q}) }}")
    return not (mask.same_set(causal) or mask.same_set(MaskSet("j <= i + m - n")))


def why_not_moved(node: Node, moving: Mapping[Value, bool]) -> str:
    """Why an attention may give something else to queries and keys that have moved together; empty when it gives the
    same. ``moving`` says of what it loads whether it belongs to tokens and moves with them."""
    if node.attr("empty") == "nan":
        return "a query that sees no key gives NaN, as one among padding would"
    mask: MaskSet | None = node.attr("mask")
    if mask is not None and not shifted(mask, {"i": 1, "j": 1}).same_set(mask):
        return f"its mask is {mask.text}"
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    domain = Domain({"i": node.operands[0].shape[2]})
    simplify = Simplifier(domain, lambda name: tensors[name].dtype if name in tensors else None)
    data = {name for name, value in tensors.items() if moving[value]}
    softmax = node.attr("normalise") == "softmax" and node.attr("sink") is None
    for what in ("where", "score", "inner", "sink"):
        e = node.attr(what)
        if e is None:
            continue
        terms = _terms(e) if what == "score" and softmax else [e]
        for term in [_with_tokens(term, data) for term in terms]:
            linear = what == "score" and softmax and "s" not in variables(term) and _is_linear(term)
            if not linear and "i" in variables(simplify(substitute(term, _APART))):
                return f"its {what} is {e}"
    return ""


def _is_placed(e: Expr) -> bool:
    """Whether an expression mentions i or j outside of loads."""
    if isinstance(e, Var):
        return e.name in _PLACES
    return isinstance(e, Call) and any(_is_placed(part) for part in e.args)


def _with_tokens(e: Expr, data: set[str]) -> Expr:
    """Loads of tokens' data at the query or the key, which move with it, as variables of their own."""
    if isinstance(e, Load):
        if e.tensor in data and all(x in (Var("i"), Var("j")) or not variables(x) & _PLACES for x in e.index):
            return Var("token_" + "_".join([e.tensor, *(x.name for x in e.index if isinstance(x, Var))]))
        return Load(e.tensor, tuple(_with_tokens(x, data) for x in e.index))
    if isinstance(e, Call):
        return Call(e.fn, tuple(_with_tokens(x, data) for x in e.args))
    return e


def _terms(e: Expr) -> list[Expr]:
    """What is added up."""
    if isinstance(e, Call) and e.fn in ("add", "sub"):
        return [*_terms(e.args[0]), *_terms(e.args[1])]
    return [e]


def _is_linear(e: Expr) -> bool:
    """Whether an expression is a + b * i or a + b * j, a and b the same for all queries and keys."""
    if not variables(e) & _PLACES:
        return not any(name.startswith("token_") for name in variables(e))
    match e:
        case Var():
            return True
        case Call(fn="add" | "sub", args=(x, y)):
            return _is_linear(x) and _is_linear(y)
        case Call(fn="mul", args=(x, y)):
            return (_is_linear(x) and _is_fixed(y)) or (_is_fixed(x) and _is_linear(y))
        case Call(fn="div", args=(x, y)):
            return _is_linear(x) and _is_fixed(y)
        case Call(fn="neg", args=(x,)):
            return _is_linear(x)
    return False


def _is_fixed(e: Expr) -> bool:
    return isinstance(e, Const) or not (
        variables(e) & _PLACES or any(name.startswith("token_") for name in variables(e))
    )
