"""Tests of `benchmarks.step_trace`: when computing ended, and what share of all sending nothing hides."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_trace import Span, Trace, exposed_share, record


@pytest.mark.parametrize(
    ("transfers", "share"),
    [
        pytest.param(((2.0, 4.0), (4.0, 5.0)), 0, id="hidden while the backward computes"),
        pytest.param(((4.0, 8.0),), 0.75, id="counted from when computing ended"),
        pytest.param(((3.0, 7.0), (3.0, 7.0), (4.0, 5.0)), 0.5, id="counted once at one time"),
        pytest.param(((3.0, 4.0), (8.0, 9.0)), 0.5, id="a rest is no all-reduce time"),
    ],
)
def test_what_is_sent_after_computing_ended_at_5_is_exposed(
    transfers: tuple[Span, ...], share: float
) -> None:
    trace = Trace((0.0, 2.0), (2.0, 9.0), 5.0, (9.0, 10.0), (3.0, 5.0), transfers)
    assert exposed_share(trace) == share


class Slow(torch.autograd.Function):
    """Its backward takes a while, and is the last to compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.randn(200_000)
        return gradients[0]


@pytest.mark.usefixtures("one_rank_group")
def test_computing_ends_with_the_last_node_of_the_backward() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    x = torch.ones(4, 64, requires_grad=True)
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(ddp(Slow.apply(x)).sum())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def backward() -> None:
        torch.autograd.backward(losses.pop())

    for _ in range(2):
        forward()
        backward()
    found = record(forward, backward, lambda: None)
    assert len(found.launches) == len(found.transfers) > 1
    # after the last bucket has left, the inputs' gradient is computed; then DDP waits, in the backward still
    assert found.launches[-1] < found.computed < found.backward[1]
    assert exposed_share(found) < 1
