"""tests.selftest: what counts as found, and what does not."""

from dataclasses import replace

import pytest

from ddpopt.errors import CertificateError, PlanMismatchError, UsageError
from ddpopt.judge.rules.failing import Failure, failure_of
from ddpopt.judge.verdict import Finding, Status, Trial
from tests.selftest.faults import DEADLY, FAULTS, Fault
from tests.selftest.sites import NotInjected
from tests.selftest.trials import found_out
from tests.support.verdicts import broken_trial, impossible_trial, ok_trial


def fault_of(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


ZEROED = fault_of("a gradient is zeroed")
CUT = fault_of("a mutation is lost")
WIRE = fault_of("a bucket is not reduced")
EVERYWHERE = (True, True)
ON_THE_SECOND = (False, True)


def judged(*levels: str, applied: tuple[str, ...] = ("L0", "L3")) -> Trial:
    findings = tuple(Finding(level, "claim", f"{level} says so") for level in levels)
    status = Status.WRONG if levels else Status.OK
    return replace(ok_trial(), status=status, findings=findings, levels=applied)


def failed(error: Exception) -> tuple[Trial, list[Failure]]:
    failure = failure_of(0, error)
    finding = Finding("run", "the step runs", failure.text)
    return replace(judged("run"), findings=(finding,), levels=()), [failure]


# ------------------------------------------------------------------------------------ what counts as found


def seen(*levels: str, applied: tuple[str, ...] = ("L0", "L3")) -> tuple[Trial, list[Failure]]:
    return judged(*levels, applied=applied), []


REFUSED = CertificateError(("nodes: lost",))
UNDER_DYNAMO = RuntimeError("backend='ddpopt' raised:\nCertificateError: nodes: lost")
WAITED = replace(broken_trial(), reason="no rank failed on its own"), failed(RuntimeError("Timed out"))[1]
NOT_OURS = replace(impossible_trial(), reason="refused: no such"), failed(UsageError("no such"))[1]


@pytest.mark.parametrize(
    ("fault", "outcome", "marked", "found_by", "complaint"),
    [
        # a fault that did not run on every rank it is for is not injected, whatever was said
        (ZEROED, seen("L0"), (True, False), "", "not injected: L0"),
        (DEADLY, seen("L3"), (True, False), "", "not injected: L3"),
        # so an exception before the broken code ran finds nothing
        (CUT, failed(NotInjected("no site")), (False, False), "", "not injected: "),
        # ranks that waited for each other find only a fault that may stall them
        (DEADLY, WAITED, ON_THE_SECOND, "ranks", ""),
        (ZEROED, WAITED, EVERYWHERE, "", "not found: "),
        # errors of ddpopt's count by their type, under Dynamo's wrapper too, where they are expected
        (CUT, failed(UNDER_DYNAMO), EVERYWHERE, "certificate", ""),
        (ZEROED, failed(REFUSED), EVERYWHERE, "", "not found: "),
        (CUT, failed(PlanMismatchError("CertificateError")), EVERYWHERE, "", "not found: "),
        (ZEROED, NOT_OURS, EVERYWHERE, "", "not found: refused: no such"),
        # what a level says counts where it is for that level to say, and a level that had to find it is named
        (ZEROED, seen("L3", "run"), EVERYWHERE, "", "not found: "),
        (ZEROED, seen("L0", "L3"), EVERYWHERE, "L0", ""),
        (WIRE, seen("L0", applied=("L0", "L1", "L3")), EVERYWHERE, "L0", "overlooked by L1"),
    ],
)
def test_a_fault_is_found_by_those_whom_it_concerns_and_only_once_it_ran(
    fault: Fault,
    outcome: tuple[Trial, list[Failure]],
    marked: tuple[bool, ...],
    found_by: str,
    complaint: str,
) -> None:
    found = found_out(fault, *outcome, marked)
    assert ", ".join(found.by) == found_by
    assert found.injected is not complaint.startswith("not injected")
    assert found.complaint.startswith(complaint)
    assert bool(found.complaint) is bool(complaint)
