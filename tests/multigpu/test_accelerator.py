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
from ddpopt.planning.strategy import Strategy
from ddpopt.ranks.group import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="eager DDP needs an accelerator for it")
STEPS = 3


def trained(ranks: Ranks, strategy: Strategy | None, *, steps_in_backward: bool, **arguments: Any) -> Any:
    """The parameters after each step, and the DDP module."""
    torch._dynamo.reset()
    model = seeded(Linears, dim=64, layers=4).to(ranks.device)
    if steps_in_backward:
        with warnings.catch_warnings():  # torch's own import warns
            warnings.simplefilter("ignore")
            optim: Any = importlib.import_module("torch.distributed.optim")
        optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, **arguments)
    call = ddp if strategy is None else ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)
    found: list[list[Tensor]] = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + ranks.rank)
        torch.autograd.backward(call(torch.randn(8, 64, device=ranks.device)).square().mean())
        torch.cuda.synchronize()
        parameters: list[Any] = [*model.parameters()]
        found.append([(p if steps_in_backward else p.grad).detach().clone() for p in parameters])
        ddp.zero_grad()
    return found, ddp


@pytest.mark.parametrize("strategy", ["split", "inline"])
def test_an_optimizer_in_backward_steps_as_in_eager(strategy: Strategy, ranks: Ranks) -> None:
    expected, _ = trained(ranks, None, steps_in_backward=True)
    found, ddp = trained(ranks, strategy, steps_in_backward=True)
    assert imposed_plan(ddp) is not None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["split", "inline"])
def test_a_model_in_mixed_precision_is_compiled_whole_and_trains_as_in_eager(
    strategy: Strategy, ranks: Ranks
) -> None:
    half = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    expected, _ = trained(ranks, None, steps_in_backward=False, mixed_precision=half)
    found, ddp = trained(ranks, strategy, steps_in_backward=False, mixed_precision=half)
    assert imposed_plan(ddp) is None
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
