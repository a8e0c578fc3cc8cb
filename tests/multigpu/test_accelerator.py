"""What DDP itself can do only with an accelerator: an optimizer in backward, and its mixed precision."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddpopt
from ddpopt.cases.corpus.ddp_rows import Linears
from ddpopt.cases.corpus.draws import seeded
from ddpopt.ddp.impose import imposed_plan
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="eager DDP needs an accelerator for it")
STEPS = 3


def trained(ranks: Ranks, strategy: Strategy | None, way: str) -> Any:
    """What changed in each step, and the DDP module."""
    torch._dynamo.reset()
    model = seeded(Linears, dim=64, layers=4).to(ranks.device)
    parameters: list[Any] = [*model.parameters()]
    if way == "optimizer in backward":
        with warnings.catch_warnings():  # torch's own import warns
            warnings.simplefilter("ignore")
            optim: Any = importlib.import_module("torch.distributed.optim")
        optim._apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    half = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    precision = half if way == "mixed precision" else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, mixed_precision=precision)
    call = ddp if strategy is None else ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)
    found: list[list[Tensor]] = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + ranks.rank)
        torch.autograd.backward(call(torch.randn(8, 64, device=ranks.device)).square().mean())
        torch.cuda.synchronize()
        found.append([(p if p.grad is None else p.grad).detach().clone() for p in parameters])
        ddp.zero_grad()
    return found, ddp


@pytest.mark.parametrize("strategy", ["split", "inline"])
@pytest.mark.parametrize(("way", "planned"), [("optimizer in backward", True), ("mixed precision", False)])
def test_a_step_does_what_eager_does(way: str, planned: bool, strategy: Strategy, ranks: Ranks) -> None:
    expected, _ = trained(ranks, None, way)
    found, ddp = trained(ranks, strategy, way)
    assert (imposed_plan(ddp) is not None) == planned
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
