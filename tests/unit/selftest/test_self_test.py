"""tests.selftest.self_test: what counts as found, and what does not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases import corpus
from ddpopt.errors import CertificateError, InfrastructureError, PlanMismatchError, UsageError
from ddpopt.judge.judging.failing import Failure, failure_of
from ddpopt.judge.matrix import CASES
from ddpopt.judge.modes import mode
from ddpopt.judge.options import option
from ddpopt.judge.verdict import Finding, Status, Trial, Verdict
from tests.selftest import __main__ as command
from tests.selftest import codes as code
from tests.selftest import plans
from tests.selftest.clean_runs import AT_LEAST, MODES, clean_runs
from tests.selftest.defects import DEFECTS
from tests.selftest.faults import FAULTS, PLACEBOS, Fault
from tests.selftest.self_test import SelfTest, marked_in, self_test
from tests.selftest.shown import shown_case
from tests.selftest.sites import NotInjected, Site, first, last_rank, second_rank
from tests.selftest.trials import died, found_out
from tests.unit.verdicts import broken_trial, impossible_trial, ok_trial, wrong_trial

ZEROED = next(fault for fault in FAULTS if fault.name == "a gradient is zeroed")
CUT = next(fault for fault in FAULTS if fault.name == "a mutation is lost")
DEADLY = next(fault for fault in FAULTS if fault.name == "one rank's reducer has other buckets")
EVERYWHERE = (True, True)


def judged(*levels: str, applied: tuple[str, ...] = ("L0", "L3")) -> Trial:
    findings = tuple(Finding(level, "claim", f"{level} says so") for level in levels)
    return replace(
        ok_trial(), status=Status.WRONG if levels else Status.OK, findings=findings, levels=applied
    )


def failed(error: Exception) -> tuple[Trial, list[Failure]]:
    failure = failure_of(0, error)
    return replace(judged("run"), findings=(Finding("run", "the step runs", failure.text),), levels=()), [
        failure
    ]


def by(
    fault: Fault, trial: Trial, failures: Sequence[Failure] = (), marked: Sequence[bool] = EVERYWHERE
) -> Any:
    return found_out(fault, trial, failures, marked).by


# ------------------------------------------------------------------------------------ what counts as found


def test_a_fault_that_a_level_names_is_found_by_it() -> None:
    found = found_out(ZEROED, judged("L0", "L0"), (), EVERYWHERE)
    assert (found.by, found.due, found.complaint) == (("L0",), ("L0",), "")


@pytest.mark.parametrize("marked", [(), (False, False), (True, False)])
def test_a_fault_that_did_not_run_on_every_rank_is_not_injected_whatever_was_said(
    marked: tuple[bool, ...],
) -> None:
    found = found_out(ZEROED, judged("L0"), (), marked)
    assert (found.injected, found.by) == (False, ())
    assert found.complaint == "not injected: L0 says so"


@pytest.mark.parametrize(
    "error", [RuntimeError("no site"), StopIteration(), IndexError(), NotInjected("no site")]
)
def test_an_exception_before_the_broken_code_ran_finds_nothing(error: Exception) -> None:
    trial, failures = failed(error)
    found = found_out(CUT, trial, failures, (False, False))
    assert (found.injected, found.by) == (False, ())


def test_a_fault_of_one_rank_has_to_run_on_that_rank_alone() -> None:
    assert found_out(DEADLY, judged("L3"), (), (False, True)).injected
    assert not found_out(DEADLY, judged("L3"), (), (True, False)).injected
    assert [list(which(3)) for which in (second_rank, last_rank)] == [[1], [2]]


def test_ranks_that_died_found_a_fault_only_if_it_had_run_before() -> None:
    assert died(DEADLY, (False, True), "rank 1 died").by == ("ranks",)
    early = died(DEADLY, (False, False), "rank 1 died")
    assert (early.injected, early.by, early.complaint) == (False, (), "not injected: rank 1 died")


def test_ranks_that_died_of_a_fault_that_kills_nobody_did_not_find_it() -> None:
    assert died(ZEROED, EVERYWHERE, "rank 1 died").complaint == "not found: rank 1 died"


def test_ranks_that_waited_for_each_other_found_a_fault_that_may_stall_them() -> None:
    waited = replace(broken_trial(), reason="no rank failed of itself")
    failures = failed(RuntimeError("Timed out waiting 20000ms"))[1]
    assert by(DEADLY, waited, failures, (False, True)) == ("ranks",)
    assert by(ZEROED, waited, failures) == ()


def test_ddpopts_own_errors_count_by_their_type_and_only_where_they_are_expected() -> None:
    refused = failed(CertificateError(("nodes: lost",)))
    assert by(CUT, *refused) == ("certificate",)
    assert by(ZEROED, *refused) == ()
    for error in (
        PlanMismatchError("CertificateError"),
        UsageError("CertificateError: no"),
        RuntimeError("CertificateError"),
    ):
        assert by(CUT, *failed(error)) == ()


def test_an_error_of_ddpopts_is_known_under_dynamos_wrapper() -> None:
    wrapper = RuntimeError("backend='ddpopt' raised:\nCertificateError: nodes: lost")
    assert by(CUT, *failed(wrapper)) == ("certificate",)


def test_a_refusal_of_something_else_finds_nothing() -> None:
    trial = replace(impossible_trial(), reason="refused: rank 0: UsageError: no such thing")
    found = found_out(ZEROED, trial, failed(UsageError("no such thing"))[1], EVERYWHERE)
    assert found.complaint == "not found: refused: rank 0: UsageError: no such thing"


def test_what_a_level_says_counts_only_where_it_is_its_business() -> None:
    assert by(ZEROED, judged("L3", "run")) == ()
    assert by(ZEROED, judged("L0", "L3")) == ("L0",)


def test_a_level_that_had_to_find_a_fault_and_did_not_is_named() -> None:
    wire = next(fault for fault in FAULTS if fault.name == "a bucket is not reduced")
    found = found_out(wire, judged("L0", applied=("L0", "L1", "L3")), (), EVERYWHERE)
    assert (found.by, found.due, found.overlooked_by) == (("L0",), ("L0", "L1"), ("L1",))
    assert found.complaint == "overlooked by L1"


def test_l1_has_to_hear_of_wrong_gradients_only_where_nothing_else_compares_numbers() -> None:
    assert ZEROED.due(("L0", "L1", "L3"), size=2) == ("L0",)
    assert ZEROED.due(("L0", "L1", "L3"), size=3) == ("L1",)


def test_l0_has_to_hear_of_a_wrong_buffer_on_any_number_of_ranks() -> None:
    stale = next(fault for fault in FAULTS if fault.name == "a buffer is not updated")
    assert stale.due(("L0", "L1", "L3"), size=2) == stale.due(("L0", "L1", "L3"), size=3) == ("L0",)


def test_l0_has_to_hear_of_nothing_where_rounding_is_allowed() -> None:
    rounded = next(
        fault for fault in FAULTS if fault.name == "a gradient is zeroed, where rounding is allowed"
    )
    assert rounded.due(("L0", "L1", "L2", "L3"), size=2) == ("L2",)


# ---------------------------------------------------------------------------------------------- the whole


def whole(*trials: Trial, complaint: bool = False) -> SelfTest:
    found = found_out(ZEROED, judged() if complaint else judged("L0"), (), EVERYWHERE)
    return SelfTest((found,), Verdict("clean runs", 2, trials or (ok_trial(),)))


@pytest.mark.parametrize("trial", [wrong_trial(), broken_trial(), impossible_trial()])
def test_a_clean_run_that_is_not_ok_fails_the_self_test(trial: Trial) -> None:
    assert whole()
    assert not whole(ok_trial(), trial)


def test_a_fault_that_nobody_found_fails_the_self_test() -> None:
    result = whole(complaint=True)
    assert [found.fault for found in result.missed] == ["a gradient is zeroed"]
    assert not result


@pytest.mark.parametrize(("complaint", "code"), [(False, 0), (True, 1)])
def test_the_command_runs_the_faults_that_are_named_and_exits_with_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, complaint: bool, code: int
) -> None:
    asked: dict[str, Any] = {}

    def run(nproc: int, **given: Any) -> SelfTest:
        asked.update(given)
        return whole(complaint=complaint)

    monkeypatch.setattr(command, "self_test", run)
    written = tmp_path / "result.json"
    assert command.main(["--faults", "a gradient is zero*", "--json", str(written)]) == code
    named = ["a gradient is zeroed", "a gradient is zeroed, where rounding is allowed"]
    assert ([fault.name for fault in asked["faults"]], asked["clean"]) == (named, {})
    assert json.loads(written.read_text())["right"] is not complaint


def test_the_command_exits_with_2_for_what_it_cannot_use_and_3_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_ranks(*_: Any, **given: Any) -> SelfTest:
        raise InfrastructureError("no ranks")

    assert command.main(["--faults", "no such fault"]) == 2
    assert "expected a pattern that some name matches, got 'no such fault'" in capsys.readouterr().err
    monkeypatch.setattr(command, "self_test", without_ranks)
    assert command.main([]) == 3


def test_ranks_that_cannot_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match="expected 2 or more, for ranks to disagree, got 1"):
        self_test(1, faults=(), clean={})


def test_torchruns_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UsageError, match="run it without torchrun"):
        self_test(2, faults=(), clean={})


def test_a_mark_is_a_file_that_outlives_its_rank(tmp_path: Path) -> None:
    (tmp_path / "3-1").touch()
    assert marked_in(tmp_path, 3, 2) == [False, True]


# -------------------------------------------------------------------------------------------- its material


def test_faults_have_unique_names_and_a_place_to_be_put_in() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 30
    known = {case.name for case in (*CASES, shown_case(), *corpus.cases())}
    known |= {defect.name for defect in DEFECTS}
    for fault in (*FAULTS, *PLACEBOS):
        assert mode(fault.mode).name == fault.mode
        assert option(fault.option).name == fault.option
        assert fault.case in known


def test_three_ranks_show_every_fault_but_those_of_one_ulp() -> None:
    assert {fault.name for fault in FAULTS if not fault.shows_on(3)} == {
        "a gradient is off by one ULP",
        "a parameter is off by one ULP",
        "a bucket is off by one ULP",
    }
    assert all(fault.shows_on(2) for fault in FAULTS)


def test_clean_runs_are_enough_cover_the_corpus_and_differ() -> None:
    runs = [(backend, asked.target, asked.option) for backend, each in clean_runs().items() for asked in each]
    assert len(runs) * len(MODES) >= AT_LEAST
    assert {target for _, target, _ in runs} == {case.name for case in corpus.cases()}
    assert len(set(runs)) == len(runs)


class Trainer:
    """As much of a trainer as a hook on a weight needs."""

    def __init__(self) -> None:
        self.parallel = self
        self.model = nn.Linear(2, 2)

    def backward(self) -> Tensor:
        self.model.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        assert self.model.weight.grad is not None
        return self.model.weight.grad


def test_a_site_is_marked_once_the_gradient_is_another_one() -> None:
    trainer: Any = Trainer()
    notes: list[str] = []
    site = Site(0, 2, lambda: notes.append("ran"))
    code.on_gradient(lambda g: g * 2)(trainer, site)
    assert notes == []
    assert trainer.backward().eq(2).all()
    trainer.backward()
    assert notes == ["ran"]
    assert site.marked


def test_a_change_that_changes_nothing_marks_no_site() -> None:
    trainer: Any = Trainer()
    site = Site(0, 2)
    code.on_gradient(lambda g: g.roll(1, 0))(trainer, site)  # all its rows are equal
    trainer.backward()
    assert not site.marked


def test_a_fault_without_a_site_says_what_it_looked_for() -> None:
    trainer: Any = Trainer()
    with pytest.raises(NotInjected, match=r"expected 2 square weight\(s\), found none"):
        code.swapped_gradients(trainer, Site(0, 2))
    with pytest.raises(NotInjected, match="expected a buffer of integers, found none"):
        code.stale_counter(trainer, Site(0, 2))
    assert first(iter("ab"), "a letter") == "a"


def test_a_single_bucket_has_no_other_to_be_swapped_with() -> None:
    with pytest.raises(NotInjected, match="expected a plan of two buckets"):
        plans._require_two([[0, 1]])
