"""What a step can change, as a table: every kind of thing, at every moment, in every way that makes sense.

Each cell is an engine that is right but for one thing. Most make a tensor wrong; the others leave something
changed around it. Invariant: but for its cell, an engine does what eager DDP does.
"""

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpopt.cases.case import Case
from ddpopt.judge.engines.engine import Engine

WIDTH = 6
LATE = 5
"""Steps that are right before a cell of the trajectory is not."""


@dataclass(frozen=True)
class Cell:
    """A place in the table.

    Attributes:
        what: the kind of thing that is wrong.
        when: the moment at which it becomes wrong.
        how: the way in which it is wrong.
    """

    what: str
    when: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}, {self.when}, {self.how}"


class Small(nn.Module):
    """Two layers with BatchNorm between them, and an attribute that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        result: Tensor = self.last(self.norm(self.first(x)).relu())
        return result


def inputs(rank: int, step: int) -> tuple[tuple[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(10, WIDTH, generator=generator),), {}


CASE = Case("cells", Small, inputs, "two layers and BatchNorm")


class Right(Engine):
    """DDP, taken apart so that a cell can act at each moment."""

    name = "right"
    cell: Cell | None = None

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        self.inner = DistributedDataParallel(model, process_group=group)
        self.before: dict[Any, Tensor] = {}
        self.held: list[Any] = []
        self.pending = False
        self.backwards = 0
        self.steps = 0
        self.batch: int | None = None
        self.output: Tensor | None = None
        first = next(iter(model.parameters()))
        get_gradient_edge(first).node.register_hook(lambda *_: self.now("during backward"))
        return self.forward

    def no_sync(self) -> Any:
        return self.inner.no_sync()

    def forward(self, x: Tensor) -> Any:
        self.batch = self.batch or len(x)
        self.args = [x]
        trains = torch.is_grad_enabled() and self.model.training
        if not trains and not self.model.training and not torch.is_grad_enabled():
            return self.evaluated(x)
        self.output = self.inner(x)
        self.now("forward" if trains else "another mode")
        if len(x) != self.batch:
            self.now("a smaller batch, forward")
        self.pending = trains
        return self.output

    def evaluated(self, x: Tensor) -> Any:
        self.output = self.inner(x)
        self.now("evaluation between" if self.pending else "evaluation")
        return self.output

    def backward(self, loss: Tensor) -> None:
        self.now("between forward and backward")
        super().backward(loss)
        self.pending = False
        self.backwards += 1
        self.now("after backward")
        if self.steps >= 2:
            self.now("after backward, from the third step on")
        if self.steps >= LATE:
            self.now("after backward, late")
        if self.backwards > 1:
            self.now("a second backward")
        if self.batch != len(self.args[0]):
            self.now("a smaller batch")
        if not self.model.training:
            self.now("a backward in evaluation mode")

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self.backwards = 0

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        made: Any = super().optimizer(kind, **settings)
        self.made = made
        own = made.step

        def step() -> None:
            own()
            self.steps += 1
            self.now("optimizer")
            if self.steps >= 2:
                self.now("optimizer, from the second step on")
            if self.steps > LATE:
                self.now("optimizer, late")

        made.step = step
        return made

    def now(self, when: str) -> None:
        """Do what the cell does at this moment."""
        if self.cell is not None and self.cell.when == when:
            with nullcontext() if self.cell.what == "settings" else torch.no_grad():
                ACTIONS[self.cell.what](self, self.cell.how)


# ---------------------------------------------------------------------------------------------- tensors


def changed(engine: Right, key: Any, tensor: Tensor, how: str) -> None:
    """Make a tensor wrong, in its memory."""
    before = engine.before.get(key)
    engine.before[key] = tensor.detach().clone()
    if how == "stale":
        tensor.copy_(tensor * 0.5 if before is None or before.shape != tensor.shape else before)
    elif how == "another rank's":
        other = tensor.detach().clone()
        dist.broadcast(other, 0, group=engine.group)
        tensor.copy_(other)
    else:
        HOW[how](tensor)


def one_row(tensor: Tensor) -> None:
    tensor[:1].zero_()


HOW: dict[str, Callable[[Tensor], object]] = {
    "zero": Tensor.zero_,
    "sign": Tensor.neg_,
    "one row": one_row,
    "bias": lambda tensor: tensor.mul_(1.0001),
    "small bias": lambda tensor: tensor.mul_(1.00001),
    "twice": lambda tensor: tensor.mul_(2),
    "last bit": lambda tensor: tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf))),
    "not a number": lambda tensor: tensor.fill_(torch.nan),
}
VALUES = ("zero", "sign", "one row", "bias", "twice", "last bit", "not a number", "stale")


def of_weight(engine: Right, how: str) -> None:
    changed(engine, "weight", engine.model.get_parameter("last.weight").data, how)


def of_gradient(engine: Right, how: str) -> None:
    gradient = engine.model.get_parameter("last.weight").grad
    if gradient is not None:
        changed(engine, "gradient", gradient, how)


def of_output(engine: Right, how: str) -> None:
    if engine.output is not None:
        changed(engine, "output", engine.output.data, how)


def of_input(engine: Right, how: str) -> None:
    changed(engine, "input", engine.args[0].data, how)


def of_buffer(engine: Right, how: str) -> None:
    changed(engine, "buffer", engine.model.get_buffer("norm.running_mean"), how)


def of_optimizer(engine: Right, how: str) -> None:
    for parameter, state in engine.made.state.items():
        if parameter is engine.model.get_parameter("last.weight"):
            changed(engine, "momentum", state["momentum_buffer"], how)


# ----------------------------------------------------------------------------------------------- memory


def of_memory(engine: Right, how: str) -> None:
    first = engine.model.get_parameter("first.weight")
    last = engine.model.get_parameter("last.weight")
    if how == "gradients share it" and first.grad is not None and last.grad is not None:
        both = torch.cat([first.grad.flatten(), last.grad.flatten()[1:], first.new_zeros(1)])
        size = first.numel()
        both[size - 1 : 2 * size - 1] = last.grad.flatten()
        first.grad = both[:size].view_as(first)
        last.grad = both[size - 1 : 2 * size - 1].view_as(last)
    elif how == "a gradient is the engine's" and last.grad is not None:
        kept = engine.before.setdefault("kept", torch.empty_like(last))
        kept.copy_(last.grad)
        last.grad = kept
    elif how == "a parameter moves":
        last.data = last.data.clone()
    elif how == "it grows":
        engine.held.append(torch.ones(256))


# ---------------------------------------------------------------------------------------- around a step


def of_random(engine: Right, how: str) -> None:
    draws: dict[str, Callable[[], object]] = {
        "torch's": lambda: torch.rand(1),
        "Python's": random.random,
        "NumPy's": np.random.rand,
    }
    draws[how]()


SWITCHES: dict[str, tuple[Callable[[Any], object], Any, Any]] = {
    "gradients": (torch._C._set_grad_enabled, False, True),
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default device": (torch.set_default_device, "meta", None),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "products": (torch.set_float32_matmul_precision, "medium", "highest"),
    "anomaly detection": (torch.autograd.set_detect_anomaly, True, False),
    "threads": (torch.set_num_threads, 2, 1),
    "denormals": (torch.set_flush_denormal, True, False),
    "autocast": (lambda on: torch.set_autocast_enabled("cpu", on), True, False),
    "warnings": (torch.set_warn_always, True, False),
    "fast attention": (torch.backends.mha.set_fastpath_enabled, False, True),
}


def of_settings(engine: Right, how: str) -> None:
    switch, on, _ = SWITCHES[how]
    switch(on)


def of_process(engine: Right, how: str) -> None:
    if how == "environment":
        os.environ["CELL"] = str(engine.backwards + engine.steps)
    elif how == "directory":
        os.chdir("/" if os.getcwd() != "/" else "/tmp")
    elif how == "thread":
        threading.Thread(target=wait_for_ever, daemon=True).start()
    elif how == "recursion limit":
        import sys

        sys.setrecursionlimit(sys.getrecursionlimit() + 1)


WAITING = threading.Event()


def wait_for_ever() -> None:
    WAITING.wait(60)


def of_collectives(engine: Right, how: str) -> None:
    dist.all_reduce(torch.ones(3), group=None if how == "in the default group" else engine.group)


def of_side_effects(engine: Right, how: str) -> None:
    model: Any = engine.model
    model.forwards += 1


def of_model(engine: Right, how: str) -> None:
    model: Any = engine.model
    changes: dict[str, Callable[[], object]] = {
        "an attribute": lambda: setattr(model.first, "extra", 1),
        "a hook": lambda: model.first.register_forward_hook(nothing),
        "a hook on a parameter": lambda: model.last.weight.register_post_accumulate_grad_hook(nothing),
        "a buffer that is not saved": lambda: model.norm._non_persistent_buffers_set.add("running_mean"),
        "another order": lambda: move_first_to_end(model._modules),
        "another type": lambda: setattr(model.first, "__class__", OtherLinear),
    }
    changes[how]()


class OtherLinear(nn.Linear):
    """Another class that does the same."""


def nothing(*_: Any) -> None:
    """A hook that does nothing."""


def move_first_to_end(parts: dict[str, Any]) -> None:
    name = next(iter(parts))
    parts[name] = parts.pop(name)


ACTIONS: dict[str, Callable[[Right, str], None]] = {
    "parameter": of_weight,
    "gradient": of_gradient,
    "output": of_output,
    "input": of_input,
    "buffer": of_buffer,
    "optimizer state": of_optimizer,
    "memory": of_memory,
    "random state": of_random,
    "settings": of_settings,
    "process": of_process,
    "collectives": of_collectives,
    "model": of_model,
    "side effects": of_side_effects,
}
RAN = ("forward", "between forward and backward", "after backward", "evaluation", "evaluation between")
LATER = ("after backward, from the third step on", "a second backward", "a smaller batch")
MODEL = (
    "an attribute", "a hook", "a hook on a parameter", "a buffer that is not saved", "another order",
    "another type",
)  # fmt: skip
ROWS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("gradient", ("after backward", *LATER, "a backward in evaluation mode"), VALUES),
    (
        "output",
        (
            "forward", "during backward", "after backward", "evaluation", "evaluation between",
            "another mode", "a smaller batch, forward",
        ),
        VALUES,
    ),
    ("parameter", (*RAN, "optimizer", "optimizer, from the second step on"), VALUES),
    ("buffer", (*RAN, "during backward"), VALUES),
    ("output", ("forward", "after backward", "evaluation"), ("another rank's",)),
    ("input", ("between forward and backward",), ("another rank's",)),
    ("input", ("forward", "between forward and backward", "after backward", "evaluation"), VALUES),
    ("optimizer state", ("optimizer", "optimizer, from the second step on", "after backward"), VALUES),
    ("memory", ("after backward",), ("gradients share it", "a gradient is the engine's")),
    ("memory", ("after backward", "forward", "evaluation", "optimizer"), ("a parameter moves",)),
    ("memory", ("forward", "after backward", "optimizer"), ("it grows",)),
    ("random state", RAN, ("torch's", "Python's", "NumPy's")),
    ("settings", ("forward", "after backward", "evaluation"), tuple(SWITCHES)),
    ("process", RAN, ("environment", "directory", "thread", "recursion limit")),
    ("model", (*RAN, "optimizer"), MODEL),
    ("collectives", ("forward", "between forward and backward", "after backward"), ("in the default group",)),
    ("collectives", ("evaluation", "evaluation between", "another mode"), ("more", "in the default group")),
    ("side effects", (*RAN, "another mode"), ("twice",)),
)  # fmt: skip
LATE_ROWS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("gradient", ("after backward, late",), (*VALUES, "small bias")),
    ("optimizer state", ("after backward, late", "optimizer, late"), (*VALUES, "small bias")),
    ("parameter", ("after backward, late", "optimizer, late"), (*VALUES, "small bias")),
    ("buffer", ("after backward, late", "optimizer, late"), (*VALUES, "small bias")),
    ("gradient", ("after backward",), ("small bias",)),
    ("parameter", ("optimizer",), ("small bias",)),
    ("optimizer state", ("optimizer",), ("small bias",)),
)
"""What single steps from eager's parameters do not show, and small errors that add up."""
NOT_SEEN = {
    ("settings", "evaluation", "gradients"): "gradients are off in an evaluation, and on again after it",
    ("settings", "evaluation", "fast attention"): "the judge itself switches it off while it evaluates",
    ("gradient", "a second backward", "last bit"): "an engine may add up reduced gradients in another order",
}
"""Cells that the judge cannot find, with the reason."""


def cells(rows: Sequence[tuple[str, Sequence[str], Sequence[str]]] = ROWS) -> Iterator[Cell]:
    """All cells of a table."""
    for what, moments, ways in rows:
        for when, how in itertools.product(moments, ways):
            if (what, when, how) not in NOT_SEEN:
                yield Cell(what, when, how)


def engine_of(cell: Cell | None, *, exact: bool = True) -> Right:
    """The engine with a cell's fault; without one, a right engine."""
    engine = Right("right" if cell is None else str(cell))
    engine.exact = exact
    engine.cell = cell
    return engine


def restore() -> None:
    """Put back what cells leave changed in this process."""
    for switch, _, off in SWITCHES.values():
        switch(off)
    os.environ.pop("CELL", None)
