"""ddpopt.inductor: what was compiled inline is found again, and only while it is still what would be made."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import inductor

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What Inductor's caches and AOTAutograd's gave within the block."""
    counters.clear()
    found: dict[str, int] = {}
    yield found
    found["graphs compiled"] = counters["inductor"]["fxgraph_cache_miss"]
    found["traces found"] = counters["aot_autograd"]["autograd_cache_hit"]
    found["traces made"] = counters["aot_autograd"]["autograd_cache_miss"]
    found["not cached"] = counters["aot_autograd"]["autograd_cache_bypass"]


def train() -> list[Tensor]:
    """One step of a process that has compiled nothing yet, as far as Dynamo knows."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=8 * 8 * 4 / 2**20)
    torch.autograd.backward(ddpopt.compile(ddp, strategy="inline")(torch.ones(2, 8)).sum())
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def test_a_second_start_compiles_and_traces_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_cache():
        with counted() as cold:
            first = train()
        with counted() as warm:
            second = train()
        monkeypatch.setattr(inductor, "_traced_code", lambda: "of another release")
        with counted() as changed:
            train()
    assert (cold["traces made"], cold["traces found"], cold["not cached"]) == (1, 0, 0)
    assert warm == {"graphs compiled": 0, "traces found": 1, "traces made": 0, "not cached": 0}
    assert changed["traces made"] == 1
    assert len(first) == 4
    assert all(map(torch.equal, first, second))
