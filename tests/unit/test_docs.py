"""The documentation: short pages, links that lead somewhere, snippets of Python, an API reference in step."""

import re
from pathlib import Path

import pytest

import ddpopt
from ci import api_pages

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@EACH
def test_a_page_is_short(page: Path) -> None:
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= (900 if page.name == "README.md" else 1200)


@EACH
def test_each_link_into_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    targets = {(page.parent / file if file else page, heading) for file, heading in links}
    assert [file for file, _ in targets if not file.exists()] == []
    assert [(file, heading) for file, heading in targets if heading and heading not in _headings(file)] == []


def _headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@EACH
def test_each_snippet_is_python(page: Path) -> None:
    for snippet in SNIPPET.findall(page.read_text(encoding="utf-8")):
        compile(snippet, page.name, "exec")


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_each_make_target_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_api_reference_is_that_of_the_docstrings() -> None:
    stale = [file.name for file, text in api_pages.pages().items() if file.read_text("utf-8") != text]
    assert not stale, "docs/api is not up to date; run python -m ci.api_pages"


def test_the_snippet_on_plans_runs() -> None:
    (snippet,) = SNIPPET.findall((ROOT / "docs" / "formats.md").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    exec(snippet, names)
    assert isinstance(names.get("plan"), ddpopt.Plan)
