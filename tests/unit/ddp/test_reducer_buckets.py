"""ddpopt.ddp.reducer_buckets: what the running reducer itself says."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.reducer_buckets import running_buckets
from tests.multigpu.models import step

pytestmark = pytest.mark.usefixtures("one_rank_group")


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
