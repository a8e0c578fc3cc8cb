"""ddpopt.verify on several ranks: every option, every mode, and faults that are put in by hand."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.cases.corpus.ddp_rows import Linears
from ddpopt.cases.corpus.draws import rows_case
from ddpopt.cases.matrix import CASES
from ddpopt.cases.option_cases import CAPS
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.ladder import GIVEN_UP
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import OPTIONS, option
from ddpopt.judge.training.record import PARAMETER
from ddpopt.judge.training.trainer import Option, Trainer
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.on_rank import STEPS, Request, Settings, run_trials
from ddpopt.judge.trials.resuming import resume
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import joined
from tests.selftest.clean_runs import clean_runs
from tests.selftest.engines import Averaging
from tests.selftest.faults import FAULTS, PLACEBOS, Fault
from tests.selftest.trials import BACKENDS, judge_fault, try_fault, unbroken
from tests.support.simulated_programs import case_of
from tests.support.turns import at_night, in_turn, number_of_ranks

aten: Any = torch.ops.aten
BOTH = ("ddpopt-split", "ddpopt-inline")
PLAIN, NORMED = CASES[0], CASES[2]
NOT_HERE = {
    **({} if torch.version.cuda else {"hook_bf16": "BF16 all reduce communication hook required CUDA"}),
    **({} if torch.__version__ >= "2.12" else {"batched_copy": "keyword argument 'batched_grad_copy'"}),
}
"""What DDP does not have in this build of torch, whatever the device, or in this release."""
BY_DAY = (
    ("plan", "plain", "default"),
    ("compiled code", "weight_norm", "default"),
    ("communication", "plain", "default"),
)
"""The layers, cases and options of some faults; at night all of them are tried."""


# the plain case, with buckets below DDP's default limits: judging takes less time
SMALL = rows_case("small", Linears, layers=2, dim=32, batch=8, ddp_kwargs={"bucket_cap_mb": 32**2 / 2**18})


def judged(case: Case, option: str, modes: tuple[str, ...], **settings: Any) -> list[Trial]:
    with joined() as ranks:
        return run_trials(ranks, [Request(case, option, modes)], Settings("aot_eager", **settings), ())


@contextlib.contextmanager
def eager(case: Case, under: str = "default", steps: int = STEPS, **limits: Any) -> Iterator[Reference]:
    """Eager DDP's run, without the evaluation after it."""
    with joined() as ranks:
        subject = Subject(case, option(under), steps, ranks.device, evaluates=False)
        with contextlib.closing(Bench(subject, ranks, resume=resume, **limits)) as bench:
            reference = Reference.make(bench)
            assert reference is not None, bench.failures
            yield reference


def each_option() -> list[Any]:
    """Every option with both strategies; by day every fourth option with one."""
    options = [(option,) for option in OPTIONS if option.name not in NOT_HERE]
    later = [option for option in options if option not in options[::4]]
    return [*in_turn(options[::4], BOTH), *at_night(later, BOTH)]


def fused_multiply_add(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a graph eagerly, but without the rounding between a product and its sum."""
    return _updating(gm, lambda one, other, alpha: (one.double() + alpha * other.double()).float())


def hasty(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a graph eagerly, with updates that are too large by a thousandth."""
    return _updating(gm, lambda one, other, alpha: one + 1.001 * alpha * other)


def _updating(gm: fx.GraphModule, update: Callable[[Tensor, Tensor, float], Tensor]) -> Any:
    class Updating(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is not aten.add_.Tensor or "alpha" not in kwargs:
                return super().call_function(target, args, kwargs)
            updated.append(target)
            return args[0].copy_(update(*args, kwargs["alpha"]))  # type: ignore[call-arg]  # they are two

    def run(*inputs: Tensor) -> Any:
        returned = Updating(gm).run(*inputs)
        assert updated
        return returned

    updated: list[Any] = []
    return run


def named(value: Any) -> str:
    return getattr(value, "name", value)  # type: ignore[no-any-return]  # a string has none


@pytest.mark.parametrize(("under", "strategy"), each_option(), ids=named)
def test_ddpopt_does_what_eager_ddp_does_under_every_option(under: Option, strategy: str) -> None:
    # what has caps of its own would put all of the small case into one bucket
    with eager(PLAIN if CAPS & under.ddp_kwargs.keys() else SMALL, under.name) as reference:
        trial = judge(reference, mode(strategy), "aot_eager")
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert "L3" in trial.levels
    assert trial.graphs > 0


@pytest.mark.skipif(not NOT_HERE, reason="DDP has every option here")
def test_an_option_that_needs_another_build_or_release_of_torch_is_not_possible_and_says_so() -> None:
    for name, why in NOT_HERE.items():
        (trial,) = judged(SMALL, name, BOTH[:1])
        assert trial.status is Status.NOT_POSSIBLE
        assert why in trial.reason


def each_place() -> list[Any]:
    by_day = BY_DAY if number_of_ranks() <= 2 else BY_DAY[::2]
    places = dict.fromkeys((fault.layer, fault.case, fault.option) for fault in FAULTS)
    return [pytest.param(each, marks=() if each in by_day else pytest.mark.nightly) for each in places]


@pytest.mark.world_size(2, timeout=900)
@pytest.mark.parametrize("place", each_place(), ids=", ".join)
def test_a_fault_is_put_in_and_found_by_all_that_have_to_find_it(place: tuple[str, ...]) -> None:
    faults = [fault for fault in FAULTS if (fault.layer, fault.case, fault.option) == place]
    with joined() as ranks:
        shown = [fault for fault in faults if fault.shows_on(ranks.size)]
        if not shown:
            pytest.skip("on so many ranks a single unit in the last place is rounding")
        with unbroken(ranks, *place[1:]) as reference:
            ended = {fault.name: judge_fault(reference, fault) for fault in shown}
    assert {name: found.complaint for name, (_, found) in ended.items() if found.complaint} == {}
    assert [name for name, (_, found) in ended.items() if not found.by] == []
    assert {trial.status for trial, _ in ended.values()} == {Status.WRONG}


# a bias whose gradient is noise; what differs between ranks in eager too; and an attention, whose first layer
# is rounded otherwise in inference mode while a dispatch mode is active
CASES_THAT_DIFFER = [(NORMED,), (corpus.case("uneven_ranks"),), (corpus.case("forward_calls"),)]


@pytest.mark.parametrize(("case", "strategy"), in_turn(CASES_THAT_DIFFER, BOTH), ids=named)
def test_what_is_noise_or_differs_in_eager_too_raises_nothing(case: Case, strategy: str) -> None:
    (trial,) = judged(case, "default", (strategy,))
    assert (trial.status, trial.findings) == (Status.OK, ()), trial.findings
    assert "L1" in trial.levels


captures_steps = pytest.mark.skipif(torch.__version__ < "2.13", reason="train_step needs torch 2.13")


@captures_steps
def test_a_captured_step_whose_backend_rounds_in_its_own_way_is_judged_by_rounding() -> None:
    requests = [Request(SMALL, "default", ("ddpopt-step", "step-replicate", "step-shard-optimizer"))]
    with joined() as ranks:
        trials = run_trials(ranks, requests, Settings(fused_multiply_add), ())
    assert [(trial.status, trial.findings) for trial in trials] == [(Status.OK, ())] * 3
    assert {trial.levels for trial in trials} == {("L2", "L3")}


@captures_steps
def test_a_captured_optimizer_is_judged_although_its_backend_rounds() -> None:
    with joined() as ranks:
        (trial,) = run_trials(ranks, [Request(SMALL, "default", ("step-replicate",))], Settings(hasty), ())
    assert {finding.level for finding in trial.findings} == {"L2"}
    assert all((finding.parameter or "").startswith(PARAMETER) for finding in trial.findings)
    assert trial.status is Status.WRONG


def test_a_users_collective_is_the_same_when_a_compiler_replaces_it() -> None:
    (trial,) = judged(case_of("an average on all ranks"), "default", ("ddpopt-inline",))
    assert (trial.status, trial.findings) == (Status.OK, ()), trial.findings


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize("placebo", PLACEBOS, ids=lambda placebo: f"{placebo.name}, {placebo.backend}")
def test_putting_in_nothing_raises_nothing(placebo: Fault) -> None:
    with joined() as ranks:
        trial, _ = try_fault(ranks, placebo)
    assert (trial.status, trial.findings) == (Status.OK, ())


AT_A_TIME = 12
CLEAN = [
    pytest.param(backend, requests[first : first + AT_A_TIME], id=f"{backend}, from number {first}")
    for backend, requests in clean_runs().items()
    for first in range(0, len(requests), AT_A_TIME)
]


@pytest.mark.nightly
@pytest.mark.world_size(2, timeout=1800)
@pytest.mark.parametrize(("backend", "requests"), CLEAN)
def test_clean_runs_raise_nothing(backend: str, requests: Sequence[Request]) -> None:
    settings = Settings(BACKENDS.get(backend, backend))
    with joined() as ranks:
        trials = run_trials(ranks, requests, settings, ())
    unclean = [trial for trial in trials if trial.status is not Status.OK]
    assert [(trial.name, trial.status, trial.reason, trial.findings) for trial in unclean] == []


def test_a_mode_that_silently_compiles_nothing_is_wrong() -> None:
    (trial,) = judged(corpus.case("sequential"), "default", ("torch",))
    assert trial.status is Status.WRONG
    assert [finding.claim for finding in trial.findings] == ["something was compiled"]


def test_a_rank_that_fails_alone_is_named_and_the_next_trial_is_not_disturbed() -> None:
    def failing(output: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.distributed.get_rank() == 0:
            return output.square().mean()
        return output.square().mean() * Once.factor()

    case = Case("once", PLAIN.model, PLAIN.inputs, "fails on rank 1 the third time", loss=failing)
    Once.calls = 0
    wrong, right = judged(case, "default", ("whole", "ddpopt-inline"))
    if torch.distributed.get_world_size() == 1:
        assert wrong.status is Status.OK
        return
    assert wrong.status is Status.WRONG
    assert {finding.message.partition(" (")[0] for finding in wrong.findings} == {"RuntimeError: this once"}
    assert 0 not in {finding.rank for finding in wrong.findings}
    assert right.status is Status.OK, right.findings


@pytest.mark.world_size(2)
def test_a_rank_that_compiles_for_longer_than_its_peers_wait_is_nothing_wrong() -> None:
    def slow_on_one_rank(gm: torch.fx.GraphModule, _: object) -> Any:
        time.sleep(4.5 * torch.distributed.get_rank())
        return gm.forward

    with eager(PLAIN, steps=1, collective_limit_s=3.0) as reference:
        trial = judge(reference, mode("whole"), slow_on_one_rank)
    assert (trial.status, trial.findings) == (Status.BROKEN, ())
    assert trial.reason.startswith("no rank failed on its own: each waited for another in a collective")


class Apart(Averaging):
    """Its second rank waits for a broadcast, its first one averages."""

    def mean(self, gradient: Tensor) -> None:
        if self.group.rank() == 1:
            torch.distributed.broadcast(gradient, 0, group=self.group)
        else:
            super().mean(gradient)


@pytest.mark.world_size(2)
def test_where_all_ranks_wait_for_each_other_it_is_said_where_they_part() -> None:
    with eager(PLAIN, steps=1, collective_limit_s=3.0) as reference:
        trial = judge(reference, Apart("apart"), None)
    assert (trial.status, trial.findings) == (Status.BROKEN, ())
    assert re.search(
        r"collective \d+: rank 0 sent all_reduce of Float \[.*\] \(engines.py:\d+ in mean\); "
        r"rank 1 sent broadcast of Float \[.*\] \(test_verify.py:\d+ in mean\)",
        trial.reason,
    )


@pytest.mark.world_size(2)
def test_a_rank_that_gets_through_does_not_leave_its_peer_waiting_and_that_is_wrong() -> None:
    def unsynchronized(trainer: Trainer) -> None:
        if trainer.place.rank == 1:
            trainer.parallel.around_backward = trainer.ddp.no_sync  # type: ignore[method-assign]  # for this run alone
            trainer.ddp.require_backward_grad_sync = False

    with eager(PLAIN, steps=1, collective_limit_s=60.0) as reference:
        trial = judge(reference, mode("whole"), "eager", tamper=unsynchronized)
    others = [rank for rank in range(torch.distributed.get_world_size()) if rank != 1]
    # what gloo says of a peer that has gone depends on who notices first, and is nobody's promise
    told = [(found.claim, found.rank) for found in trial.findings]
    assert (trial.status, told) == (Status.WRONG, [("the step runs", rank) for rank in others])


class Counting(Linears):
    """Counts its forwards in an attribute, so that Dynamo compiles each of them."""

    forwards = 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("limit", [2, 64])
def test_a_note_says_where_dynamo_stopped_compiling(limit: int) -> None:
    case = rows_case("counting", Counting, layers=2, dim=32, batch=8)
    settings = {"recompile_limit": limit, "automatic_dynamic_shapes": False}
    with torch._dynamo.config.patch(settings), eager(case) as reference:
        trial = judge(reference, mode("whole"), "eager")
    assert (trial.status, trial.findings) == (Status.OK, ())
    assert (GIVEN_UP in trial.notes) == (limit == 2)


class Once:
    """Counts losses of this process: eager runs twice, with 9 extra ones, and alone once."""

    calls = 0

    @classmethod
    def factor(cls) -> float:
        cls.calls += 1
        if cls.calls == 31:
            raise RuntimeError("this once")
        return 1.0


def test_half_precision_on_request_is_judged_by_its_own_rounding() -> None:
    (trial,) = judged(PLAIN, "default", ("ddpopt-inline",), dtype="bfloat16")
    assert trial.status is Status.OK
    assert {bucket.dtype for bucket in trial.buckets} == {"bfloat16"}
