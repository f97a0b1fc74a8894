"""The inputs and outputs of a step graph as other runtimes know them.

Hugging Face's ``generate`` and onnxruntime-genai know a decoder by names: ``input_ids``, ``attention_mask`` for all
tokens seen and new, ``position_ids`` for the new ones, and ``logits``. What a file lacks of the two in the middle they
do not feed, and then rows of one length are served alone; docs/interop.md has the facts.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import DType, Graph, Node, TensorType, UsageError, Value, symbol, symbols
from ..ir.affine import dim_expr
from ..ir.cacheplan import CachePlan, TimeInput
from ..ir.expr import Call, Const, Load, Var
from .export_order import counts_by_order, why_not_moved
from .export_positions import add_position_ids, counting_nodes

__all__ = ["IDS", "LOGITS", "MASK", "POSITIONS", "add_attention_mask", "add_padding_inputs", "name_inputs"]

IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"

_NAMES = {"ids": IDS, "mask": MASK, "positions": POSITIONS}


def name_inputs(graph: Graph, plan: CachePlan) -> tuple[Graph, CachePlan]:
    """A copy with the inputs and the output of scores called as others call them.

    Raises UsageError when two inputs have one role, or no output can be the scores.
    """
    graph = graph.copy()
    names = {}
    for role, name in _NAMES.items():
        found = [i.name for i in plan.inputs if i.role == role]
        if len(found) > 1:
            raise UsageError(f"the inputs {', '.join(found)} are all {role}: others know one, called {name}")
        names.update(dict.fromkeys(found, name))
    for old, new in names.items():
        _rename(graph, graph.value(old), new)
    scores = scores_of(graph, plan)
    outputs = {o.name: o.name for o in graph.outputs} | {scores: LOGITS}
    for output in graph.outputs:
        if output.name == LOGITS and scores != LOGITS:
            raise UsageError(f"the output {LOGITS} is not the scores of the next token, which are {scores}")
        output.name = outputs[output.name]
    inputs = tuple(replace(i, name=names.get(i.name, i.name)) for i in plan.inputs)
    return graph, replace(plan, inputs=inputs, outputs=tuple(replace(o, name=outputs[o.name]) for o in plan.outputs))


def _rename(graph: Graph, value: Value, name: str) -> None:
    """Gives an input a name, taking it from another value."""
    holder = graph.values.get(name)
    if holder is value:
        return
    if holder is not None and holder in graph.inputs:
        raise UsageError(f"the graph has an input {name} already, which is not what others mean by it")
    if holder is not None:
        graph.rename(holder, f"{name}.value")
    graph.rename(value, name)


def scores_of(graph: Graph, plan: CachePlan) -> str:
    """The output that holds the scores of the next token: [batch, tokens, vocabulary], floats."""
    along = {o.name for o in plan.outputs}
    types = {o.name: o.value.type for o in graph.outputs if o.name in along}
    found = [name for name, type in types.items() if type.rank == 3 and type.dtype.is_float]
    if LOGITS in found:
        return LOGITS
    if len(found) != 1:
        shown = ", ".join(f"{name}: {type}" for name, type in types.items()) or "none"
        raise UsageError(f"one output must be the scores [batch, tokens, vocabulary]; those along time are: {shown}")
    return found[0]


def add_padding_inputs(graph: Graph, plan: CachePlan, length: int | None = None) -> tuple[Graph, CachePlan, list[str]]:
    """A copy with ``attention_mask`` and ``position_ids``, where it has none of its own and they have a meaning, and
    what was done about each, in words. ``length`` is how many positions there may be, where the plan does not say.

    Rows of a batch may then be padded on the left. Raises UsageError that names the node or state when padding cannot
    be told from tokens there.
    """
    graph, notes = graph.copy(), []
    _check_moves(graph, plan)
    roles = {i.role for i in plan.inputs}
    if "mask" not in roles:
        plan = add_attention_mask(graph, plan)
        notes.append(f"{MASK} added: a key counts where it is not 0")
    ordered = [node for node in _over_tokens(graph, plan) if counts_by_order(node)]
    if ordered:
        notes.append(
            f"pad on the left only: {len(ordered)} of the attentions, the first at {ordered[0].source or 'a node'}, "
            "count keys by their order (a window or a bias), and padding between tokens would count too"
        )
    if "positions" in roles:
        return graph, plan, notes
    try:
        plan, changed = add_position_ids(graph, plan, POSITIONS, length)
    except UsageError as error:
        if not plan.padding:
            raise
        changed = []
        notes.append(f"{POSITIONS} not added, and padding on the left needs none: {error}")
    else:
        notes.append(
            f"{POSITIONS} added: {', '.join(changed)} looked up at them"
            if changed
            else f"{POSITIONS} not added: outside attention no position is counted by tokens alone"
        )
    return graph, plan, notes


def add_attention_mask(graph: Graph, plan: CachePlan) -> CachePlan:
    """Adds ``attention_mask: int64[batch, past + new]`` to the graph itself: every attention over tokens leaves out
    the keys where it is 0. Raises UsageError where something else brings tokens together."""
    for state in plan.states:
        if state.kind not in ("append", "ring", "fixed"):
            raise UsageError(
                f"rows cannot be padded: the state {state.name} of {state.node or 'a layer'} has taken all tokens in "
                f"({state.kind}), and a mask of keys cannot take padding out again. Export without padding"
            )
    _check_only_attention_mixes(graph, plan)
    if any(i.whole and i.role == "ids" for i in plan.inputs):
        raise UsageError("rows cannot be padded: the model reads all token ids anew at every step")
    total = symbol(plan.past) + symbol(plan.time)
    batch = symbol(plan.batch) if plan.batch else graph.value(_ids(plan)).shape[0]
    if MASK in graph.values:
        graph.rename(graph.value(MASK), f"{MASK}.value")
    mask = graph.add_input(MASK, TensorType(DType.INT64, (batch, total)))
    for node in _over_tokens(graph, plan):
        keys = node.operands[1].shape[2]
        name = _free_name(node)
        place = Var("j") + dim_expr(total - keys) if total != keys else Var("j")
        seen = Call("not_equal", (Load(name, (Var("b"), place)), Const(0)))
        where = node.attr("where")
        attrs = dict(node.attrs) | {
            "where": seen if where is None else Call("and", (where, seen)),
            "loads": (*node.attr("loads"), name),
        }
        with graph.insert_before(node):
            made = graph.add(
                node.op, *node.inputs, mask, attrs=attrs, types=[v.type for v in node.outputs], source=node.source
            )
        for old, new in zip(node.outputs, made, strict=True):
            graph.replace_uses(old, new)
        graph.remove(node)
    return replace(plan, inputs=(*plan.inputs, TimeInput(MASK, 1, "mask", True)))


def _over_tokens(graph: Graph, plan: CachePlan) -> list[Node]:
    """The attentions whose keys are the decoder's tokens, not those of another sequence."""
    sizes = {plan.time} | _pasts(graph, plan)
    return [n for n in graph.nodes if n.op.name == "attention" and symbols(n.operands[1].shape[2]) & sizes]


def _check_moves(graph: Graph, plan: CachePlan) -> None:
    """Raises UsageError for an attention that padding on the left would change."""
    counting = counting_nodes(graph)
    for node in _over_tokens(graph, plan):
        moving = {v: v.constant is None and v.producer not in counting for v in node.operands[3:]}
        reason = why_not_moved(node, moving)
        if reason:
            raise UsageError(
                f"rows cannot be padded: the attention at {node.source or node.op.name} depends on where its tokens "
                f"stand: {reason}. Export without padding"
            )


def _ids(plan: CachePlan) -> str:
    found = next((i.name for i in plan.inputs if i.role == "ids"), None)
    if found is None:
        raise UsageError("the model has no input of token ids, so others cannot run it as a decoder")
    return found


def _pasts(graph: Graph, plan: CachePlan) -> set[str]:
    """The sizes along which states hold tokens."""
    found = {plan.past}
    for state in plan.states:
        if state.time_axis is not None and state.name in graph.states:
            found |= symbols(graph.states[state.name].type.shape[state.time_axis])
    return found


def _free_name(node: Node) -> str:
    name, number = "padding", 1
    while name in node.attr("loads"):
        name, number = f"padding_{number}", number + 1
    return name


_KEEPS = frozenset({"state_append", "state_read", "state_write", "concat", "slice", "reshape"})
"""Operators that only put tokens behind one another, provided that the result still has them all."""


def _check_only_attention_mixes(graph: Graph, plan: CachePlan) -> None:
    """Raises UsageError for a node that brings kept tokens together and is no attention.

    That is enough: a step of one token equals the full model, so nothing passes from one token to another but through
    what is kept.
    """
    pasts = _pasts(graph, plan)
    kept: set[Value] = set()
    for node in graph.nodes:
        if node.op.name == "attention" or not (node.op.name.startswith("state_") or kept & set(node.operands)):
            continue
        rules = node.op.locality(node)
        moves = node.op.name in _KEEPS and all(_mentions(v, pasts) for v in node.outputs)
        for position, value in enumerate(node.inputs):
            if moves or value is None or not _mentions(value, pasts):
                continue
            axes = (None,) * value.type.rank if rules is None else rules[position]
            if any(axis is None and symbols(d) & pasts for d, axis in zip(value.shape, axes, strict=True)):
                raise UsageError(
                    f"rows cannot be padded: {node.source or node.op.name} ({node.op.name}) brings the tokens of "
                    f"{value} together, where no mask reaches. Export without padding"
                )
        kept.update(v for v in node.outputs if _mentions(v, pasts))


def _mentions(value: Value, names: set[str]) -> bool:
    return any(symbols(d) & names for d in value.shape)
