"""How results are shown: as text, and as JUnit XML, HTML and Markdown.

In: a `Verdict`. Out: text, and the files that were requested. Invariant: every word can be reproduced from
the verdict's JSON, and the text is the same in every terminal and file.
"""

from ddpopt.judge.verdict import Verdict
from ddpopt.terminal.files import step_summary, write_page


def write_report(file: str, verdict: Verdict, headline: str, text: str) -> None:
    """Write a report of a verdict.

    Args:
        file: the file to write. The report is appended to the file that GitHub sets for a step's summary.
        verdict: what was found.
        headline: the same in one line.
        text: the same for people.

    Raises:
        UsageError: it cannot be written.
    """
    write_page(file, lambda suffix: _page(suffix, verdict, headline, text))


def _page(suffix: str, verdict: Verdict, headline: str, text: str) -> str:
    # each needs a library that the others do not
    if suffix == ".xml":
        from ddpopt.judge.report.junit import junit_xml

        return junit_xml(verdict)
    if suffix == ".html":
        from ddpopt.judge.report.html import html_page

        return html_page(verdict)
    return step_summary(headline, text, verdict.exit_code)
