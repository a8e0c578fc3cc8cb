"""Tests of `ddpopt.gate.overlap`: the measure without a clock."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.gate.overlap import WARMUP_ITERATIONS, BucketLaunch, FlopCount, measure, overlap_potential

CAP_OF_ONE_LAYER_MB = 64 * 64 * 4 / 2**20


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


def test_buckets_weigh_by_their_bytes() -> None:
    launches = [BucketLaunch(("a",), 30, 0), BucketLaunch(("b",), 10, 100)]
    assert overlap_potential(launches, 100) == 0.75


def test_the_count_is_that_of_the_formulas_and_has_attention_on_the_cpu() -> None:
    with FlopCount() as count:
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert count.total == 2 * 2 * 3 * 5
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    attended = nn.functional.scaled_dot_product_attention(q, k, v).sum()
    with FlopCount() as count:
        attended.backward()  # type: ignore[no-untyped-call]
    # Five products of (8, 4) with (4, 8) for each of two heads: the scores again, and four gradients.
    assert count.total == 5 * 2 * (2 * 8 * 8 * 4)


@pytest.mark.usefixtures("one_rank_group")
def test_eager_ddp_has_the_potential_of_its_layers() -> None:
    ddp = DistributedDataParallel(layers(4), bucket_cap_mb=CAP_OF_ONE_LAYER_MB)
    measured = measure(ddp, lambda _: ddp(torch.ones(8, 64)).sum())
    # Two equal products a layer, but one in the first, whose input needs no gradient: 7, of which a layer's
    # own are done when its bucket leaves.
    product = 2 * 8 * 64 * 64
    assert measured.flops == 7 * product
    assert [launch.flops_before // product for launch in measured.iterations[-1]] == [2, 4, 6, 7]
    assert measured.potential == (5 + 3 + 1 + 0) / (4 * 7)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("static_graph", [False, True])
def test_the_buckets_of_every_iteration_are_seen_by_name(static_graph: bool) -> None:
    ddp = DistributedDataParallel(layers(3), bucket_cap_mb=CAP_OF_ONE_LAYER_MB, static_graph=static_graph)
    measured = measure(ddp, lambda _: ddp(torch.ones(8, 64)).sum())
    initial, rebuilt = (("0.weight", "1.weight", "2.weight"),), (("2.weight",), ("1.weight",), ("0.weight",))
    before = 1 + static_graph
    assert measured.buckets == (*[initial] * before, *[rebuilt] * (WARMUP_ITERATIONS + 1 - before))
