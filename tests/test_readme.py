"""The README's Python runs as it stands."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = attnc.load(f"{README.parent / 'examples' / 'gpt2.py'}:model")
    attnc.export_onnx(graph, tmp_path / "model.onnx")
    names = {"ids": np.array([[1, 2, 3]])}
    exec(BLOCKS[0], names)
    assert (tmp_path / "again.onnx").exists()
    assert list(names["outputs"]) == ["logits"]


def test_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are those that the full model gives when it is run again for each."""
    monkeypatch.chdir(tmp_path)
    graph = attnc.load(f"{README.parent / 'examples' / 'gpt2.py'}:model")
    attnc.export_onnx(graph, tmp_path / "decoder.onnx")
    wanted = [1, 2, 3]
    limit = 24
    for _ in range(limit):
        logits = attnc.evaluate(graph, {"input_ids": np.array([wanted])})["logits"]
        wanted.append(int(logits[0, -1].argmax()))
    monkeypatch.setattr(attnc.Session, "generate", functools.partialmethod(_generate, limit=limit))
    exec(BLOCKS[1], {"attnc": attnc})
    assert [int(line) for line in capsys.readouterr().out.split()] == wanted[3:]


def _generate(session: Any, ids: Any, max_new_tokens: int, limit: int) -> Any:
    """The README asks for more tokens than the small example has positions."""
    return GENERATE(session, ids, min(max_new_tokens, limit))


GENERATE = attnc.Session.generate


def test_write_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[2], {})
    printed = capsys.readouterr().out
    assert re.search(r"attention\(.*score = \"30 \* tanh\(s / 30\) - slopes\[h\]", printed)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 3
