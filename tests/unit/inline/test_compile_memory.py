"""What inline costs in memory: the peak of a training step beside that of one graph without it."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.step_rank import peak_bytes
from tests.support.rehearsing import Linears

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")

WIDTH, LAYERS = 256, 6
ONE_LAYER = 4 * WIDTH * WIDTH
ALLOWED = 1.02
"""Of a whole graph's peak; and one gradient more, which is copied."""


def peak_of(way: str, **options: Any) -> int:
    """The most that is allocated at once in a step that DDP has settled in, over what is there before it."""
    ddp = DistributedDataParallel(Linears(WIDTH, LAYERS), bucket_cap_mb=ONE_LAYER / 2**20, **options)

    def train() -> None:
        torch.autograd.backward(step(torch.ones(8, WIDTH)).sum())

    with torch._dynamo.config.patch(optimize_ddp=False):
        plain = torch.compile(ddp, backend="aot_eager")
        step = plain if way == "whole" else ddpopt.compile(ddp, backend="aot_eager", strategy="inline")
        peaks = [0]
        for number in range(4):
            ddp.zero_grad()
            if number < 2:
                train()
            else:  # twice, for the profiler may lose what a step allocates
                peaks.append(peak_bytes(train, torch.device("cpu")))
    return max(peaks)


def test_gradients_are_not_held_twice() -> None:
    whole, inline = peak_of("whole"), peak_of("inline")
    assert whole > LAYERS * ONE_LAYER  # the gradients
    assert inline <= ALLOWED * whole + ONE_LAYER


def test_gradients_that_are_views_of_buckets_are_freed_as_they_are_handed_over() -> None:
    assert peak_of("inline", gradient_as_bucket_view=True) < 3 * ONE_LAYER
    assert peak_of("whole", gradient_as_bucket_view=True) > LAYERS * ONE_LAYER
