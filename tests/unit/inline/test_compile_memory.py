"""What inline costs in memory: the peak of a training step beside that of one graph without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddpopt
from tests.unit.rehearsing import Linears

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")

WIDTH, LAYERS = 256, 6
ONE_LAYER = 4 * WIDTH * WIDTH
ALLOWED = 1.02
"""Of a whole graph's peak; and one gradient more, which is copied."""


def peak_bytes(way: str, **options: Any) -> int:
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
                peaks.append(peak_of(train))
    return max(peaks)


def peak_of(train: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        train()
    events: Any = profiled.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def test_gradients_are_not_held_twice() -> None:
    whole, inline = peak_bytes("whole"), peak_bytes("inline")
    assert whole > LAYERS * ONE_LAYER  # the gradients
    assert inline <= ALLOWED * whole + ONE_LAYER


def test_gradients_that_are_views_of_buckets_are_freed_as_they_are_handed_over() -> None:
    assert peak_bytes("inline", gradient_as_bucket_view=True) < 3 * ONE_LAYER
    assert peak_bytes("whole", gradient_as_bucket_view=True) > LAYERS * ONE_LAYER
