"""A program with a plan and an encoder half as an artifact, and ``attnc generate`` on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnc
from attnc.backends.base import Options
from attnc.driver import Program, Report
from attnc.driver.cli import cli
from attnc.driver.session import Session
from attnc.ir import ArtifactError
from attnc.tests.driver.decoders import Decoder, cached, full_graph, greedy, whole

ENC = {"enc_ids": np.array([[3, 4, 5, 6]]), "enc_mask": np.array([[True, True, True, False]])}
GIVEN = ("-i", "enc_ids=[[3, 4, 5, 6]]", "-i", "enc_mask=[[true, true, true, false]]")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    cached(Decoder(encoder=True)).save(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def run() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(cli, [str(a) for a in args])


def test_plan_and_encoder_come_back(out: Path) -> None:
    program, opened = cached(Decoder(encoder=True)), attnc.open(out)
    assert opened.plan == program.plan
    assert opened.prepare == program.prepare
    assert opened.graph == program.graph
    manifest = json.loads((out / "attnc.json").read_text())
    assert manifest["format"] == 1
    assert [s["name"] for s in manifest["states"]][:2] == ["0.cross.key", "0.cross.value"]
    assert manifest["prepare"]["inputs"] == [{"name": "enc_ids", "type": "int64[batch, enc]"}]
    assert manifest["plan"]["inputs"][0]["role"] == "ids"
    assert {"program.attnc", "prepare.attnc"} <= set(manifest["files"])
    with opened.session() as session:
        assert list(session.generate([1, 2], 9, ENC)) == greedy(full_graph(Decoder(encoder=True)), [1, 2], 9, **ENC)
    opened.save(out)  # over itself
    assert attnc.open(out).plan == program.plan


def test_artifacts_without_them(tmp_path: Path) -> None:
    whole(Decoder()).save(tmp_path / "plain")
    manifest = json.loads((tmp_path / "plain" / "attnc.json").read_text())
    assert not {"plan", "prepare"} & set(manifest)
    opened = attnc.open(tmp_path / "plain")
    assert (opened.plan, opened.prepare) == (None, None)
    assert list(opened.session().generate([1, 2], 5)) == greedy(full_graph(Decoder()), [1, 2], 5)


def test_altered(out: Path) -> None:
    (out / "prepare.attnc").write_text("graph @g() {\n  return\n}\n")
    with pytest.raises(ArtifactError, match=r"prepare\.attnc: it was altered"):
        attnc.open(out)


def test_a_backend_that_places_weights_builds_both_halves(tmp_path: Path, fake: str) -> None:
    made = cached(Decoder(encoder=True))
    program = Program(made.graph, made.source, fake, Options(opset=20), Report(), plan=made.plan, prepare=made.prepare)
    program.save(tmp_path / "out")
    files = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"parts/raw.bin", "parts/note.txt", "prepare/parts/raw.bin", "prepare/parts/note.txt"} <= files
    opened = attnc.open(tmp_path / "out")
    assert opened.prepare == made.prepare
    assert list(opened.session().generate([1, 2], 6, ENC)) == greedy(made.source, [1, 2], 6, **ENC)


# -- the command -----------------------------------------------------------------------------------------------


def test_generate_prints_tokens(out: Path, run: Callable[..., Result]) -> None:
    expected = greedy(full_graph(Decoder(encoder=True)), [1, 2], 9, **ENC)
    done = run("generate", out, "--prompt-ids", "1, 2", "-n", 9, *GIVEN)
    assert done.exit_code == 0, done.output
    assert done.stdout == " ".join(map(str, expected)) + "\n"
    assert done.stderr.startswith("9 tokens: the first after ")
    assert done.stderr.endswith(" tokens/s\n")
    done = run("generate", out, "--prompt-ids", "1,2", "-n", 1, *GIVEN)
    assert done.stdout == f"{expected[0]}\n"
    assert "tokens/s" not in done.stderr


def test_generate_prints_json(out: Path, run: Callable[..., Result]) -> None:
    expected = greedy(full_graph(Decoder(encoder=True)), [1, 2], 9, **ENC)
    at = next(k for k in range(1, 9) if expected[k] not in expected[:k])
    done = run("generate", out, "--prompt-ids", "1,2", "--stop", 99, "--stop", expected[at], "--json", *GIVEN)
    data = json.loads(done.stdout)
    assert data["ids"] == expected[: at + 1]
    assert 0 < data["first_token_seconds"] < 60
    assert data["tokens_per_second"] > 0
    pair = f"{expected[at - 1]},{expected[at]}"
    assert (
        json.loads(run("generate", out, "--prompt-ids", "1,2", "--stop", pair, "--json", *GIVEN).stdout)["ids"]
        == (expected[: at + 1])
    )


def test_generate_draws(out: Path, run: Callable[..., Result]) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_k": 9, "top_p": 0.95, "repetition_penalty": 1.5, "seed": 4}
    expected = list(attnc.open(out).session().generate([1, 2], 12, ENC, **options))
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = run("generate", out, "--prompt-ids", "1,2", "-n", 12, *flags, *GIVEN)
    assert done.stdout.split() == [str(token) for token in expected]
    assert expected != greedy(full_graph(Decoder(encoder=True)), [1, 2], 12, **ENC)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--prompt-ids", "1,x", *GIVEN), 2, "--prompt-ids takes token ids"),
        (("--prompt-ids", "", *GIVEN), 2, "--prompt-ids takes token ids"),
        (("--prompt-ids", "1", "--stop", "-3", *GIVEN), 2, "--stop takes token ids"),
        (("--prompt-ids", "1", "--top-p", "0", *GIVEN), 2, "--top-p"),
        (("--prompt-ids", "1"), 5, "give its inputs enc_ids"),
        (("--prompt-ids", "1", "-i", "nothing=[1]", *GIVEN), 5, "no input is called nothing"),
        (("--prompt-ids", ",".join("1" * 65), *GIVEN), 5, "65 tokens are more than the 64"),
    ],
)
def test_generate_says_what_is_wrong(
    out: Path, run: Callable[..., Result], args: tuple[str, ...], code: int, words: str
) -> None:
    done = run("generate", out, *args)
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stdout == ""


def test_generate_of_what_is_no_language_model(tmp_path: Path, run: Callable[..., Result]) -> None:
    attnc.compile(attnc.parse("graph @g(%x: float32[n]) {\n  %y = neg(%x): float32[n]\n  return y = %y\n}\n")).save(
        tmp_path / "g"
    )
    done = run("generate", tmp_path / "g", "--prompt-ids", "1")
    assert done.exit_code == 2
    assert "no input of token ids" in done.stderr


def test_what_came_before_an_error_stays(out: Path, run: Callable[..., Result]) -> None:
    done = run("generate", out, "--prompt-ids", ",".join("1" * 63), *GIVEN)
    assert done.exit_code == 5
    assert len(done.stdout.split()) == 2
    assert done.stdout.endswith("\n")
    assert done.stderr == (
        "error: 64 tokens seen and 1 new ones are more than the 64 that the model's table of positions holds\n"
    )


def test_ctrl_c(out: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Session, *args: Any, **options: Any) -> Iterator[int]:
        yield 3
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate", interrupted)
    done = run("generate", out, "--prompt-ids", "1,2", *GIVEN)
    assert done.exit_code == 130
    assert done.stdout == "3\n"
    assert done.stderr.strip() == "error: interrupted"


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise")
def test_tokens_come_one_by_one_until_ctrl_c(tmp_path: Path, environment: dict[str, str]) -> None:
    cached(Decoder(table=100_000)).save(tmp_path / "out")
    call = [sys.executable, "-m", "attnc", "generate", str(tmp_path / "out"), "--prompt-ids", "1,2", "-n", "99000"]
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert first.isdigit()
    assert rest.endswith(b"\n")
    assert len(rest.split()) < 99000
    assert (process.returncode, errors.strip()) == (130, b"error: interrupted")
