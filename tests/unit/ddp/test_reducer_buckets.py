"""ddpopt.ddp.reducer_buckets: what the running reducer itself says."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.impose import impose
from ddpopt.ddp.reducer_buckets import running_buckets
from tests.multigpu.models import Tower, arbitrary_plan

pytestmark = pytest.mark.usefixtures("one_rank_group")


def step(ddp: Any) -> None:
    torch.autograd.backward(ddp(torch.ones(2, 6)).sum())


def logged(ddp: Any, names: list[str]) -> list[tuple[str, ...]]:
    """The rebuilt buckets that DDP's own log tells."""
    ddp.logger.set_runtime_stats_and_log()
    text = str(ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return [tuple(names[int(index)] for index in bucket.split()) for bucket in text.split(",")]


def test_the_rebuilt_buckets_are_those_of_ddps_log() -> None:
    ddp: Any = DistributedDataParallel(Tower(mixed=True), bucket_cap_mb=200 / 2**20)
    for _ in range(3):
        step(ddp)
    names = [name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
    # The scale, a parameter of the root module, is the first in both orders.
    assert [bucket.params for bucket in running_buckets(ddp)] == logged(ddp, names)


def test_a_plans_buckets_are_told_with_their_sizes() -> None:
    ddp: Any = DistributedDataParallel(Tower(mixed=True))
    plan = arbitrary_plan(ddp, 1)
    impose(ddp, plan)
    told = [(b.index, b.params, b.nbytes, b.dtype, b.device) for b in running_buckets(ddp)]
    assert told == [(b.index, b.params, b.nbytes, b.dtype, b.device) for b in plan.buckets]
    assert sum(bucket.numel for bucket in running_buckets(ddp)) == sum(
        parameter.numel() for parameter in ddp.parameters() if parameter.requires_grad
    )


def test_asking_takes_no_memory_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp: Any = DistributedDataParallel(nn.Linear(6, 6))
    step(ddp)
    before = [parameter.grad.clone() for parameter in ddp.parameters()]
    reducer = ddp.reducer
    storages: list[int] = []

    class Watched:
        def _get_zeros_like_grad_buckets(self) -> Any:
            buckets = reducer._get_zeros_like_grad_buckets()
            storages.extend(bucket.buffer().untyped_storage().nbytes() for bucket in buckets)
            return buckets

    monkeypatch.setattr(ddp, "reducer", Watched())
    running_buckets(ddp)
    assert storages == [4]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(ddp.parameters(), before, strict=True))
