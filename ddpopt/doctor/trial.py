"""Run a case for real: a DDP module on a process group of one rank, in eager and compiled, for a few steps.

Invariant: no setting of torch, no generator and no process group is left changed; a failure is a result.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt.dynamo.api
import ddpopt.dynamo.backend
from ddpopt.cases.case import Case
from ddpopt.ddp.reducer_buckets import ObservedBucket, running_buckets
from ddpopt.doctor.dynamo import Notes, cold_caches, taking_notes
from ddpopt.explanation.rehearsal import generators_kept

EAGER, TORCH, OURS = "eager DDP", "torch's DDPOptimizer", "ddpopt"


@dataclass(frozen=True)
class Trial:
    """One mode, run for a few steps.

    Attributes:
        mode: ``"eager DDP"``, ``"torch's DDPOptimizer"`` or ``"ddpopt"``.
        notes: what Dynamo wrote down.
        buckets: those of the running reducer after the last step; empty after a failure.
        failure: the error that ended it, in one line; empty if all steps ran.
        failed_step: the step that it ended, from 0.
        inline: whether ddpopt compiled every graph inline, by its own word.
    """

    mode: str
    notes: Notes
    buckets: tuple[ObservedBucket, ...] = ()
    failure: str = ""
    failed_step: int = 0
    inline: bool = False


def run_trial(case: Case, mode: str, ddp_kwargs: Mapping[str, Any], backend: str, steps: int) -> Trial:
    """Run a case in one mode; needs a process group.

    Args:
        case: the case, with its own inputs for each step.
        mode: one of `EAGER`, `TORCH` and `OURS`.
        ddp_kwargs: DDP's arguments.
        backend: name of a Dynamo backend.
        steps: how many steps of training to run, without an optimizer.

    Returns:
        What came of it.
    """
    settings = {"optimize_ddp": True, "suppress_errors": False, "disable": False}
    with (
        undisturbed(),
        taking_notes() as notes,
        cold_caches(),
        torch._dynamo.config.patch(settings),
        _listening() as said,
    ):
        # caught inside: cold_caches() keeps its files, and says so, if an error passes through it
        buckets, failure, failed_step = _steps(case, _MODES[mode], ddp_kwargs, backend, range(steps), notes)
    return Trial(mode, notes, buckets, failure, failed_step, _all_inline(said))


def _steps(
    case: Case, wrap: Wrap, ddp_kwargs: Mapping[str, Any], backend: str, steps: range, notes: Notes
) -> tuple[tuple[ObservedBucket, ...], str, int]:
    done = 0
    try:
        ddp = DistributedDataParallel(case.model(), **ddp_kwargs)
        step = wrap(ddp, backend)
        for done in steps:
            notes.begin_step()
            ddp.zero_grad()
            case.step(step, dist.get_rank(), done).backward()  # type: ignore[no-untyped-call]  # of torch
        return running_buckets(ddp), "", 0
    except Exception as error:  # whatever it is, the user would have met it: it is what we report
        return (), one_line(error), done


def one_line(error: BaseException) -> str:
    """An error in one line: its type, and the first two lines of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, " ".join(lines[:2])]) if lines else type(error).__name__


Wrap = Callable[[DistributedDataParallel, str], Callable[..., Any]]


def _in_eager(ddp: DistributedDataParallel, backend: str) -> Callable[..., Any]:
    del backend
    return ddp


def _with_torch(ddp: DistributedDataParallel, backend: str) -> Callable[..., Any]:
    return torch.compile(ddp, backend=backend)


def _with_ddpopt(ddp: DistributedDataParallel, backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = ddpopt.dynamo.api.compile(ddp, backend=backend)
    return compiled


_MODES: dict[str, Wrap] = {EAGER: _in_eager, TORCH: _with_torch, OURS: _with_ddpopt}


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What ddpopt's backend logs; nothing of it reaches the caller's handlers."""
    logger, said = ddpopt.dynamo.backend.logger, list[str]()
    level, propagates = logger.level, logger.propagate
    handler = _Ears(said)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _Ears(logging.Handler):
    """Keeps messages."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _all_inline(said: Sequence[str]) -> bool:
    return any("one graph" in message for message in said) and not any("segments" in m for m in said)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep random generators, grad mode and warnings of the caller apart from what runs inside."""
    with (
        generators_kept(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what torch warns of is looked for, and reported, one by one
        yield


def warm_up(backend: str) -> None:
    """Pay once for what a backend imports and probes, so that the first trial is not charged with it."""
    layer = nn.Linear(2, 2)
    with undisturbed(), taking_notes(), cold_caches(), contextlib.suppress(Exception):
        torch.compile(layer, backend=backend)(torch.ones(1, 2)).sum().backward()
