"""ddpopt.judge.trainer: what a step's record holds."""

import pytest
import torch

from ddpopt.judge.trainer import random_state


def test_on_a_gpu_its_own_generator_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor([1, 2], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: own)
    cpu = random_state(torch.device("cpu"))
    assert torch.equal(cpu, torch.random.get_rng_state())
    assert torch.equal(random_state(torch.device("cuda", 0)), torch.cat([cpu, own]))
