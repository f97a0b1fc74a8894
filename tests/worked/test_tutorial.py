"""The tutorial's pages are true: every block of Python runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorial"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, request: pytest.FixtureRequest) -> None:
    """With --update-golden, the printed texts are written into the page."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    namespace: dict[str, object] = {"__name__": page.stem}
    printed = ""
    shown: list[tuple[re.Match[str], str]] = []
    for block in blocks:
        if block[1] == "text":
            shown.append((block, printed))
            printed = ""
            continue
        assert not printed, f"{page.name}: no ```text block shows what a block prints:\n{printed}"
        line = text[: block.start()].count("\n") + 1
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * line + block[2], str(page), "exec"), namespace)
        printed = "".join(f"{part.rstrip()}\n" for part in out.getvalue().strip("\n").splitlines())
    assert not printed, f"{page.name}: no ```text block shows what the last block prints:\n{printed}"
    assert shown, f"{page.name} shows no output"
    if request.config.getoption("--update-golden"):
        for block, output in reversed(shown):
            text = text[: block.start(2)] + output + text[block.end(2) :]
        page.write_text(text, encoding="utf-8", newline="\n")
        return
    for block, output in shown:
        assert block[2] == output, f"{page.name}, line {text[: block.start()].count(chr(10)) + 1}"


def test_links_and_index() -> None:
    """Every page is in the table of contents, and every link leads somewhere."""
    for path in FOLDER.glob("*.md"):
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            assert (FOLDER / target).exists(), f"{path.name} links to {target}"
    index = LINK.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(index) == [page.name for page in PAGES]
