"""Public reports: each on the list has a case or a reason, and the page says what the corpus says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.judge.judging.association import reassociated_values
from ddpopt.judge.judging.layouts import relaid_values
from ddpopt.planning.capture import capture
from tests.reports import WITHOUT_CASE, page, reported_cases

PAGE = Path(__file__).parents[3] / "docs" / "reports.md"
LISTED = (
    *(108966, 109774, 140416, 196227, 160745, 178765, 140395, 104674, 137481, 113812, 108235),
    *(116292, 140229, 111636, 118984, 111279, 128034, 88460, 111794, 104088, 93672, 109261),
    *(128218, 113809, 100239, 92941, 93378, 169461, 178364, 121640, 169026, 147123, 130935),
)


def test_each_report_on_the_list_has_one_case_or_a_reason_why_it_has_none() -> None:
    numbers = [report.number for _, report in reported_cases()]
    assert sorted([*numbers, *WITHOUT_CASE]) == sorted(LISTED)


def test_the_page_of_reports_is_that_of_the_corpus() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/reports.md differs from tests/data/reports.json; run: python -m tests.reports > docs/reports.md"
    )


class Transposed(nn.Module):
    """Two layers over a transposed value, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(384, 384)
        self.second = nn.Linear(384, 384)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.transpose(x, 2, 1)
        x = x + self.first(x).tanh()
        out: Tensor = (x + self.second(x).tanh()).flatten(1)
        return out


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
def test_a_gradient_that_crosses_a_cut_in_another_layout_is_summed_in_order_or_named() -> None:
    torch.manual_seed(0)
    model, x = Transposed(), torch.randn(4, 384, 8)
    eager = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
    step = ddpopt.compile(ddp, backend="aot_eager", strategy="split")
    step(x).square().mean().backward()
    captured = capture(Transposed(), x, strategy="split", bucket_cap_mb=0.5)
    gm, plan = captured.graphs[0].gm, captured.plan()
    named = reassociated_values(gm, plan) or relaid_values(gm, plan)
    same = [
        parameter.grad is not None and torch.equal(parameter.grad, own)
        for parameter, own in zip(model.parameters(), eager, strict=True)
    ]
    assert len(plan.segments) == 2
    assert all(same) or named
