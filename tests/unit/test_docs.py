"""The README and the pages: short, Python that parses, links and make targets that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
LANGUAGES = {"python", "bash", "text", "yaml", "diff", "{eval-rst}", "{toctree}", "{include}"}
"""A command in a block of another kind would not be run (tests/integration/test_pages.py)."""


@EACH
def test_a_page_is_short(page: Path) -> None:
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= (900 if page.name == "README.md" else 1200)


@EACH
def test_each_block_says_what_it_is_and_python_parses(page: Path) -> None:
    blocks = re.findall(r"^```(\S*).*?\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert {kind for kind, _ in blocks} <= LANGUAGES
    for snippet in [text for kind, text in blocks if kind == "python"]:
        compile(snippet, page.name, "exec")


@EACH
def test_what_a_page_links_and_what_it_has_make_do_exists(page: Path) -> None:
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)  # headings are looked up by `make docs`
    targets = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert {*targets} <= {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
