"""A model in one mode, as an option's step sees it, and what an option may do with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ddpopt.cases.case import Case, step_seed
from ddpopt.judge.judging.record import Record
from ddpopt.judge.modes import Gives
from ddpopt.judge.option_cases import differing
from ddpopt.judge.parallel import Parallel
from ddpopt.judge.visible import Sight
from ddpopt.observation.compilations import Compilations


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
        rank: in the group that trains together.
        size: of that group.
        group: its process group.
        device: where the model belongs.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device


class Trainer:
    """One model in one mode, as an option's step sees it.

    Attributes:
        case: what is trained.
        place: where.
        parallel: the model.
        make: makes another one, from the same weights.
        other: one that an option trains in the same process.
        step: index of the step that runs.
        record: what is known so far.
        extras: what a script can see of the step (`sight` finds it), and what the option leaves.
        compilations: what Dynamo compiles meanwhile.
    """

    def __init__(self, case: Case, place: Place, make: Callable[[], Parallel]) -> None:
        self.case = case
        self.place = place
        self.make = make
        self.parallel = make()
        self.other: Parallel | None = None
        self.sight = Sight((case.inputs, case.loss), self.parallel.model)
        self.step = 0
        self.last_loss: Tensor | None = None
        self.extras: dict[str, Any] = {}
        self.compilations = Compilations()
        self.record = Record(self.parallel.state(), planned=self.parallel.planned)

    @property
    def ddp(self) -> Any:
        """Its DDP module; None where the mode has none."""
        return self.parallel.ddp

    def loss(self, part: int = 0) -> Tensor:
        """Run a forward on inputs of this rank, step and part of the step."""
        loss = self.case.loss(self.forward(part))
        self.sight.reach(loss)
        self.last_loss = loss.detach()
        return loss

    def forward(self, part: int = 0) -> Any:
        """The output of the model for such inputs."""
        args, kwargs = self.inputs(part)
        self.sight.calls(args, kwargs)
        output = self.parallel.call(*args, **kwargs)
        self.extras |= self.sight.returns(output)
        return output

    def inputs(self, part: int) -> Any:
        """Such inputs, and the random numbers that go with them."""
        source = self.place.rank + part * self.place.size
        torch.manual_seed(step_seed(source, self.step))
        return on_device(self.case.inputs(source, self.step), self.place.device)

    def backward(self, loss: Tensor) -> None:
        """Run a backward as the mode runs it."""
        with self.parallel.around_backward():
            torch.autograd.backward(loss)
        self.parallel.after_backward()


def plain_step(trainer: Trainer) -> None:
    """One forward, one backward."""
    trainer.backward(trainer.loss())


@dataclass(frozen=True)
class Option:
    """One way to use a data-parallel model: what it changes, how it is trained, what may be asked of it.

    Attributes:
        name: as in ``--options``.
        about: one sentence.
        needs: what of DDP it needs: ``"nothing"``: any mode can; ``"arguments"``; ``"module"``.
        ddp_kwargs: DDP's arguments, over the case's own.
        adapt: makes another case of a case.
        grouped: the same for one run, whose process group it is given.
        for_model: DDP's arguments that name parameters of the model.
        configure: once the model is data-parallel: hooks, communication hooks.
        around: what the whole training runs in, for instance ``ddp.join()``.
        steps: how many steps a rank takes, given how many are asked for; may differ between ranks.
        before_step: at the start of each step.
        take_step: forward and backward of one step, however often.
        finish_step: between the backward and the optimizer: clipping, unscaling.
        keeps_gradients: whether gradients are zeroed in place instead of dropped.
        local: whether the reduced gradient is the mean over ranks of what the model alone computes.
        comm_dtype: in which gradients are sent, if not in their own dtype.
        probes: whether one more step, which nothing reduces, may be asked for.
        more_graphs: whether ranks may compile more graphs than the model alone, and others than their peers.
        sends_as_usual: whether each step sends each bucket once, in order and on all ranks alike, and the
            model sends no others.
        groups: from the world size to the groups of ranks that train together, where not all do together.
        forwards: how many forwards one backward goes through.
        computes: in which dtype operations round, if not in that of their parameters: uncompiled code then
            keeps casts that compiled code makes again, so they differ in their last bits.
        compresses: whether what is sent depends on the order of parameters in a bucket.
    """

    name: str
    about: str
    needs: Gives = "nothing"
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[Case], Case] = lambda case: case
    grouped: Callable[[Case, dist.ProcessGroup], Case] = lambda case, _: case
    for_model: Callable[[nn.Module], dict[str, Any]] = lambda _: {}
    configure: Callable[[Trainer], None] = lambda _: None
    around: Callable[[Trainer], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
    steps: Callable[[Place, int], int] = lambda _, steps: steps
    before_step: Callable[[Trainer], None] = lambda _: None
    take_step: Callable[[Trainer], None] = plain_step
    finish_step: Callable[[Trainer], None] | None = None
    keeps_gradients: bool = False
    local: bool = True
    comm_dtype: torch.dtype | None = None
    probes: bool = False
    more_graphs: bool = False
    sends_as_usual: bool = True
    groups: Callable[[int], list[list[int]]] = lambda size: [list(range(size))]
    forwards: int = 1
    computes: torch.dtype | None = None
    compresses: bool = False

    def arguments(self, case: Case, model: nn.Module) -> dict[str, Any]:
        """DDP's arguments for a model of a case under this option."""
        return {**differing(case, self.ddp_kwargs).ddp_kwargs, **self.for_model(model)}


def on_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in containers to a device; what is a leaf stays one."""

    def moved(leaf: Any) -> Any:
        there = leaf.to(device) if isinstance(leaf, Tensor) else leaf
        is_new_leaf = there is not leaf and leaf.is_leaf
        return there.detach().requires_grad_(leaf.requires_grad) if is_new_leaf else there

    return tree_map(moved, value)
