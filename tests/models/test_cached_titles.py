"""A trained encoder–decoder of two files, dynamically quantised: refused a cache; dequantised, a title by steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import attnc
from attnc.driver.join import join
from attnc.ir import DType, Graph, evaluate
from attnc.passes.insert_cache import LeakError
from attnc.tests.models.test_packages import FILES, fetched

pytestmark = pytest.mark.slow

FILES.setdefault(
    "tokenizer",
    (
        "traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/tokenizer.json",
        "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
    ),
)
LOG = "summarize agent step: git status; git diff; git commit -m 'fix parser'; git push origin main"
LINKS = {"encoder_hidden_states": "last_hidden_state", "encoder_attention_mask": "attention_mask"}


@cache
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_file(str(fetched("tokenizer")))
    found.no_truncation()
    return found


def prompt() -> dict[str, np.ndarray[Any, Any]]:
    ids = np.array([tokenizer().encode(LOG).ids])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_the_quantised_decoder_is_refused_at_the_node_that_ties_its_tokens() -> None:
    with pytest.raises(LeakError, match=r"DynamicQuantizeLinear\): takes one scale over positions 0 … .*dequantise"):
        attnc.compile(fetched("decoder"), cache=True)


def dequantised(path: Path) -> Graph:
    return attnc.compile(path, dequantise=True).source


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
def test_the_title_of_a_log(target: str) -> None:
    both = join(attnc.load(fetched("encoder")), attnc.load(fetched("decoder")), LINKS)
    with attnc.compile(both, target, cache=True, dequantise=True).session() as session:
        tokens = list(session.generate([0], 20, feeds=prompt(), stop=1))
    assert tokenizer().decode(tokens) == "Fix parser for diff and push origin"
    states = attnc.compile(fetched("encoder"), target, dequantise=True).session().run(prompt())["last_hidden_state"]
    feeds = {"encoder_hidden_states": states, "encoder_attention_mask": prompt()["attention_mask"]}
    with attnc.compile(fetched("decoder"), target, cache=True, dequantise=True).session() as session:
        assert list(session.generate([0], 20, feeds=feeds, stop=1)) == tokens


def test_a_later_token_changes_no_row_once_the_rounding_is_gone() -> None:
    graph = dequantised(fetched("decoder"))
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": rng.integers(3, 30000, (1, 6)),
        "encoder_hidden_states": rng.normal(size=(1, 4, 512)).astype(np.float32),
        "encoder_attention_mask": np.ones((1, 4), np.int64),
    }
    before = evaluate(graph, feeds, DType.FLOAT64)["logits"]
    changed = {**feeds, "input_ids": feeds["input_ids"].copy()}
    changed["input_ids"][:, -1] += 1
    assert np.array_equal(evaluate(graph, changed, DType.FLOAT64)["logits"][:, :-1], before[:, :-1])
