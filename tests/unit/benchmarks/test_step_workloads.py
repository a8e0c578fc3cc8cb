"""What the workloads of `benchmarks.step` are said to be: split by torch's DDPOptimizer, or not."""

import pytest
import torch

from benchmarks.step_modes import TORCH, WHOLE, Mode
from benchmarks.step_workloads import WORKLOADS

CPU = torch.device("cpu")


def graphs(mode: str, workload: str) -> int:
    """How many graphs the backend is given; it runs them as they are."""
    tried = Mode(mode, WORKLOADS[workload], "eager", CPU)
    tried.forward()
    return tried.counted.graphs


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
@pytest.mark.parametrize(
    ("mode", "workload", "segments"),
    [
        (TORCH, "linears", 8),
        (TORCH, "keyword", 1),
        (TORCH, "experts", 1),
        (TORCH, "tied", 2),
        (WHOLE, "linears", 1),
    ],
)
def test_torch_splits_some_wrongly_and_some_not_at_all(mode: str, workload: str, segments: int) -> None:
    assert graphs(mode, workload) == segments
