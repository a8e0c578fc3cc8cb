"""The page of public reports: which case stands for which, what torch does with it, what ddpopt does.

Invariant: the page is made of the corpus alone, so it says what the tests hold: ``python -m
ddpopt.cases.reports_page > docs/reports.md`` writes it.
"""

import re
from collections.abc import Iterator

from ddpopt.cases.case import Case
from ddpopt.cases.corpus import cases
from ddpopt.cases.report_of_case import Ask, Report

__all__ = ["WITHOUT_CASE", "page", "reported_cases"]

WITHOUT_CASE = {
    104088: "a regression of nightly builds on GPUs, closed without a reproduction",
}
"""Reports on the list that have no case, and why."""

HEAD = (
    "# Public reports against compiled DDP\n\n"
    "Each row is an issue or pull request in pytorch/pytorch, and the case of the corpus that reproduces it "
    "on CPU and gloo. **wrong** means that the case still fails or loses its overlap with torch 2.13's "
    "optimizer. ddpopt is right on all of them; the last column says what the multi-rank tests check besides "
    "gradients. `python -m ddpopt.cases.reports_page` writes this page.\n\n"
    "A *piece* is a graph that is compiled on its own. A bucket is *early* if it is sent before the last "
    "compiled backward ends.\n\n"
    "| report, case | what happened upstream | torch 2.13 | ddpopt |\n"
    "|---|---|---|---|\n"
)
ANSWERS: dict[Ask, str] = {
    "compiled": "compiled",
    "one piece": "one piece (inline)",
    "overlap": "at least half early",
    "aligned": "all but the last early",
    "recompiles": "nothing compiled after the second step",
    "products": "no product computed again that was to be kept",
}


def reported_cases() -> tuple[tuple[Case, Report], ...]:
    """Return the cases that stem from a report, with it.

    Returns:
        Pairs, by the number of the report.
    """
    pairs = [(case, case.report) for case in cases() if case.report is not None]
    return tuple(sorted(pairs, key=lambda pair: pair[1].number))


def page() -> str:
    """Return the page of public reports.

    Returns:
        Markdown, with a line end at its end.
    """
    return HEAD + "\n".join(_rows()) + "\n\n" + "\n".join(_reasons()) + "\n"


def _rows() -> Iterator[str]:
    for case, report in reported_cases():
        upstream = (
            f"{report.upstream}. *Here: {report.nearest}.*" if report.nearest else f"{report.upstream}."
        )
        cells = (
            f"{_link(report.number)} `{case.name}`",
            upstream,
            ("" if report.torch_passes else "**wrong**: ") + _with_terms(report),
            ", ".join(ANSWERS[ask] for ask in report.asks),
        )
        yield f"| {' | '.join(cells)} |"


def _with_terms(report: Report) -> str:
    """What torch did, and how it was asked where that is out of the ordinary."""
    terms = [f"`{name}={value!r}`" for name, value in report.settings.items()]
    terms += [] if report.backend == "aot_eager" else [report.backend]
    terms += [] if report.wrap == "DDP" else [report.wrap]
    says = report.torch_says.replace(", gradients as eager", "").replace("compiles ", "")
    says = re.sub(r"sends (\d+ of \d+) buckets during backward", r"\1 early", says)
    return says + (f" ({', '.join(terms)})" if terms else "")


def _reasons() -> Iterator[str]:
    yield "Without a case:"
    yield ""
    for number, reason in WITHOUT_CASE.items():
        yield f"- {_link(number)}: {reason}."


def _link(number: int) -> str:
    return f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
