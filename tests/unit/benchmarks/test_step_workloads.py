"""What the workloads of `benchmarks.step` are said to be: split by torch's DDPOptimizer, or not."""

import pytest
import torch

from benchmarks.step_modes import TORCH, WHOLE, Mode
from benchmarks.step_workloads import MIB, WORKLOADS

CPU = torch.device("cpu")


def graphs(mode: str, workload: str) -> int:
    """How many graphs the backend is given; it runs them as they are."""
    tried = Mode(mode, WORKLOADS[workload], "eager", CPU)
    tried.forward()
    return tried.counted.graphs


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
@pytest.mark.parametrize(
    ("workload", "segments"), [("linears", 8), ("keyword", 1), ("experts", 1), ("tied", 2)]
)
def test_torch_splits_some_wrongly_and_some_not_at_all(workload: str, segments: int) -> None:
    assert graphs(TORCH, workload) == segments


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
def test_without_an_optimizer_there_is_one_graph() -> None:
    assert graphs(WHOLE, "linears") == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_there_is_enough_to_send_and_it_fills_several_buckets(name: str) -> None:
    workload = WORKLOADS[name]
    model = workload.build()
    sent = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 16 * MIB < sent < 48 * MIB
    # DDP's own first bucket closes at 1 MiB
    assert sent > 2 * (workload.cap_bytes(model) or MIB)
    assert model(workload.inputs()).isfinite().all()
