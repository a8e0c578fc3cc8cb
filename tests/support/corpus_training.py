"""Training a corpus case eagerly and compiled: what both must agree on, on any number of ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.ddp.impose import imposed_plan
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.models import hook_that_sees, roundings

STRATEGIES: tuple[Strategy, ...] = ("split", "inline")
RANKS_MATTER = (
    "experts_per_rank", "recommender", "ignored", "unused", "unused_static", "dropout", "buffers",
    "static_twice", "uneven_ranks", "synced_norm",
)  # fmt: skip
"""Cases that train on ranks by day too: ranks differ in them, or DDP does something else than average."""
STEPS = 3
CAP_MB = 0.5
# A re-associated sum of fp32 terms errs by a few roundings, which the layers before it amplify a little:
# thirty-two roundings of the largest element bound what was ever seen (eleven) from above.
ROUNDINGS = 32
RESUMMED = {"experts_per_rank", "several_outputs", "t5"}
"""Cases in which cuts move a sum: several segments read one value more than twice."""


Gradients = list[dict[str, Tensor | None]]


def arguments(case: Case) -> dict[str, Any]:
    own = dict(case.ddp_kwargs)
    return own if {"bucket_cap_mb", "bucket_cap_mb_list"} & own.keys() else {**own, "bucket_cap_mb": CAP_MB}


def wrapped(case: Case, ranks: Ranks) -> DistributedDataParallel:
    return DistributedDataParallel(case.model().to(ranks.device), **arguments(case))


def train(case: Case, ddp: DistributedDataParallel, call: Callable[..., Any], ranks: Ranks) -> Gradients:
    """The gradients of each step."""
    gradients = []
    for step in range(STEPS):
        torch.autograd.backward(case.on(ranks.device).step(call, ranks.rank, step))
        grads = ((name, parameter.grad) for name, parameter in ddp.module.named_parameters())
        gradients.append({name: None if grad is None else grad.to_dense().clone() for name, grad in grads})
        ddp.zero_grad()
    return gradients


def worst_difference(left: Gradients, right: Gradients) -> tuple[float, str]:
    """The largest distance in roundings of the largest element, and where."""
    pairs = enumerate(zip(left, right, strict=True))
    return max((roundings(a[n], b[n]), f"{n} at step {step}") for step, (a, b) in pairs for n in a)


def assert_trains_as_eager(case: Case, strategy: Strategy, ranks: Ranks) -> None:
    """Gradients of eager DDP and buckets of the plan, at every iteration and on every rank."""
    torch._dynamo.reset()
    # torch.cond compiles itself even in eager, and torch's optimizer would fail
    with torch._dynamo.config.patch(optimize_ddp=False):
        eager = wrapped(case, ranks)
        reference = train(case, eager, eager, ranks)
    torch._dynamo.reset()
    ddp = wrapped(case, ranks)
    sent: list[frozenset[str]] = []
    ddp.register_comm_hook(None, hook_that_sees(ddp, lambda names: sent.append(frozenset(names))))
    compiled = train(case, ddp, ddpopt.compile(ddp, backend="aot_eager", strategy=strategy), ranks)
    plan = imposed_plan(ddp)
    assert len({*ranks.gather(None if plan is None else plan.fingerprint)}) == 1

    difference, where = worst_difference(compiled, reference)

    assert plan is not None, "nothing was compiled"
    allowed = ROUNDINGS if (plan.cuts and case.name in RESUMMED) or ranks.size > 2 else 0.0
    assert sent == [frozenset(bucket.params) for bucket in plan.buckets] * STEPS
    assert difference <= allowed, f"{where} is off by {difference} roundings"
