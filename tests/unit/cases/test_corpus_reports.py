"""Public reports: each on the list has a case or a reason, and the page says what the corpus says."""

from pathlib import Path

from tests.reports import WITHOUT_CASE, page, reported_cases

PAGE = Path(__file__).parents[3] / "docs" / "reports.md"
LISTED = (
    *(108966, 109774, 140416, 196227, 160745, 178765, 140395, 104674, 137481, 113812, 108235),
    *(116292, 140229, 111636, 118984, 111279, 128034, 88460, 111794, 104088, 93672, 109261),
    *(128218, 113809, 100239, 92941, 93378, 169461, 178364, 121640, 169026, 147123, 130935),
)


def test_each_report_on_the_list_has_one_case_or_a_reason_why_it_has_none() -> None:
    numbers = [report.number for _, report in reported_cases()]
    assert sorted([*numbers, *WITHOUT_CASE]) == sorted(LISTED)


def test_the_page_of_reports_is_that_of_the_corpus() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.reports > docs/reports.md"
