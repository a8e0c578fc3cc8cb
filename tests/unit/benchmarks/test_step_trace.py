"""Tests of `benchmarks.step_trace`: when computing ended, and what share of all sending nothing hides."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_trace import Span, exposed_share, record
from tests.unit.step_figures import trace


def exposed(*transfers: Span, computed: float = 5.0) -> float:
    return exposed_share(replace(trace(), computed=computed, transfers=transfers))


def test_what_is_sent_while_the_backward_computes_is_hidden() -> None:
    assert exposed((2.0, 4.0), (4.0, 5.0)) == 0


def test_what_is_sent_afterwards_is_exposed() -> None:
    assert exposed((5.0, 6.0), (6.0, 9.0)) == 1


def test_a_transfer_counts_from_when_computing_ended() -> None:
    assert exposed((4.0, 8.0)) == 0.75


def test_transfers_at_one_time_count_once() -> None:
    assert exposed((3.0, 7.0), (3.0, 7.0), (4.0, 5.0)) == 0.5


def test_a_rest_between_transfers_is_no_all_reduce_time() -> None:
    assert exposed((3.0, 4.0), (8.0, 9.0)) == 0.5


def test_where_nothing_is_sent_nothing_is_exposed() -> None:
    assert exposed() == 0


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
