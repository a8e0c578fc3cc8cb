"""A verdict as JUnit XML, which every CI system can show: a suite for each case, a test for each trial.

Invariant: what is wrong is a failure, what broke an error, what is not possible here a skip with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from junitparser.junitparser import FinalResult

from ddpopt.judge.report.wording import level_name, sentence
from ddpopt.judge.verdict import Status, Trial, Verdict

FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write; a message may hold colours of a terminal."""


def junit_xml(verdict: Verdict) -> str:
    """Write a verdict as JUnit XML.

    Args:
        verdict: what to write.

    Returns:
        An XML document, with its declaration.
    """
    document = JUnitXml(_allowed(verdict.target))
    cases: dict[str, list[Trial]] = {}
    for trial in verdict.trials:
        cases.setdefault(trial.case, []).append(trial)
    for case, trials in cases.items():
        suite = TestSuite(_allowed(case))
        suite.add_property("world_size", str(verdict.world_size))
        for name, value in verdict.environment.items():
            suite.add_property(_allowed(name), _allowed(value))
        suite.add_testcases([_test(trial) for trial in trials])
        document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]  # of junitparser
    text = document.tostring()  # type: ignore[no-untyped-call]  # of junitparser
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + (text if isinstance(text, str) else text.decode())


def _test(trial: Trial) -> TestCase:
    name = trial.name.removeprefix(f"{trial.case}: ")
    test = TestCase(_allowed(name), _allowed(trial.case), round(trial.seconds, 3))
    test.result = list(_results(trial))
    if trial.notes:
        test.system_out = _allowed("\n".join(trial.notes))
    return test


def _results(trial: Trial) -> Iterator[FinalResult]:
    if trial.status is Status.WRONG:
        yield from _failures(trial)
    elif trial.status is Status.BROKEN:
        yield _result(Error, trial.reason, "broken", trial.reason)
    elif trial.status is Status.NOT_POSSIBLE:
        yield _result(Skipped, trial.reason, "not possible", "")


def _failures(trial: Trial) -> Iterator[FinalResult]:
    """One failure with all findings: most readers show only the first of several."""
    lines = [f"{level_name(found.level)}: {found.claim}: {sentence(found)}" for found in trial.findings]
    lines = lines or [trial.reason]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    levels = dict.fromkeys(found.level for found in trial.findings)
    yield _result(Failure, f"{lines[0]}{more}", " ".join(levels) or "wrong", "\n".join(lines))


def _result(kind: type[FinalResult], message: str, type_: str, text: str) -> FinalResult:
    result = kind(_allowed(message), type_)
    if text:
        result.text = _allowed(text)
    return result


def _allowed(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
