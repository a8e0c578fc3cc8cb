"""JUnit XML: what a CI system reads back is what the verdict said."""

from dataclasses import replace

from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite

from ddpopt.judge.report.junit import junit_xml
from ddpopt.judge.report.wording import sentence
from ddpopt.judge.verdict import Verdict
from tests.support import verdicts
from tests.support.verdicts import broken_trial, impossible_trial, verdict, wrong_trial


def suites(made: Verdict) -> list[TestSuite]:
    document = JUnitXml.fromstring(junit_xml(made).encode())
    assert isinstance(document, JUnitXml)
    return list(document)


def test_a_wrong_trial_has_its_findings_in_one_failure_and_what_was_known_with_it() -> None:
    (suite,) = suites(verdict(wrong_trial()))
    properties = suite.properties()  # type: ignore[no-untyped-call]  # of junitparser
    assert {each.name: each.value for each in properties} == {"world_size": "2", **verdicts.ENVIRONMENT}
    (test,) = suite
    assert (test.name, test.time) == ("ddpopt-split / default, aot_eager", 1.25)
    assert test.system_out == "L2 needs Inductor, so it was not applied"
    ((failure,),) = [[*test.result]]
    first, second = failure.text.splitlines()
    assert first == f"L0 bitwise: {verdicts.BITWISE}: {sentence(wrong_trial().findings[0])}"
    assert second.startswith(f"L3 structure: {verdicts.ONCE}: bucket 1 was reduced 2 times")
    assert (failure.type, failure.message) == ("wrong", f"{first} (and 1 more)")


def test_there_is_a_suite_for_each_case_and_a_test_for_each_trial() -> None:
    assert suites(verdict()) == []
    read, number = suites(verdicts.matrix(options=4)), 4 * len(verdicts.MODES)
    assert [(suite.name, suite.tests) for suite in read] == [(case, number) for case in verdicts.CASES]
    assert {test.classname for test in read[0]} == {"linears"}
    assert len({test.name for test in read[0]}) == number


def test_each_kind_of_trial_has_its_own_result() -> None:
    (suite,) = suites(verdicts.all_kinds())
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 1)
    results = [[*test.result] for test in suite]
    assert [[*map(type, result)] for result in results] == [[], [Failure], [Error], [Skipped]]
    (error,), (skip,) = results[2:]
    (suite,) = suites(verdict(replace(wrong_trial(), findings=(), reason="it did not agree")))
    ((failure,),) = ([*test.result] for test in suite)
    assert failure.message == "it did not agree"
    assert (error.text, skip.message) == (verdicts.STACK, impossible_trial().reason)


def test_what_xml_cannot_write_is_replaced_and_all_else_kept() -> None:
    reason = '\x1b[31m]]> <w> & "é" \U0001f600 \ud800\x00\ufffe\nend\ttab'
    (suite,) = suites(verdict(replace(broken_trial(), reason=reason)))
    ((error,),) = ([*test.result] for test in suite)
    assert error.text == '\ufffd[31m]]> <w> & "é" \U0001f600 \ufffd\ufffd\ufffd\nend\ttab'
