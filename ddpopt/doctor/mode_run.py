"""Run a case with real tensors: a DDP module on a one-rank process group, eager and compiled, a few steps.

Invariant: no setting of torch, no generator and no process group is left changed; a failure is a result.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.case import Case
from ddpopt.doctor.dynamo import Notes, taking_notes
from ddpopt.dynamo import api
from ddpopt.explanation.rehearsal import generators_kept
from ddpopt.judge.rules.failing import in_words
from ddpopt.observation.reducer_buckets import ObservedBucket, running_buckets

EAGER = "eager DDP"
TORCH = "torch's DDPOptimizer"
OURS = "ddpopt"


@dataclass(frozen=True)
class ModeRun:
    """One mode, run for a few steps.

    Attributes:
        mode: ``"eager DDP"``, ``"torch's DDPOptimizer"`` or ``"ddpopt"``.
        notes: Dynamo's records.
        buckets: buckets of the running reducer after the last step; empty after a failure.
        failure: the error that ended it, in one line; empty if all steps ran.
        failed_step: the step that failed, from 0.
    """

    mode: str
    notes: Notes
    buckets: tuple[ObservedBucket, ...] = ()
    failure: str = ""
    failed_step: int = 0


def run_mode(case: Case, mode: str, ddp_kwargs: Mapping[str, Any], compiler: Any, steps: int) -> ModeRun:
    """Run a case in one mode; needs a process group.

    Args:
        case: the case, with its own inputs for each step.
        mode: one of `EAGER`, `TORCH` and `OURS`.
        ddp_kwargs: DDP's arguments.
        compiler: a Dynamo backend.
        steps: the number of training steps, without an optimizer.

    Returns:
        The result.
    """
    settings = {"optimize_ddp": True, "suppress_errors": False, "disable": False}
    with undisturbed(), taking_notes() as notes, torch._dynamo.config.patch(settings):
        buckets, failure, failed_step = _steps(case, _MODES[mode], ddp_kwargs, compiler, range(steps), notes)
    return ModeRun(mode, notes, buckets, failure, failed_step)


def _steps(
    case: Case, wrap: "Wrap", ddp_kwargs: Mapping[str, Any], compiler: Any, steps: range, notes: Notes
) -> tuple[tuple[ObservedBucket, ...], str, int]:
    done = 0
    try:
        ddp = DistributedDataParallel(case.model(), **ddp_kwargs)
        step = wrap(ddp, compiler)
        for done in steps:
            notes.begin_step()
            ddp.zero_grad()
            case.step(step, dist.get_rank(), done).backward()  # type: ignore[no-untyped-call]  # of torch
        return running_buckets(ddp), "", 0
    except Exception as error:  # the user would have met any such error, so it is reported
        return (), in_words(error), done


Wrap = Callable[[DistributedDataParallel, Any], Callable[..., Any]]


_MODES: dict[str, Wrap] = {
    EAGER: lambda ddp, _: ddp,
    TORCH: lambda ddp, compiler: torch.compile(ddp, backend=compiler),
    OURS: lambda ddp, compiler: api.compile(ddp, backend=compiler),
}


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Isolate the caller's random generators, grad mode and warnings from the code inside."""
    with generators_kept(), torch.inference_mode(mode=False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the causes of torch's warnings are checked and reported one by one
        yield
