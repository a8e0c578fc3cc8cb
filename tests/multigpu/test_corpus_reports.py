"""Each public report on ranks: torch's own optimizer does what the report says, ddpopt what it asks for.

That ddpopt has eager DDP's gradients and the plan's buckets in every case is judged in ``test_compile.py``.
Here it is judged on what a report asks for beside that, under the backend and around the model it is about.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import ddpopt
from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.dynamo.backend import DdpoptBackend
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.reported import Compile, passes, run, sentence
from tests.support.reports import Report, reported_cases
from tests.support.turns import at_night, in_turn

STRATEGIES: tuple[Strategy, ...] = ("split", "inline")
MEASURED = torch.__version__.startswith("2.13.")
BY_NIGHT = (
    "transposed", "conv_strides", "donated_buffers", "checkpoint", "called_twice", "cap_5", "keyword",
    "growing_length",
)  # fmt: skip
"""What another case asks for by day, around a model of the same kind; and one that is compiled often."""
OUT_OF_THE_ORDINARY = [
    pair
    for pair in reported_cases()
    if pair[1].asks or pair[1].wrap != "DDP" or pair[1].backend == "inductor"
]


def each_report() -> list[Any]:
    by_day = [pair for pair in OUT_OF_THE_ORDINARY if pair[0].name not in BY_NIGHT]
    others = [pair for pair in OUT_OF_THE_ORDINARY if pair not in by_day]
    return [*in_turn(by_day, STRATEGIES), *at_night(others, STRATEGIES)]


def named(value: object) -> str:
    return value.name if isinstance(value, Case) else str(getattr(value, "number", value))


def by_ddpopt(report: Report, strategy: Strategy) -> Compile:
    if report.wrap in ("replicate", "compiled inside"):
        return lambda module: torch.compile(module, backend=DdpoptBackend(report.backend, strategy=strategy))
    return lambda ddp: ddpopt.compile(ddp, backend=report.backend, strategy=strategy)


def asked_of_ddpopt(report: Report, strategy: Strategy) -> Report:
    """What a strategy answers for: cutting gives several pieces, and torch's way to overlap is torch's."""
    asks = tuple(ask for ask in report.asks if ask != "one piece" or strategy == "inline")
    settings = {name: value for name, value in report.settings.items() if name != "_dynamo.optimize_ddp"}
    return replace(report, asks=asks, settings=settings)


# torch alone is judged here, and one release of it does not change from one day to the next
@pytest.mark.nightly
@pytest.mark.skipif(not MEASURED, reason="what reports say of torch was measured with torch 2.13")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("case", "report"), reported_cases(), ids=named)
def test_torchs_optimizer_does_what_a_report_says_of_it(case: Case, report: Report, ranks: Ranks) -> None:
    eager = run(case, report, ranks, None)
    torchs = run(case, report, ranks, lambda module: torch.compile(module, backend=report.backend))
    told = ranks.gather(sentence(torchs, eager, report))
    passed = ranks.gather(passes(torchs, eager, report))
    assert eager.error == ""
    assert told == [report.torch_says] * ranks.size
    assert passed == [report.torch_passes] * ranks.size


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("case", "report", "strategy"), each_report(), ids=named)
def test_ddpopt_does_what_a_report_asks(case: Case, report: Report, strategy: Strategy, ranks: Ranks) -> None:
    asked = asked_of_ddpopt(report, strategy)
    eager = run(case, asked, ranks, None)
    own = run(case, asked, ranks, by_ddpopt(asked, strategy))
    told = ranks.gather(sentence(own, eager, asked))
    passed = ranks.gather(passes(own, eager, asked))
    bitwise = ranks.gather(own.error == "" and own.distance(eager) == 0)
    assert passed == [True] * ranks.size, told
    if (strategy, asked.backend, ranks.size) == ("inline", "aot_eager", 2):
        assert all(bitwise)


def test_a_policy_that_is_not_asked_would_show_in_the_products_of_backward(ranks: Ranks) -> None:
    case, without = corpus.case("selective_checkpoint"), corpus.case("checkpoint")
    (report,) = (report for reported, report in reported_cases() if reported is case)
    asked, forgot = run(case, report, ranks, None), run(without, report, ranks, None)
    both = ranks.gather((asked.products, forgot.products))
    assert all(0 < kept < computed_again for kept, computed_again in both)
