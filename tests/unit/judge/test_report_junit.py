"""JUnit XML: what a CI system reads back is what the verdict said."""

from dataclasses import replace

from expecttest import assert_expected_inline
from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite

from ddpopt.judge.report.junit import junit_xml
from ddpopt.judge.verdict import Verdict
from tests.unit.verdicts import (
    CASES,
    STACK,
    all_kinds,
    broken_trial,
    folded,
    impossible_trial,
    matrix,
    verdict,
    wrong_trial,
)


def suites(made: Verdict) -> list[TestSuite]:
    document = JUnitXml.fromstring(junit_xml(made).encode())
    assert isinstance(document, JUnitXml)
    return list(document)


def test_one_wrong_trial() -> None:
    assert_expected_inline(
        folded(junit_xml(verdict(wrong_trial())).replace("><", ">\n<")),
        """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="pkg.module:model" tests="1" failures="1" errors="0" skipped="0" time="1.25">
<testsuite name="pkg.module:model" tests="1" errors="0" failures="1" skipped="0" time="1.25">
<properties>
<property name="world_size" value="2" />
<property name="torch" value="2.13.0" />
<property name="ddpopt" value="0.1.0" />
<property name="python" value="3.11.2" />
<property name="device" value="cpu" />
<property name="platform" value="Linux" />
</properties>
<testcase name="ddpopt-split / default, aot_eager" classname="pkg.module:model" time="1.25">
<failure message="L0 bitwise: an aot_eager gradient equals eager's in every bit: layers.0.weight:
    expected eager's gradient, got one that is 512 ULPs away at [3, 4] (bucket 1, rank 1, step 2)
    (and 1 more)" type="L0 L3">L0 bitwise: an aot_eager gradient equals eager's in every bit:
    layers.0.weight: expected eager's gradient, got one that is 512 ULPs away at [3, 4] (bucket 1,
    rank 1, step 2)
L3 structure: every planned bucket is reduced exactly once per backward: bucket 1 was reduced 2
    times in step 2 of rank 0, expected 1</failure>
<system-out>L2 needs Inductor, so it was not applied</system-out>
</testcase>
</testsuite>
</testsuites>""",
    )


def test_there_is_a_suite_for_each_case_and_a_test_for_each_trial() -> None:
    assert suites(verdict()) == []
    read = suites(matrix(options=4))
    assert [(suite.name, suite.tests) for suite in read] == [(case, 4 * 12) for case in CASES]
    assert {test.classname for test in read[0]} == {"linears"}
    assert len({test.name for test in read[0]}) == 4 * 12


def test_each_kind_of_trial_has_its_own_result() -> None:
    (suite,) = suites(all_kinds())
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 1)
    results = [[*test.result] for test in suite]
    assert [[*map(type, result)] for result in results] == [[], [Failure], [Error], [Skipped]]
    (error,), (skip,) = results[2:]
    assert (error.text, skip.message) == (STACK, impossible_trial().reason)


def test_a_wrong_trial_without_a_finding_is_a_failure_all_the_same() -> None:
    (suite,) = suites(verdict(replace(wrong_trial(), findings=(), reason="it did not agree")))
    ((failure,),) = ([*test.result] for test in suite)
    assert (failure.type, failure.message) == ("wrong", "it did not agree")


def test_what_xml_cannot_write_is_replaced_and_all_else_kept() -> None:
    reason = '\x1b[31m]]> <w> & "é" \U0001f600 \ud800\x00\ufffe\nend\ttab'
    (suite,) = suites(verdict(replace(broken_trial(), reason=reason)))
    ((error,),) = ([*test.result] for test in suite)
    assert error.text == '\ufffd[31m]]> <w> & "é" \U0001f600 \ufffd\ufffd\ufffd\nend\ttab'
