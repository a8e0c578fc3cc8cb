"""What a compiled graph can do wrong, as a table of backends: each is `aot_eager` but for one thing.

A backend sees three kinds of graphs: forward and backward of a training step, and whole graphs where nothing
needs a gradient. Invariant: but for its cell, a backend computes what ``aot_eager`` does.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from ddpopt.cases.case import Case
from tests.selftest.cells import (
    SWITCHES,
    VALUES,
    WIDTH,
    Cell,
    Small,
    changed,
    inputs,
    of_process,
    of_random,
)

ROWS_OF_A_BATCH = 10


class Constant(Small):
    """Without the attribute that counts forwards: Dynamo would compile another graph for each number."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)).relu())
        return result


CASE = Case("backend cells", Constant, inputs, "two layers and BatchNorm")


class DamagedBackend:
    """A backend with a cell's fault.

    Args:
        cell: the fault; None for none.
    """

    def __init__(self, cell: Cell | None) -> None:
        self.cell = cell
        self.before: dict[Any, Tensor] = {}
        self.held: list[Tensor] = []
        self.calls = 0
        self.compiled = 0
        self.backwards = self.steps = 0
        self.group: Any = None

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.compiled += 1
        backend: Any = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("evaluation"),
        )
        return backend(gm, inputs)

    def _compiler(self, kind: str) -> Callable[..., Any]:
        def compiler(gm: Any, _: Any) -> Any:
            context = TracingContext.try_get()
            metadata: Any = None if context is None else context.fw_metadata
            mutated = 0 if metadata is None else metadata.num_mutated_inp_runtime_indices
            own = 0 if metadata is None else metadata.num_outputs
            number = self.compiled

            def run(*args: Any) -> Any:
                outputs = list(gm(*args))
                for when in self._moments(kind, args, number):
                    if self.cell is not None and self.cell.when == when:
                        parts = {
                            "buffer": outputs[:mutated] if kind != "backward" else [],
                            "output": outputs[mutated : mutated + own] if kind != "backward" else [],
                            "saved": outputs[mutated + own :] if kind == "forward" else [],
                            "gradient": outputs if kind == "backward" else [],
                            "parameter": [each for each in args if _is_weight(each)],
                            "input": [each for each in args if _is_batch(each)],
                        }
                        with nullcontext() if self.cell.what == "settings" else torch.no_grad():
                            self._act(outputs, parts)
                return outputs

            run._boxed_call = False  # type: ignore[attr-defined]  # as functorch asks for it
            return run

        return compiler

    def _moments(self, kind: str, args: Sequence[Any], number: int) -> Iterator[str]:
        self.calls += 1
        yield kind
        if kind == "backward":
            self.backwards += 1
            if self.backwards >= 3:
                yield "backward, from the third step on"
        if number > 1:
            yield f"{kind}, after another compilation"
        batch = next((len(each) for each in args if _is_batch(each)), ROWS_OF_A_BATCH)
        if batch != ROWS_OF_A_BATCH:
            yield f"{kind}, of a smaller batch"

    def _act(self, outputs: list[Any], parts: dict[str, list[Any]]) -> None:
        assert self.cell is not None
        what, how = self.cell.what, self.cell.how
        if what in parts:
            tensors = [each for each in parts[what] if isinstance(each, Tensor) and each.is_floating_point()]
            largest = max(tensors, key=Tensor.numel, default=None)
            if largest is not None:
                engine: Any = self
                changed(engine, what, largest.data, how)
        elif what == "memory":
            self._memory(outputs, parts, how)
        elif what == "settings":
            switch, on, _ = SWITCHES[how]
            switch(on)
        elif what == "random state":
            of_random(None, how)  # type: ignore[arg-type]  # it takes any
        elif what == "process":
            self.steps += 1
            of_process(self, how)  # type: ignore[arg-type]  # it needs only counts
        elif what == "collectives":
            dist.all_reduce(torch.ones(3))
        else:
            raise AssertionError(what)

    def _memory(self, outputs: list[Any], parts: dict[str, list[Any]], how: str) -> None:
        if how == "it grows":
            self.held.append(torch.ones(256))
            return
        kind = "gradient" if parts["gradient"] else "output"
        for place, each in enumerate(outputs):
            if any(each is one for one in parts[kind]) and isinstance(each, Tensor) and each.dim() == 2:
                kept = self.before.setdefault((kind, place, tuple(each.shape)), torch.empty_like(each))
                outputs[place] = kept.copy_(each)


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == (WIDTH, WIDTH)


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == WIDTH and len(value) != WIDTH


GRAPHS = ("forward", "backward", "evaluation")
SEEN = tuple(how for how in VALUES if how != "last bit")
"""A backend that is not known to compute as eager may round otherwise."""
ROWS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    (
        "output",
        (
            "forward", "evaluation", "forward, after another compilation", "forward, of a smaller batch",
            "evaluation, after another compilation",
        ),
        SEEN,
    ),
    ("output", ("forward", "evaluation"), ("another rank's",)),
    ("saved", ("forward",), SEEN),
    (
        "gradient",
        (
            "backward", "backward, from the third step on", "backward, after another compilation",
            "backward, of a smaller batch",
        ),
        SEEN,
    ),
    ("buffer", ("forward",), SEEN),
    ("parameter", GRAPHS, VALUES),
    ("input", ("forward", "evaluation"), VALUES),
    ("memory", GRAPHS, ("a buffer that is used again",)),
    ("memory", ("forward", "backward"), ("it grows",)),
    ("random state", GRAPHS, ("torch's", "Python's", "NumPy's")),
    ("settings", GRAPHS, tuple(SWITCHES)),
    ("process", GRAPHS, ("environment", "directory", "thread", "recursion limit")),
    ("collectives", GRAPHS, ("in the default group",)),
)  # fmt: skip
RESTORED = "Dynamo or autograd puts it back after the compiled code, so nothing stays changed"
NOT_SEEN: dict[tuple[str, str, str], str] = {
    ("settings", "forward", "gradients"): RESTORED,
    ("settings", "forward", "autocast"): RESTORED,
    ("settings", "backward", "gradients"): RESTORED,
    ("settings", "backward", "autocast"): RESTORED,
    ("settings", "evaluation", "gradients"): RESTORED,
    ("settings", "evaluation", "autocast"): RESTORED,
    ("settings", "step", "gradients"): RESTORED,
    ("settings", "step", "autocast"): RESTORED,
    ("settings", "step, from the third on", "gradients"): RESTORED,
    ("settings", "step, from the third on", "autocast"): RESTORED,
    ("input", "forward", "last bit"): "an input that a graph may write to is judged up to rounding",
    ("input", "evaluation", "last bit"): "an input that a graph may write to is judged up to rounding",
    ("memory", "backward", "a buffer that is used again"): "autograd copies a gradient that others hold",
}
"""Cells that the judge cannot find, with the reason."""


def cells(rows: Sequence[tuple[str, Sequence[str], Sequence[str]]] = ROWS) -> Iterator[Cell]:
    """All cells of a table."""
    for what, moments, ways in rows:
        for when, how in itertools.product(moments, ways):
            if (what, when, how) not in NOT_SEEN:
                yield Cell(what, when, how)


class DamagedStep(DamagedBackend):
    """A backend of ``ddpopt.train_step`` with a cell's fault; it gets one graph for each step function."""

    def __call__(self, gm: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = list(gm(*args))
            self.steps += 1
            moments = ["step"] + (["step, from the third on"] if self.steps >= 3 else [])
            if self.cell is not None and self.cell.when in moments:
                computed = [each for each in outputs if isinstance(each, Tensor)]
                parts = {
                    "output": [each for each in computed if _is_batch(each)],
                    "loss": [each for each in computed if each.dim() == 0],
                    "gradient": [each for each in computed if _is_weight(each)],
                    "parameter": [each for each in args if _is_weight(each)],
                    "input": [each for each in args if _is_batch(each)],
                }
                with nullcontext() if self.cell.what == "settings" else torch.no_grad():
                    self._act(outputs, parts)
            return outputs

        return run


MOMENTS = ("step", "step, from the third on")
STEP_ROWS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("parameter", MOMENTS, VALUES),
    ("gradient", MOMENTS, SEEN),
    ("output", MOMENTS, SEEN),
    ("input", MOMENTS, SEEN),
    ("memory", ("step",), ("it grows",)),
    ("random state", MOMENTS, ("torch's", "Python's", "NumPy's")),
    ("settings", MOMENTS, tuple(SWITCHES)),
    ("process", MOMENTS, ("environment", "directory", "thread", "recursion limit")),
    ("collectives", MOMENTS, ("in the default group",)),
)
"""What the graph of a step can do wrong."""
