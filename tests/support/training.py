"""Ways to use DDP, and a training loop that runs each of them: what two runs must agree on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ranks.group import Ranks
from tests.support.models import Gradients, Tower, gradients_of, hook_that_sees, same

STEPS = 4
Buckets = list[tuple[str, ...]]
Step = Callable[[DistributedDataParallel, int, Ranks], Tensor]


def batch(ranks: Ranks, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * ranks.rank + part)
    return torch.randn(5, 6, generator=generator).to(ranks.device)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def backward(total: Tensor) -> None:
    torch.autograd.backward(total)


def plain_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return loss(ddp(batch(ranks, step)))


def accumulating_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    with ddp.no_sync():
        backward(loss(ddp(batch(ranks, step, part=1))))
    return loss(ddp(batch(ranks, step)))


def shared_backward_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    first = loss(ddp(batch(ranks, step)))
    with ddp.no_sync():
        return first + loss(ddp(batch(ranks, step, part=1)))


def more_forwards_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    if ranks.rank == 0:
        ddp(batch(ranks, step, part=1))
    return plain_step(ddp, step, ranks)


def accumulating_somewhere_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return (accumulating_step if ranks.rank == 0 else plain_step)(ddp, step, ranks)


def unused_somewhere_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return loss(ddp(batch(ranks, step), use_optional=(step + ranks.rank) % 3 == 0))


def unused_on_others_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return loss(ddp(batch(ranks, step), use_optional=ranks.rank == 0))


def used_while_accumulating_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    with ddp.no_sync():
        backward(loss(ddp(batch(ranks, step, part=1), use_optional=ranks.rank == 0)))
    return loss(ddp(batch(ranks, step), use_optional=False))


@dataclass(frozen=True)
class Setting:
    """One way to use DDP."""

    step: Step = plain_step
    arguments: dict[str, Any] = field(default_factory=dict)
    keeps_gradients: bool = False


UNUSED = {"find_unused_parameters": True}
SETTINGS = {
    "default": Setting(),
    "static graph": Setting(arguments={"static_graph": True}),
    "static graph, unused on others": Setting(unused_on_others_step, {"static_graph": True}),
    "static graph, one backward": Setting(shared_backward_step, {"static_graph": True}),
    "unused somewhere": Setting(unused_somewhere_step, UNUSED),
    "used while accumulating": Setting(used_while_accumulating_step, UNUSED),
    "bucket view": Setting(arguments={"gradient_as_bucket_view": True}, keeps_gradients=True),
    "accumulation": Setting(accumulating_step),
    "one backward": Setting(shared_backward_step),
    "more forwards somewhere": Setting(more_forwards_step),
}


def build(setting: Setting, ranks: Ranks) -> DistributedDataParallel:
    model = Tower().to(ranks.device)
    return DistributedDataParallel(model, **setting.arguments)


def train(ddp: Any, setting: Setting, ranks: Ranks, seen: list[Buckets]) -> list[Gradients]:
    """Some steps of SGD; the gradients after each, and in `seen` the buckets of each."""
    gradients = []
    for step in range(STEPS):
        total = setting.step(ddp, step, ranks)
        seen.append([])
        backward(total)
        gradients.append(gradients_of(ddp.module))
        with torch.no_grad():
            for parameter in ddp.module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        ddp.zero_grad(set_to_none=not setting.keeps_gradients)
    return gradients


def alike(ranks: Ranks, left: list[Gradients], right: list[Gradients], rounding: float = 1e-5) -> bool:
    """Whether two runs agree: bitwise on two ranks, where a sum has but one order; else within rounding."""
    return same(left, right, 0.0 if ranks.size <= 2 else rounding)


def watch(ddp: DistributedDataParallel, seen: list[Buckets]) -> None:
    """Note the parameters of each bucket that is reduced."""
    ddp.register_comm_hook(None, hook_that_sees(ddp, lambda params: seen[-1].append(params)))


def raised(action: Callable[[], object]) -> tuple[str, str, float]:
    """Name and text of the error that an action raises, if any, and the seconds until then."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start
