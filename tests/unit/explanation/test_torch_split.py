"""torch's DDPOptimizer on fake tensors: the buckets under it are those of reducers that run under it."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.dynamo.api import replacing_ddp_optimizer
from ddpopt.explanation.explain import explain
from tests.support.rehearsing import Linears, params, rows, running_buckets

pytestmark = pytest.mark.usefixtures("one_rank_group")


def test_a_running_reducer_has_the_buckets_that_torchs_split_is_said_to_give() -> None:
    model = Linears(512, 3, order=(0, 1, 2, 1))  # in more than one segment, and one weight read in two
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    explanation = explain(ddp, rows(512))
    torch._dynamo.reset()
    running = running_buckets(ddp, torch.compile(ddp, backend="aot_eager"), rows(512))
    assert len(explanation.torch.segments) > 1
    assert params(explanation.torch.buckets) == running != params(explanation.ddp.buckets)


def test_torchs_optimizer_is_explained_as_torch_wrote_it_even_while_it_is_replaced() -> None:
    expected = explain(Linears(), rows())
    with replacing_ddp_optimizer():
        assert explain(Linears(), rows()) == expected
    assert expected.torch.segments[0].counted
