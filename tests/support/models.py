"""Small models, plans that are any partition of their parameters, and training that two runs can share."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.ready_hooks import ReadyHooks
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan

Gradients = list[Tensor | None]


class Tower(nn.Module):
    """Layers in a row, one of them optional, one frozen, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.optional = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, use_optional: bool = True) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if use_optional:
            x = x + self.optional(x)
        scaled: Tensor = self.frozen(x) * self.scale
        return scaled


def towers(**arguments: Any) -> Any:
    """A tower under DDP."""
    return DistributedDataParallel(Tower(), **arguments)


def step(ddp: Any, **arguments: Any) -> None:
    """A backward through a tower."""
    torch.autograd.backward(ddp(torch.ones(2, 6), **arguments).sum())


def plan_of(specs: Sequence[Sequence[ParamSpec]]) -> Plan:
    """A plan with these buckets and nothing else."""
    return Plan(tuple(Bucket.of(index, bucket, 0, "drawn") for index, bucket in enumerate(specs)), (), ())


def params_of(plan: Any) -> list[tuple[str, ...]]:
    """The parameters of each bucket, of a plan or of what was observed."""
    return [bucket.params for bucket in plan.buckets]


def arbitrary_plan(ddp: DistributedDataParallel, seed: int) -> Plan:
    """Some partition of the trainable parameters into buckets, in some order; equal for equal seeds."""
    choice = random.Random(seed)
    specs = list(specs_from_ddp(ddp))
    choice.shuffle(specs)
    return plan_of(list(_buckets(specs, choice)))


def _buckets(specs: Sequence[ParamSpec], choice: random.Random) -> Iterator[list[ParamSpec]]:
    rest = list(specs)
    while rest:
        first = rest[0]
        alike = [s for s in rest if (s.dtype, s.device) == (first.dtype, first.device) and not s.sparse]
        bucket = [first] if first.sparse else alike[: choice.randint(1, 4)]
        rest = [spec for spec in rest if spec not in bucket]
        yield bucket


def hook_that_sees(ddp: Any, note: Callable[[tuple[str, ...]], None]) -> Callable[..., Any]:
    """A communication hook that averages as DDP does, and notes the parameters of each bucket it is given."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    group: dist.ProcessGroup = ddp.process_group

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        del state
        note(tuple(names[id(parameter)] for parameter in bucket.parameters()))
        return averaged(bucket, group)

    return hook


def changing(change: Callable[[Tensor], Tensor]) -> Callable[..., torch.futures.Future[Tensor]]:
    """A communication hook that sends nothing and gives back what a function makes of a bucket."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        del state
        return completed(change(bucket.buffer()))

    return hook


def completed(value: Tensor) -> torch.futures.Future[Tensor]:
    """What a communication hook returns that has its result already."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(value)
    return done


def averaged(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """What DDP itself would make of a bucket."""
    # waited for here: a future with a Python callback may outlive the group and hang its destruction
    dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
    return completed(bucket.buffer())


@contextmanager
def hand_overs(ddp: DistributedDataParallel, note: Callable[[str], None]) -> Iterator[None]:
    """Note each parameter whose gradient a module is handed from inside a compiled backward, when it is."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    hand_over = ReadyHooks.hand_over

    def noted(hooks: ReadyHooks, place: int, *others: Any) -> None:
        name = names.get(id(hooks.leaves[place].variable))
        if name is not None:
            note(name)
        hand_over(hooks, place, *others)

    with patch.object(ReadyHooks, "hand_over", noted):
        yield


def gradients_of(module: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def same(left: Sequence[Gradients], right: Sequence[Gradients], rounding: float = 0.0) -> bool:
    """Whether two runs gave equal gradients at each step, None only where both have None.

    `rounding` is how far an element may be off, relative to the largest of its tensor.
    """
    if [len(step) for step in left] != [len(step) for step in right]:
        return False
    pairs = [pair for steps in zip(left, right, strict=True) for pair in zip(*steps, strict=True)]
    return all(off(a, b) <= rounding for a, b in pairs)


def off(left: Tensor | None, right: Tensor | None) -> float:
    """How far a gradient is off, in parts of the largest element on the right; infinite if one is None."""
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    if torch.equal(left, right):
        return 0.0
    far = float((left - right).abs().max() / right.abs().max())
    return math.inf if math.isnan(far) else far


def roundings(left: Tensor | None, right: Tensor | None) -> float:
    """The same in roundings of that element."""
    far = off(left, right)
    return far if far == 0 or right is None else far / torch.finfo(right.dtype).eps


class Pair(nn.Module):
    """Two layers, of which a forward uses one or both."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, only: int | None = None) -> Any:
        """(batch, width) to the same shape, from each layer; None from one that is not used."""
        return [
            layer(x) if only in (None, at) else None for at, layer in enumerate((self.first, self.second))
        ]


def calling_inductor(gm: Any, inputs: Any) -> Any:
    """A backend of the user's, which calls Inductor."""
    return torch._dynamo.lookup_backend("inductor")(gm, inputs)
