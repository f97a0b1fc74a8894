"""A decoder's steps as files that other runtimes run: ONNX, and beside it genai_config.json on request."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..backends.base import Options
from ..backends.onnx import MODEL_FILE
from ..backends.onnx.genai import CONFIG_FILE, GenaiOptions, genai_config
from ..ir import Graph, UsageError
from ..ir.cacheplan import CachePlan
from . import pipeline
from .caching import CacheOptions, add_cache
from .export_inputs import add_padding_inputs, name_inputs
from .folder import check_replaceable, new_folder
from .load import load
from .program import Program
from .report import Report
from .targets import find_backend

__all__ = ["DecoderStep", "check_genai_folder", "decoder_step", "export_decoder", "export_genai"]

Source = Graph | Program | str | os.PathLike[str]
"""What ``load`` takes, or a program, which is exported from the model that it was compiled from."""


@dataclass(frozen=True)
class DecoderStep:
    """The step graph under the names that others know, its plan, and what was done for padding, in words."""

    graph: Graph
    plan: CachePlan
    notes: list[str] = field(default_factory=list)


def decoder_step(
    source: Source,
    padding: bool = False,
    context_length: int | None = None,
    all_logits: bool | None = None,
    time: str | None = None,
    tokens: str | None = None,
    progress: pipeline.Progress = pipeline.silent,
) -> DecoderStep:
    """The step of a causal model for others: every cache holds all tokens, and the names are theirs.

    With ``padding`` it has the inputs ``attention_mask`` and ``position_ids``, so that rows may be padded on the left;
    ``context_length`` is how many positions there may be where the model does not say. The scores are those of the
    last token, or with ``all_logits`` of every new one; by default that is with ``padding``, under which a row may end
    before the others. ``time`` and ``tokens`` are as in ``CacheOptions``. Raises UsageError for a model that others
    could not run, and what ``add_cache`` raises for one that is not causal.
    """
    with progress("reading the model"):
        graph = (source.source if isinstance(source, Program) else load(source)).copy()
    first = pipeline.run(graph, pipeline.OPTIMISE, progress=progress)
    with progress("inserting the cache"):
        everything = padding if all_logits is None else all_logits
        cached = add_cache(first.graph, CacheOptions(everything, False, time, tokens, latents=False), Report())
    if cached.prepare is not None:
        raise UsageError(
            f"{graph.name} reads other inputs before its first token (an encoder's, or states of one): other runtimes "
            "take it as several files, which are not written here"
        )
    step, plan = name_inputs(cached.step, cached.plan)
    notes: list[str] = []
    if padding:
        with progress("adding the inputs for padding"):
            step, plan, notes = add_padding_inputs(step, plan, context_length)
    pipeline.run(step, ())  # verifies
    return DecoderStep(step, plan, notes)


def export_decoder(
    step: DecoderStep,
    path: str | os.PathLike[str],
    opset: int | None = None,
    progress: pipeline.Progress = pipeline.silent,
) -> None:
    """Writes the step as the ONNX file ``path``, its large constants beside it. Raises as ``export_onnx`` does."""
    from ..backends.onnx import export_onnx as write
    from ..backends.onnx.writer import DEFAULT_OPSET

    backend = find_backend("onnx")
    backend.check()
    options = Options(opset)
    lowered = pipeline.run(
        step.graph.copy(), pipeline.lowering(lambda node: backend.supports(node, options)), progress=progress
    )
    with progress(f"writing {os.fspath(path)}"):
        write(lowered.graph, path, DEFAULT_OPSET if opset is None else opset)


def check_genai_folder(path: Path) -> None:
    """Raises OutputError when the folder ``path`` holds what an earlier export did not write."""
    check_replaceable(path, _foreign)


def _foreign(path: Path) -> str | None:
    own = {MODEL_FILE, f"{MODEL_FILE}.data", CONFIG_FILE}
    extra = sorted(p.name for p in path.iterdir() if p.name not in own or p.is_dir())
    return f"it holds {extra[0]}, which no export wrote" if extra else None


def export_genai(
    step: DecoderStep,
    folder: str | os.PathLike[str],
    options: GenaiOptions,
    opset: int | None = None,
    progress: pipeline.Progress = pipeline.silent,
) -> Sequence[str]:
    """Writes the step and its genai_config.json into ``folder``, whole or not at all; gives the files' names.

    Raises UsageError where onnxruntime-genai could not run it, and OutputError for a folder that holds anything else.
    """
    config = genai_config(step.graph, step.plan, options, MODEL_FILE)
    with new_folder(Path(folder), _foreign) as made:
        export_decoder(step, made / MODEL_FILE, opset, progress)
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        (made / CONFIG_FILE).write_text(text, encoding="utf-8")
        return sorted(p.name for p in made.iterdir())
