"""Public reports: the pages say what the corpus and the self-test say."""

from pathlib import Path
from typing import Any

import pytest

from tests.selftest import engines
from tests.support import program_reports, reports

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("maker", "name"),
    [(reports, "reports"), (program_reports, "program_reports"), (engines, "engine_reports")],
)
def test_a_page_of_reports_is_that_of_its_data(maker: Any, name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert text == maker.page(), f"run: python -m {maker.__name__} > docs/{name}.md"
