import pytest
import torch
from tinynet import TinyNet

from ddpopt.testing import Ranks, assert_ddp_equal


@pytest.mark.world_size(2)
def test_a_compiled_step_computes_what_eager_ddp_computes(ddp_ranks: Ranks) -> None:
    torch.manual_seed(ddp_ranks.rank)  # each rank has its own inputs
    assert_ddp_equal(TinyNet(), torch.randn(8, 32))
