"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_write_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[1], {})
    printed = capsys.readouterr().out
    assert re.search(r"attention\(.*score = \"30 \* tanh\(s / 30\) - slopes\[h\]", printed)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 2
