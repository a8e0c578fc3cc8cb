"""Programs that hang, or differ, on many ranks only, and right ones that look like them.

Each is a case of a small model whose `kind` says what it does. Invariant: without its kind's branch, a
program is right on any number of ranks.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case

ODD_ONE = 5
"""The rank that differs."""
KNOWS_RANK = "an evaluation that knows its rank"
CAPS = {"bucket_cap_mb": 0.001}


class Net(nn.Module):
    """Three layers, of which a kind of program leaves one out, or sends something besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 24 if kind == "another model" and rank() == ODD_ONE else 16)
        self.kind = kind
        if kind == "a model that one rank announces" and rank() == ODD_ONE:
            dist.barrier()
        self.calls = 0
        self.writes_log = kind == "an attribute of rank 0" and rank() == 0
        if kind == "a hook on rank 0" and rank() == 0:
            self.first.register_forward_hook(averaged)
        if kind == "a log on rank 0" and rank() == 0:
            self.first.register_forward_hook(ignored)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.kind == "a branch on the rank" and rank() == ODD_ONE:
            return self.last(hidden)  # type: ignore[no-any-return]
        if self.kind == "a branch on data" and x[0, 0] > 1.5:
            return self.last(hidden)  # type: ignore[no-any-return]
        if self.kind == "a failing rank" and rank() == ODD_ONE:
            raise ValueError("a bad sample")
        return self.last(self.between(self.second(hidden)))  # type: ignore[no-any-return]

    def between(self, hidden: Tensor) -> Tensor:
        """What some kinds do besides."""
        if self.writes_log or (self.kind == "an average on rank 0" and rank() == 0):
            dist.all_reduce(hidden.detach().mean())
        if self.kind == "an average that matters":
            average = hidden.detach().mean()
            dist.all_reduce(average)
            hidden = hidden * average
        if self.kind == "a count that matters":
            count = torch.tensor(len(hidden))
            dist.all_reduce(count)
            hidden = hidden * count
        if self.kind in SENDS:
            SENDS[self.kind](hidden.detach(), self.training)
        if self.kind.startswith("a late counter"):
            self.late = getattr(self, "late", 0) + 1
            if self.kind == "a late counter that sends" and self.late > 2 and rank() == ODD_ONE:
                dist.all_reduce(torch.ones(1))
        if self.kind == "a constant of the rank" or (self.kind == KNOWS_RANK and not self.training):
            hidden = hidden * (1 + rank())
        if self.kind == "a counter":
            self.calls += 1
            hidden = hidden * self.calls
        if self.kind == "a counter outside":
            COUNTER.append(0)
            hidden = hidden * len(COUNTER)
        return hidden


def average(hidden: Tensor, _: bool) -> None:
    dist.all_reduce(hidden.mean())


def another_root(hidden: Tensor, _: bool) -> None:
    dist.broadcast(hidden.mean(), 1 if rank() == ODD_ONE else 0)


def another_reduction(hidden: Tensor, _: bool) -> None:
    dist.all_reduce(hidden.mean(), dist.ReduceOp.MAX if rank() == ODD_ONE else dist.ReduceOp.SUM)


def message_to_nobody(hidden: Tensor, _: bool) -> None:
    if rank() == ODD_ONE:
        dist.send(hidden.mean(), 0)


def message_to_a_rank(hidden: Tensor, _: bool) -> None:
    if rank() == 0:
        dist.send(hidden.mean(), 1)
    if rank() == 1:
        dist.recv(hidden.mean(), 0)


def evaluation_of_one(_: Tensor, is_training: bool) -> None:
    if rank() == ODD_ONE and not is_training:
        dist.barrier()


def metric(hidden: Tensor, is_training: bool) -> None:
    if not is_training:
        dist.all_reduce(hidden.mean())


SENDS = {
    "an average on all ranks": average,
    "another root": another_root,
    "another reduction": another_reduction,
    "a message to nobody": message_to_nobody,
    "a message that is received": message_to_a_rank,
    "an evaluation of rank 5": evaluation_of_one,
    "a metric": metric,
}
COUNTER: list[int] = []


def averaged(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    dist.all_reduce(output.detach().mean())


def ignored(*_: Any) -> None:
    """A hook that sends nothing."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def inputs(rank: int, step: int, kind: str = "") -> Call:
    generator = torch.Generator().manual_seed(100 * rank + step)
    if kind == "fewer batches" and (rank, step) == (ODD_ONE, 2):
        raise StopIteration
    more = kind == "another size" and (rank, step) == (ODD_ONE, 1)
    sizes = 4 + rank if kind == "sizes of ranks" else 4 + more
    return (torch.randn(sizes, 16, generator=generator),), {}


def case_of(kind: str, **ddp_kwargs: Any) -> Case:
    """A program of a kind, with more of DDP's arguments."""
    return Case(kind, partial(Net, kind), partial(inputs, kind=kind), "", ddp_kwargs={**CAPS, **ddp_kwargs})
