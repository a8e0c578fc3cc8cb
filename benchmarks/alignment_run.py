"""One rank's part of `benchmarks.alignment`: run one case at one cap in one mode.

Invariant: whatever the mode does to torch, even if it crashes, the next run in this process starts clean.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.gate.overlap import Measurement, measure
from ddpopt.ranks.group import Ranks
from ddpopt.testing import Case, resolve

OWN_CAP = "own"
DEFAULT_CAP = "default"
CAP_ARGUMENTS = ("bucket_cap_mb", "bucket_cap_mb_list")

Buckets = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run on one rank.

    Attributes:
        measured: potential and buckets; None if the run crashed.
        segments: the number of pieces the first step's graphs were cut into; None in modes that compile
            nothing.
        planned: parameter names of each bucket that ddpopt imposed on the reducer; None if it imposed none.
        crash: type of the exception that ended the run; empty if there was none.
        message: the exception's first line.
    """

    measured: Measurement | None
    segments: int | None = None
    planned: Buckets | None = None
    crash: str = ""
    message: str = ""


@dataclass(frozen=True)
class Run:
    """One case at one cap in one mode; a task for ranks.

    Attributes:
        case: name of a case in the corpus, or a target ``package.module:name``.
        cap: MiB as text, ``"default"``, or ``"own"`` for the cap that the case itself sets.
        mode: a key of `MODES`.
        backend: name of a Dynamo backend.
    """

    case: str
    cap: str
    mode: str
    backend: str

    def __call__(self, ranks: Ranks) -> Outcome:
        """Run it on this rank.

        Args:
            ranks: the ranks that run it together.

        Returns:
            The outcome, which may be a crash.
        """
        case = resolve(self.case)
        with _clean_torch():
            return self._run(case, ranks.rank)

    def _run(self, case: Case, rank: int) -> Outcome:
        try:
            ddp = DistributedDataParallel(case.model(), **ddp_arguments(case, self.cap))
            return MODES[self.mode](case, ddp, self.backend, rank)
        except Exception as error:  # a crash is a result here
            cause = getattr(error, "inner_exception", error)  # Dynamo wraps what a backend raises
            message = str(cause).strip().partition("\n")[0]
            return Outcome(None, crash=type(cause).__name__, message=message)


def ddp_arguments(case: Case, cap: str) -> dict[str, Any]:
    """DDP's arguments for a case at a cap.

    Args:
        case: the case, with the arguments that it needs.
        cap: ``"own"`` leaves them unchanged; anything else replaces the case's own cap.

    Returns:
        Keyword arguments of ``DistributedDataParallel``.
    """
    if cap == OWN_CAP:
        return dict(case.ddp_kwargs)
    others = {key: value for key, value in case.ddp_kwargs.items() if key not in CAP_ARGUMENTS}
    return others if cap == DEFAULT_CAP else {**others, "bucket_cap_mb": float(cap)}


def caps_of(case: Case, asked: Sequence[str]) -> tuple[str, ...]:
    """The caps at which a case runs: the requested ones, and its own if it sets one."""
    fixed = any(key in case.ddp_kwargs for key in CAP_ARGUMENTS)
    named = tuple(cap for cap in asked if cap != OWN_CAP)
    return (*named, OWN_CAP) if fixed else named


def _run_eager(case: Case, ddp: DistributedDataParallel, backend: str, rank: int) -> Outcome:  # noqa: ARG001
    # An operator such as cond compiles its own body; torch's optimizer must not be active then.
    with torch._dynamo.config.patch(optimize_ddp=False):
        return Outcome(measure(ddp, lambda step: case.step(ddp, rank, step)))


def _run_torch(case: Case, ddp: DistributedDataParallel, backend: str, rank: int) -> Outcome:
    """Default torch.compile: Dynamo splits with its own DDPOptimizer."""
    return _run_compiled(case, ddp, backend, rank, optimize_ddp=True)


def _run_whole(case: Case, ddp: DistributedDataParallel, backend: str, rank: int) -> Outcome:
    """torch.compile without any optimizer for DDP."""
    return _run_compiled(case, ddp, backend, rank, optimize_ddp=False)


def _run_compiled(
    case: Case, ddp: DistributedDataParallel, backend: str, rank: int, optimize_ddp: bool
) -> Outcome:
    counted = _Counted(torch._dynamo.lookup_backend(backend))
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        step = torch.compile(ddp, backend=counted)
        measured = measure(ddp, lambda index: case.step(step, rank, counted.at_step(index)))
    return Outcome(measured, counted.calls)


def _run_split(case: Case, ddp: DistributedDataParallel, backend: str, rank: int) -> Outcome:
    return _run_ddpopt(case, ddp, backend, rank, "split")


def _run_inline(case: Case, ddp: DistributedDataParallel, backend: str, rank: int) -> Outcome:
    return _run_ddpopt(case, ddp, backend, rank, "inline")


def _run_ddpopt(
    case: Case, ddp: DistributedDataParallel, backend: str, rank: int, strategy: Literal["split", "inline"]
) -> Outcome:
    counted = _Counted(torch._dynamo.lookup_backend(backend))
    step = ddpopt.compile(ddp, backend=counted, strategy=strategy, fallback=None)
    measured = measure(ddp, lambda index: case.step(step, rank, counted.at_step(index)))
    plan = imposed_plan(ddp)
    if plan is None:
        return Outcome(measured, counted.calls)
    segments = len(plan.segments) if strategy == "split" else counted.calls
    return Outcome(measured, segments, tuple(bucket.params for bucket in plan.buckets))


MODES: Mapping[str, Callable[[Case, DistributedDataParallel, str, int], Outcome]] = {
    "eager": _run_eager,
    "whole": _run_whole,
    "torch": _run_torch,
    "split": _run_split,
    "inline": _run_inline,
}
"""Ways to run a data-parallel step, by their names on the command line."""


class _Counted:
    """A backend that counts its calls in the first step; recompilations come later."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.calls = 0
        self._backend = backend
        self._first = True

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        self.calls += self._first
        return self._backend(gm, example_inputs, **options)

    def at_step(self, index: int) -> int:
        """Record which step begins, and return it."""
        self._first = index == 0
        return index


@contextmanager
def _clean_torch() -> Iterator[None]:
    """Clear compiled code and active modules before and after, even if a crash in DDP's forward left some."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        # torch's optimizer can fail with this still set, and Dynamo then splits unrelated models.
        DistributedDataParallel._active_ddp_module = None
        # Free reducers before their process group: the last owner destroys it.
        gc.collect()
