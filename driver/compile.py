"""From a model to a program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..backends.base import Options
from ..ir import Array, Graph, ModelError, Node, UsageError, Value
from ..passes.quantise_weights import MIXED, STORED, WEIGHT_TYPES
from . import pipeline
from .caching import CacheOptions, add_cache
from .calibrate import calibration_ids, second_moments
from .find_words import read_words, words_or_reason
from .load import load
from .program import Program
from .report import Report, attentions_of
from .targets import find_backend
from .weights import large_tensors

__all__ = ["compile", "compile_graph", "extras"]


def compile(
    source: Graph | str | os.PathLike[str],
    target: str = "numpy",
    cache: bool = False,
    opset: int | None = None,
    threads: int | None = None,
    verify: bool = False,
    *,
    all_logits: bool = False,
    max_length: int | None = None,
    rings: bool = True,
    time: str | None = None,
    tokens: str | None = None,
    dequantise: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    mcpu: str | None = None,
    arches: Sequence[str] | None = None,
    calibrate: str | os.PathLike[str] | Sequence[int] | None = None,
) -> Program:
    """Compiles a graph, or whatever ``load`` takes, for a target. The graph given is not changed.

    With ``cache`` the program runs on new tokens alone and keeps what it needs of those before, which is proved to give
    the same; LeakError says at which node a model reads the future. The options from ``all_logits`` to ``tokens`` are
    those of ``CacheOptions``. ``dequantise`` computes dynamically quantised products in floats, with the weights of the
    model: then no rounding ties its tokens together. ``tokenizer`` is the tokenizer.json of the model, where it does
    not lie with it. ``dtype`` stores the weights in float16, bfloat16, int8, mixed or int4
    (``passes/quantise_weights.py``); ``verify`` then shows what that costs. "stored" keeps those of a GGUF file in the
    blocks that the file has them in. ``calibrate``, a text file or token ids, fits the rounding to 4 bits to what the
    products of a decoder meet there (at most 2048 tokens).
    ``mcpu`` names the processor that tvm-cpu compiles for as LLVM does, such as x86-64-v3; by default the one at hand.
    ``arches`` are the GPU architectures that the target cuda compiles for, ``("sm_80", "sm_90")`` unless given.
    ``opset`` is the ONNX opset of targets that write ONNX, ``threads`` how many a run may use; None leaves the choice
    to the backend. With ``verify`` the program is compared with the model in float64, and VerifyError raised when
    they differ. Raises UsageError for options that do not exist, TargetError when the backend cannot work here, and
    ModelError for a model that is wrong or has what the target lacks.
    """
    caching = CacheOptions(all_logits, rings, time, tokens, max_length)
    options = Options(opset, threads, extras(dtype=dtype, mcpu=mcpu, arches=None if arches is None else list(arches)))
    return compile_graph(
        source, target, cache, options, verify,
        caching=caching, dequantise=dequantise, tokenizer=tokenizer, calibrate=calibrate,
    )  # fmt: skip


def compile_graph(
    source: Graph | str | os.PathLike[str],
    target: str,
    cache: bool = False,
    options: Options | None = None,
    verify: bool = False,
    progress: pipeline.Progress = pipeline.silent,
    caching: CacheOptions | None = None,
    dequantise: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | Sequence[int] | None = None,
) -> Program:
    """``compile`` with all options of a backend, and with progress shown."""
    options, caching = options or Options(), caching or CacheOptions()
    _check_cache_options(cache, caching)
    if caching.max_length is not None:
        options = replace(options, extra={**options.extra, "max_length": caching.max_length})
    numbers = (("opset", options.opset), ("threads", options.threads), ("max_length", caching.max_length))
    for name, value in numbers:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    dtype = options.extra.get("dtype")
    if dtype is not None and dtype not in WEIGHT_TYPES:
        raise UsageError(f"weights are stored in {', '.join(WEIGHT_TYPES)}, not in {dtype!r}")
    if calibrate is not None and dtype not in ("int4", MIXED):
        raise UsageError("a text to calibrate with is for weights in 4 bits: compile with dtype='int4' (--dtype int4)")
    backend = find_backend(target)
    foreign = sorted(set(options.extra) - {"dtype", "max_length"} - backend.extras)
    if foreign:
        raise UsageError(f"the target {target} has no option {foreign[0]}: leave it out")
    with progress(f"checking {target}"):
        backend.check()
    with progress("reading the model"):
        words, wordless = words_or_reason(source) if tokenizer is None else (read_words(Path(tokenizer)), "")
        model = load(source, caching.max_length, dtype == STORED)
        if dequantise:  # the model that the program is compared with is the one without the rounding
            model = pipeline.run(model.copy(), pipeline.DEQUANTISE).graph
        graph = model.copy()
        _check_data(graph)
    first = pipeline.run(graph, pipeline.OPTIMISE, progress=progress)
    report = Report(
        attentions=attentions_of(first.graph, first.replaced),
        operators_before=model.operator_counts(),
        notes=dict(first.notes),
    )
    graph, plan, prepare = first.graph, None, None
    ids = None if calibrate is None else calibration_ids(calibrate, words)
    if cache:
        with progress("insert-cache"):
            cached = add_cache(graph, caching, report)
        graph, plan, prepare = cached.step, cached.plan, cached.prepare

    def moments(graph: Graph) -> Mapping[Value, Array]:
        if prepare is not None:
            raise UsageError("a text to calibrate with is for decoders without an encoder; leave it out (--calibrate)")
        with progress(f"calibrating with {len(ids or ())} tokens"):
            return second_moments(graph, plan, ids or ())

    def lower(graph: Graph) -> Graph:
        def supports(node: Node) -> bool:
            return backend.supports(node, options)

        mixed = backend.packs and dtype == MIXED  # then only what has as many bits goes side by side
        passes = pipeline.lowering(supports, backend.packs and not mixed)
        if dtype is not None:
            passes += pipeline.quantising(dtype, supports, None if ids is None else moments, mixed)
        passes += pipeline.JOIN_OFFSETS if backend.joins_offsets else ()
        lowered = pipeline.run(graph, passes, progress=progress)
        for name, notes in lowered.notes.items():  # of both halves, where there is an encoder's
            report.notes[name] = [*report.notes.get(name, []), *notes]
        report.add_refusals(lowered.refusals)
        return lowered.graph

    report.add_refusals(first.refusals)
    graph, prepare = lower(graph), None if prepare is None else lower(prepare)
    report.operators_after = graph.operator_counts()
    original = model.copy() if model is source else model
    if wordless:
        report.notes["words"] = [wordless]
    program = Program(
        graph, original, target, options, report, None, backend,
        plan=plan, prepare=prepare, words=words, wordless=wordless,
    )  # fmt: skip
    if verify:
        with progress("comparing with the model in float64"):
            program.verify().check()
    return program


def extras(**given: object) -> dict[str, object]:
    """The options that were given, of those that not every backend has."""
    return {name: value for name, value in given.items() if value is not None}


def _check_cache_options(cache: bool, options: CacheOptions) -> None:
    given = [name for name, value in vars(options).items() if value != getattr(CacheOptions(), name)]
    if given and not cache:
        raise UsageError(f"{given[0]} is an option of a cache: compile with cache=True")


def _check_data(graph: Graph) -> None:
    """Raises ModelError when the text of a graph was read without the data of its large constants."""
    missing = [tensor for tensor in large_tensors(graph) if tensor.is_missing]
    if missing:
        raise ModelError(
            f"the graph {graph.name} has {len(missing)} constants that are known by digest only, the first a "
            f"{missing[0].type}: text does not hold large constants. Compile the original model, or an artifact"
        )
