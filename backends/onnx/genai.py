"""``genai_config.json``, by which onnxruntime-genai runs a decoder (https://onnxruntime.ai/docs/genai/reference/config).

Everything about the file is read off the graph: names, layers, heads, widths, the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir import DType, Graph, State, UsageError
from ...ir.cacheplan import CachePlan
from .writer import past_name, present_name

__all__ = ["CONFIG_FILE", "GenaiOptions", "genai_config"]

CONFIG_FILE = "genai_config.json"

_MODEL_TYPE = "decoder"
"""The type that onnxruntime-genai has for a decoder of no particular family."""

_FED = {"ids": "input_ids", "mask": "attention_mask", "positions": "position_ids"}
"""What onnxruntime-genai calls the inputs that it feeds, by their role."""


_KINDS = ("key", "value")

_KEY_OR_VALUE = re.compile(r"(\d+)\.(key|value)")


_NO_TOKEN = -1
"""A padding token that no prompt holds."""


@dataclass(frozen=True)
class GenaiOptions:
    """What no graph tells: how many tokens there may be (None: what the plan says), and the ids of special tokens.

    Generation ends at each of ``eos``; without one it ends at the length asked for. onnxruntime-genai takes a ``pad``
    at the end of a prompt for padding, even when it was meant, so by default no token is one. ``bos`` is only told.
    """

    context_length: int | None = None
    eos: Sequence[int] = ()
    bos: int | None = None
    pad: int | None = None


def genai_config(graph: Graph, plan: CachePlan, options: GenaiOptions, filename: str = "model.onnx") -> dict[str, Any]:
    """The configuration for the step graph ``graph`` in the file ``filename``.

    Raises UsageError that names the input, state or output which onnxruntime-genai could not feed or read: it feeds
    token ids, an attention mask and positions, and keys and values that grow, all layers of one shape.
    """
    inputs = _inputs(graph, plan)
    layers, heads, width = _caches(graph, plan)
    pasts = {f"past_{what}_names": _template(past_name, what) for what in _KINDS}
    presents = {f"present_{what}_names": _template(present_name, what) for what in _KINDS}
    logits, vocabulary = _logits(graph, plan)
    length = options.context_length if options.context_length is not None else plan.max_length
    if length is None:
        raise UsageError("onnxruntime-genai needs a context length, and nothing in the model limits it: give one")
    if length < 1 or (plan.max_length is not None and length > plan.max_length):
        raise UsageError(f"the context length must be from 1 to {plan.max_length or 'any number'}, not {length}")
    special = [("eos", t) for t in options.eos] + [("bos", options.bos), ("pad", options.pad)]
    for what, token in special:
        if token is not None and not 0 <= token < vocabulary:
            raise UsageError(f"the {what} token {token} is not one of the {vocabulary} of the vocabulary")
    return {
        "model": {
            "type": _MODEL_TYPE,
            "bos_token_id": _NO_TOKEN if options.bos is None else options.bos,
            "eos_token_id": options.eos[0] if len(options.eos) == 1 else list(options.eos),
            "pad_token_id": _NO_TOKEN if options.pad is None else options.pad,
            "context_length": length,
            "vocab_size": vocabulary,
            "decoder": {
                "filename": filename,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "num_hidden_layers": layers,
                "num_attention_heads": _query_heads(graph) or heads,
                "num_key_value_heads": heads,
                "head_size": width,
                "inputs": inputs | pasts,
                "outputs": {"logits": logits} | presents,
            },
        },
        "search": {
            "do_sample": False,
            "max_length": length,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            # The file puts new keys behind the old ones in a tensor of its own.
            "past_present_share_buffer": False,
        },
    }


def _template(name: Callable[[str], str], what: str) -> str:
    """The names of all layers' keys or values, with %d for the layer."""
    return name(f"0.{what}").replace("0", "%d")


def _inputs(graph: Graph, plan: CachePlan) -> dict[str, str]:
    roles = {i.name: i for i in plan.inputs}
    found: dict[str, str] = {}
    for value in graph.inputs:
        role = roles[value.name].role if value.name in roles else "other"
        if role not in _FED or _FED[role] in found:
            raise UsageError(
                f"onnxruntime-genai feeds token ids, an attention mask and positions: it would not feed {value.name}"
            )
        if value.dtype not in (DType.INT32, DType.INT64) or value.type.rank != 2:
            raise UsageError(f"onnxruntime-genai feeds int32 or int64 [batch, tokens]; {value.name} is {value.type}")
        if role == "mask" and not roles[value.name].whole:
            raise UsageError(f"onnxruntime-genai feeds a mask of all tokens; {value.name} takes one of the new ones")
        found[_FED[role]] = value.name
    if "input_ids" not in found:
        raise UsageError("onnxruntime-genai feeds token ids, and the model has no input for them")
    typed = {value.dtype for value in graph.inputs if roles[value.name].role in ("mask", "positions")}
    if len(typed) > 1:
        raise UsageError("onnxruntime-genai feeds a mask and positions of one type, and here they differ")
    return found


def _caches(graph: Graph, plan: CachePlan) -> tuple[int, int, int]:
    """How many layers have keys and values, and the heads and the width of each, the same for all."""
    kinds = {state.name: state.kind for state in plan.states}
    shapes: set[tuple[int, int]] = set()
    for state in graph.states.values():
        kind = kinds.get(state.name, "fixed")
        if not _KEY_OR_VALUE.fullmatch(state.name) or kind != "append":
            raise UsageError(
                f"onnxruntime-genai keeps keys and values that grow by every token; the state {state.name} is of "
                f"another kind ({kind}), which it would not feed{'; keep all keys of its window' * (kind == 'ring')}"
            )
        shapes.add(_heads_and_width(state))
    layers = len(graph.states) // 2
    if not layers or {f"{n}.{what}" for n in range(layers) for what in _KINDS} != set(graph.states):
        raise UsageError("onnxruntime-genai keeps keys and values of layers 0, 1, …; compile the model with a cache")
    if len(shapes) != 1:
        shown = ", ".join(f"{h} heads of {w}" for h, w in sorted(shapes))
        raise UsageError(f"onnxruntime-genai keeps keys and values of one shape, and here they have {shown}")
    return layers, *next(iter(shapes))


def _heads_and_width(state: State) -> tuple[int, int]:
    shape = state.type.shape
    if len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int):
        return shape[1], shape[3]
    raise UsageError(f"onnxruntime-genai keeps [batch, heads, tokens, width]; the state {state.name} is {state.type}")


def _query_heads(graph: Graph) -> int:
    """The most heads that an attention has; 0 where none is left as one operator."""
    heads = [node.operands[0].shape[1] for node in graph.nodes if node.op.name == "attention"]
    return max((h for h in heads if isinstance(h, int)), default=0)


def _logits(graph: Graph, plan: CachePlan) -> tuple[str, int]:
    """The output of scores, and how many tokens it has one for."""
    along = {o.name for o in plan.outputs}
    found = [o for o in graph.outputs if o.name in along and o.value.type.rank == 3 and o.value.dtype.is_float]
    named = [o for o in found if o.name == "logits"] or found
    size = named[0].value.shape[2] if len(named) == 1 else None
    if not isinstance(size, int):
        raise UsageError(
            "onnxruntime-genai reads scores [batch, tokens, vocabulary] from one output; the outputs are "
            f"{', '.join(f'{o.name}: {o.value.type}' for o in graph.outputs)}"
        )
    return named[0].name, size
