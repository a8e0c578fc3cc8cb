"""Each program of a public report has the outcome that `tests/data/reports.json` expects, in each mode."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import UsageError
from ddpopt.ranks.group import Ranks
from tests.support.program_reports import MODES, ReportedProgram, reported_programs
from tests.support.programs import PROGRAMS, WIDTH, Program

MEASURED = torch.__version__.startswith("2.13.")
Gradients = list[list[Tensor | None]]


def compiled(mode: str, ddp: Any, program: Program) -> tuple[Any, Callable[..., Any]]:
    """The model as a mode compiles it, and the step."""
    if mode == "step":
        return ddp, ddpopt.train_step(program.step, backend=program.backend)
    if mode in ("inline", "split"):
        strategy: Any = mode
        return ddpopt.compile(ddp, backend=program.backend, strategy=strategy), program.step
    return (ddp if mode == "eager" else torch.compile(ddp, backend=program.backend)), program.step


def trained(program: Program, mode: str, ranks: Ranks) -> Gradients:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(program.model(), bucket_cap_mb=2, **program.ddp)
    model, step = compiled(mode, ddp, program)
    uncut = torch._dynamo.config.patch(optimize_ddp=False)
    whole = uncut if mode in ("whole", "eager") else nullcontext()
    found: Gradients = []
    with whole:
        for number in range(program.steps):
            torch.manual_seed(100 * number + ranks.rank)
            step(model, torch.randn(program.rows(ranks.rank, number), WIDTH))
            gradients = [parameter.grad for parameter in ddp.parameters()]
            found.append([None if each is None else each.clone() for each in gradients])
            with torch.no_grad():
                for parameter in ddp.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=1e-4)
                    parameter.grad = None
    return found


def outcome(program: Program, mode: str, expected: Gradients, ranks: Ranks) -> str:
    """How a mode trains a program, in a word or two."""
    try:
        found = trained(program, mode, ranks)
    except UsageError:
        return "refused"
    except Exception as error:
        return f"raises {type(error).__name__}"
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)
    ]
    if any((got is None) != (wanted is None) for got, wanted in pairs):
        return "wrong"
    numbers = [(got, wanted) for got, wanted in pairs if got is not None and wanted is not None]
    if all(torch.equal(got, wanted) for got, wanted in numbers):
        return "bitwise"
    near = all(torch.allclose(got, wanted, rtol=1e-4, atol=1e-5) for got, wanted in numbers)
    return "rounding" if near else "wrong"


def by_day(report: ReportedProgram, place: int) -> tuple[str, ...]:
    """One of ddpopt's strategies for each program."""
    own = [mode for mode in ("inline", "split") if mode in report.outcomes]
    return (own[place % len(own)],) if own else ()


def each_pair() -> list[Any]:
    pairs = []
    for place, report in enumerate(reported_programs()):
        for mode in MODES:
            if mode in report.outcomes:
                marks = () if mode in by_day(report, place) else pytest.mark.nightly
                pairs.append(pytest.param(report, mode, marks=marks, id=f"{report.program}-{mode}"))
    return pairs


@pytest.mark.skipif(not MEASURED, reason="outcomes are those of torch 2.13")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("report", "mode"), each_pair())
def test_a_program_has_the_expected_outcome(report: ReportedProgram, mode: str, ranks: Ranks) -> None:
    program = PROGRAMS[report.program]
    expected = trained(program, "eager", ranks)
    told = ranks.gather(outcome(program, mode, expected, ranks))
    assert told == [report.outcomes[mode]] * ranks.size


def test_no_program_is_without_a_report() -> None:
    assert {report.program for report in reported_programs()} == {*PROGRAMS}
