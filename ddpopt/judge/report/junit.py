"""A verdict as JUnit XML, which every CI system can show: a suite for each case, a test for each trial.

Invariant: wrong is a failure, broken an error, refused or not possible a skip with its reason.
"""

import re

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from junitparser.junitparser import FinalResult

from ddpopt.judge.report.wording import level_name, sentence
from ddpopt.judge.verdict import Status, Trial, Verdict

RESULTS: dict[Status, type[FinalResult]] = {
    Status.WRONG: Failure,
    Status.BROKEN: Error,
    Status.REFUSED: Skipped,
    Status.NOT_POSSIBLE: Skipped,
}
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot represent; a message may contain terminal colors."""


def junit_xml(verdict: Verdict) -> str:
    """Write a verdict as JUnit XML.

    Args:
        verdict: what to write.

    Returns:
        An XML document, with its declaration.
    """
    document = JUnitXml(_allowed(verdict.target))
    suites = dict[str, TestSuite]()
    for case in dict.fromkeys(trial.case for trial in verdict.trials):
        suites[case] = TestSuite(_allowed(case))
        for name, value in {"world_size": str(verdict.world_size), **verdict.environment}.items():
            suites[case].add_property(_allowed(name), _allowed(value))
    for trial in verdict.trials:
        suites[trial.case].add_testcase(_test(trial))
    for suite in suites.values():
        document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]  # of junitparser
    text = document.tostring()  # type: ignore[no-untyped-call]  # of junitparser
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + (text if isinstance(text, str) else text.decode())


def _test(trial: Trial) -> TestCase:
    """A test, with all findings in one failure: most readers show only the first of several."""
    name = trial.name.removeprefix(f"{trial.case}: ")
    test = TestCase(_allowed(name), _allowed(trial.case), round(trial.seconds, 3))
    if trial.status in RESULTS:
        lines = [f"{level_name(found.level)}: {found.claim}: {sentence(found)}" for found in trial.findings]
        lines = lines or [trial.reason]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        result = RESULTS[trial.status](_allowed(f"{lines[0]}{more}"), trial.status)
        result.text = _allowed("\n".join(lines))
        test.result = [result]
    if trial.remarks:
        test.system_out = _allowed("\n".join(trial.remarks))
    return test


def _allowed(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
