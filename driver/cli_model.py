"""The commands about models: ``attnc compile``, ``attnc inspect`` and ``attnc export``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from ..backends.base import Options
from ..ir import UsageError
from ..passes.quantise_weights import WEIGHT_TYPES
from . import artifact, pipeline
from .caching import CacheOptions
from .causality import describe_causality
from .cli_common import MODELS, common, emit, sizes_of
from .compile import compile_graph, extras
from .group import EXIT_CODES
from .inspect import describe, describe_artifact
from .join import joined
from .progress import progress_on_stderr
from .targets import find_backend

__all__ = ["compile_command", "export_command", "inspect_command"]

_EPILOG = f"{MODELS}\n\n{EXIT_CODES}"

_model = click.argument("model")
_target = click.option("--target", default="numpy", show_default=True, help="What to compile for.")
_time = click.option("--time", metavar="SIZE", help="The size that counts the tokens, where it cannot be told.")
_opset = click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset to write.")


@click.command("compile", epilog=EXIT_CODES)
@_model
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact, a folder.")
@_target
@click.option(
    "--cache/--no-cache", default=False, help="Run on new tokens alone; keep keys, values and other states, by proof."
)
@click.option("--all-logits", is_flag=True, help="With --cache: the logits of all new tokens, not of the last alone.")
@click.option("--max-length", type=click.IntRange(min=1), help="With --cache: make room for so many tokens at once.")
@click.option("--rings/--no-rings", default=True, help="With --cache: keep of a window what it can see; or all.")
@click.option("--tokens", metavar="INPUT", help="With --cache: the input that holds the tokens.")
@_time
@click.option(
    "--dtype", type=click.Choice(WEIGHT_TYPES), help="Store the weights in fewer bits; verify shows what it costs."
)
@click.option(
    "--calibrate", metavar="FILE", help="With --dtype int4 or mixed: a text to fit the rounding to, for decoders."
)
@click.option("--dequantise", is_flag=True, help="Compute dynamically quantised products in floats.")
@click.option("--encoder", metavar="FILE", help="A second model that computes inputs of MODEL; see --link.")
@click.option(
    "--link", "links", multiple=True, metavar="INPUT=OUTPUT",
    help="With --encoder: the input of MODEL that is an output, or an input, of it; may be repeated.",
)  # fmt: skip
@click.option("--tokenizer", metavar="FILE", help="The model's tokenizer.json, where it does not lie with it.")
@_opset
@click.option("--threads", type=click.IntRange(min=1), help="How many threads a run may use.")
@click.option("--arch", "arches", metavar="LIST", help="For cuda: the architectures; by default sm_80,sm_90.")
@click.option("--mcpu", metavar="NAME", help="For tvm-cpu: the processor, as LLVM names it (x86-64-v3); or this one.")
@click.option("--verify", is_flag=True, help="Compare with the model in float64; fail when they differ.")
@common
def compile_command(
    model: str,
    output: Path,
    target: str,
    cache: bool,
    all_logits: bool,
    max_length: int | None,
    rings: bool,
    tokens: str | None,
    time: str | None,
    dtype: str | None,
    calibrate: str | None,
    dequantise: bool,
    encoder: str | None,
    links: tuple[str, ...],
    tokenizer: str | None,
    opset: int | None,
    threads: int | None,
    arches: str | None,
    mcpu: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Compile MODEL into an artifact, and print the report."""
    artifact.check_output(output)
    progress = progress_on_stderr()
    caching = CacheOptions(all_logits, rings, time, tokens, max_length)
    source = model if encoder is None and not links else joined(model, encoder, links)
    beside = Path(model).with_name("tokenizer.json")
    if source is not model and tokenizer is None and beside.is_file():
        tokenizer = str(beside)
    options = Options(
        opset, threads, extras(dtype=dtype, mcpu=mcpu, arches=None if arches is None else arches.split(","))
    )
    program = compile_graph(source, target, cache, options, verify, progress, caching, dequantise, tokenizer, calibrate)
    with progress(f"writing {output}"):
        program.save(output)
    remarks = program.backend.remarks(output)
    emit(
        {"artifact": str(output), "target": target, "report": program.report.to_dict(), "remarks": remarks},
        "\n".join([f"{program.report.text()}written to {output} for {target}", *remarks]),
        as_json,
    )


@click.command("inspect", epilog=_EPILOG)
@_model
@click.option("--after", metavar="PASS", help=f"Print the graph after a pass: {', '.join(pipeline.pass_names())}.")
@click.option(
    "--cost", metavar="SIZES",
    help="Count multiply-adds and bytes: batch=1,seq=4096, or 'formulas' for expressions of the sizes.",
)  # fmt: skip
@click.option("--tiles", is_flag=True, help="Show which tiles of queries and keys each attention visits.")
@click.option("--diff", is_flag=True, help="Show the operators before and after the passes side by side.")
@click.option("--causality", is_flag=True, help="Say whether it can run step by step, or which node reads the future.")
@_time
@_target
@common
def inspect_command(
    model: str,
    after: str | None,
    cost: str | None,
    tiles: bool,
    diff: bool,
    causality: bool,
    time: str | None,
    target: str,
    as_json: bool,
) -> None:
    """Show what MODEL, or an artifact, is: sizes, operators, attentions; with --after the graph as text."""
    if causality:
        if after is not None or cost is not None or tiles or diff or artifact.is_artifact(Path(model)):
            raise UsageError("--causality is for a model, and stands alone")
        data, text = describe_causality(model, time, progress_on_stderr())
        emit(data, text, as_json)
        return
    sizes = None if cost is None else {} if cost == "formulas" else sizes_of(tuple(cost.split(",")))
    for option, given in (("--cost", sizes is not None), ("--tiles", tiles), ("--diff", diff)):
        if given and (after is not None or artifact.is_artifact(Path(model))):
            raise UsageError(f"{option} is for a model, without --after")
    if after is None and artifact.is_artifact(Path(model)):
        data, text = describe_artifact(Path(model))
    else:
        lowering = functools.partial(_lowering, target)
        data, text = describe(model, after, lowering, progress_on_stderr(), sizes, tiles, diff)
    emit(data, text, as_json)


def _lowering(target: str) -> tuple[tuple[str, Any], ...]:
    backend = find_backend(target)
    return pipeline.lowering(lambda node: backend.supports(node, Options()), backend.packs)


@click.command("export", epilog=_EPILOG)
@_model
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="FILE.onnx, or with --genai a folder."
)
@_opset
@click.option("--cache", is_flag=True, help="Write a decoder's step, its keys and values as inputs and outputs.")
@click.option("--padding", is_flag=True, help="Give the step attention_mask and position_ids; implies --cache.")
@click.option("--genai", is_flag=True, help="Write a folder that onnxruntime-genai runs; implies --cache.")
@click.option("--context-length", type=click.IntRange(min=1), help="How many tokens there may be.")
@click.option("--eos", type=click.IntRange(min=0), multiple=True, help="A token that ends the text; may be repeated.")
@click.option("--bos", type=click.IntRange(min=0), help="The token that begins a text.")
@click.option("--pad", type=click.IntRange(min=0), help="The token that pads rows.")
@click.option("--tokens", metavar="INPUT", help="The input that holds the tokens, where it cannot be told.")
@_time
@common
def export_command(
    model: str,
    output: Path,
    opset: int | None,
    cache: bool,
    padding: bool,
    genai: bool,
    context_length: int | None,
    eos: tuple[int, ...],
    bos: int | None,
    pad: int | None,
    tokens: str | None,
    time: str | None,
    as_json: bool,
) -> None:
    """Write MODEL as an ONNX file, or a decoder's step as other runtimes take it."""
    if (time or tokens) and not (cache or padding or genai):
        raise UsageError("--time and --tokens are for --cache, --padding and --genai")
    if not genai and (eos or bos is not None or pad is not None):
        raise UsageError("--eos, --bos and --pad are for --genai: an ONNX file has no place for them")
    if context_length is not None and not (genai or padding):
        raise UsageError("--context-length is for --genai and --padding")
    progress = progress_on_stderr()
    if not (cache or padding or genai):
        from .export import export_onnx

        export_onnx(model, output, opset, progress)
        emit({"file": str(output), "opset": opset}, f"written to {output}", as_json)
        return
    from ..backends.onnx.genai import GenaiOptions
    from .export_decoder import check_genai_folder, decoder_step, export_decoder, export_genai

    if genai:
        check_genai_folder(output)
    step = decoder_step(model, padding, context_length, None, time, tokens, progress)
    if genai:
        export_genai(step, output, GenaiOptions(context_length, eos, bos, pad), opset, progress)
    else:
        export_decoder(step, output, opset, progress)
    text = "\n".join([*step.notes, f"written to {output}"])
    emit({"folder" if genai else "file": str(output), "opset": opset, "notes": step.notes}, text, as_json)
