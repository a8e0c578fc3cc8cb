"""Public reports: the page says what the corpus says."""

from pathlib import Path

from tests.reports import page

PAGE = Path(__file__).parents[3] / "docs" / "reports.md"


def test_the_page_of_reports_is_that_of_the_corpus() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.reports > docs/reports.md"
