"""Errors of a capture, reported with the user's line; and comparing steps between ranks.

Invariant: before each step, all ranks have the same collectives, or all raise.
"""

import contextlib
import itertools
import linecache
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    Unsupported,
    UserError,
)
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

import ddpopt.errors
from ddpopt.ddp.agreement import exchange_plans, plan_difference, same_buckets
from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.errors import CaptureError, DdpoptError, PlanMismatchError, UnsupportedError
from ddpopt.planning.plan import Plan
from ddpopt.step import tracing
from ddpopt.step.replicas import Replica
from ddpopt.step.settings import INSTEAD, WHAT
from ddpopt.step.unused import Names, UsedElsewhereError, candidates, decoded, encoded

FOLDERS = [os.path.dirname(module.__file__ or "") + os.sep for module in (torch, contextlib, ddpopt.errors)]
FROM_DYNAMO = (TorchDynamoException, FailOnRecompileLimitHit)
RESTRICTIONS = (Unsupported, UserError, FailOnRecompileLimitHit)
"""What Dynamo raises where it does not trace something; its other errors are faults of torch or a program."""


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """Say of an error of Dynamo inside this block which of the user's lines it is about.

    Args:
        name: of the user's function.

    Raises:
        UnsupportedError: Dynamo does not trace what the function does.
        CaptureError: Dynamo failed otherwise while it traced the function.
        DdpoptError: as it was raised while Dynamo traced or compiled.
        Exception: of the backend, as Dynamo passes it on.
    """
    handled = sys.exception()  # by the caller, when it called the step
    try:
        yield
    except Exception as error:
        if not (isinstance(error, FROM_DYNAMO) or hasattr(error, "real_stack")):
            raise
        own = _own(error, handled)
        where = _where(error)
        if own is not None:
            raise type(own)(f"{own}. {where.rstrip(': ')}" if where else str(own)) from error
        if isinstance(error, BackendCompilerFailed):
            raise
        if not isinstance(error, RESTRICTIONS):
            kind = type(error).__name__
            raise CaptureError(
                f"{WHAT}: while {name} was captured, torch failed: {where}{kind}: {_reason(error)}"
            ) from error
        raise UnsupportedError(
            f"{WHAT}: {name} cannot be captured as one graph. {where}{_reason(error)}\n"
            "fallback='inline' runs the function in eager around ddpopt.compile(model)"
        ) from error


def _own(error: BaseException | None, handled: BaseException | None) -> DdpoptError | None:
    """The error of ddpopt that made Dynamo fail, if it is not one that the caller was handling already."""
    while error not in (None, handled) and not isinstance(error, DdpoptError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error if isinstance(error, DdpoptError) and error is not handled else None


def _reason(error: Exception) -> str:
    if isinstance(error, FailOnRecompileLimitHit):
        return (
            f"it needs more than {tracing.MOST} graphs, because what it reads "
            "changes; TORCH_LOGS=recompiles shows what. Make it a tensor, keep it the same, or make a "
            "train_step for each model"
        )
    if getattr(error, "gb_type", None) == "Data-dependent branching":
        return (
            "it depends on values of a tensor, which are not known while the step is captured; return "
            "the tensor and read it after the step, or use torch.where instead of a branch"
        )
    lines = [line.strip() for line in str(error).partition("\n\nfrom user code")[0].splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Developer debug", "For more")))


def _where(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback."""
    stack = getattr(error, "real_stack", None) or ()
    last = next((frame for frame in reversed(stack) if not frame.filename.startswith(("<", *FOLDERS))), None)
    if last is None:
        return ""
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{last.filename}:{last.lineno}, in {last.name}: `{code}`: "


def require_no_modes() -> None:
    """Check that no mode of torch watches operators or gradients; raises UnsupportedError.

    Dynamo compiles nothing under one, and remembers that for later calls.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UnsupportedError(
            f"{WHAT} cannot run under anomaly detection, which looks at the values of each gradient; run the "
            f"undecorated function there, or {INSTEAD}"
        )
    active = [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    modes = [type(mode).__name__.strip("_") for mode in active]
    if modes:
        raise UnsupportedError(
            f"{WHAT} cannot run under {modes[-1]}, as Dynamo compiles nothing there; call the step outside "
            f"of it, and the undecorated function inside it, or {INSTEAD}"
        )


@dataclass(frozen=True)
class OwnStep:
    """What a rank is about to run.

    Attributes:
        replicas: the modules.
        keys: a digest of the step's collectives on each process group; none if there is a problem.
        plans: the plan of each module; none if there is a problem.
        used: the names of the parameters that this rank uses, by module.
        averaged: the names of those that it averages.
        problem: why this rank has no plans.
    """

    replicas: Sequence[Replica]
    keys: Mapping[str, int] = field(default_factory=dict)
    plans: Sequence[Plan] = ()
    used: Mapping[Any, Names] = field(default_factory=dict)
    averaged: Mapping[Any, Names] = field(default_factory=dict)
    problem: Exception | None = None


def compare_steps(own: OwnStep, asked: set[str]) -> None:
    """Compare this rank's step with those of the other ranks, before any of its collectives.

    One small all-reduce for each process group, and another one if modules look for unused parameters; only
    if ranks differ do they exchange their plans.

    Args:
        own: this rank's step.
        asked: the process groups whose ranks have captured this step for what all of them use; a group is
            added when it is found that they have not.

    Raises:
        UsedElsewhereError: the ranks use other parameters than the step was captured for.
        PlanMismatchError: another rank has another step, or failed.
        DdpoptError: `own.problem` itself.
        InfrastructureError: another rank did not answer in time.
    """
    groups: dict[str, list[int]] = {}
    for place, replica in enumerate(own.replicas):
        if replica.is_joining:  # a rank that has joined compares nothing
            continue
        groups.setdefault(replica.group.group_name, []).append(place)
    for group, places in groups.items():
        replicas = [own.replicas[place] for place in places]
        first = replicas[0]
        key = own.keys.get(group, 0)
        looked_for = candidates(replicas)
        most, least, most_looked_for, least_looked_for = _extremes(first, key, len(looked_for))
        all_look = most_looked_for == least_looked_for > 0
        if all_look and least and group not in asked:  # no rank has failed
            numbers = encoded(looked_for, own.used).to(first.device)
            _reduce(first, numbers)
            used = decoded(looked_for, numbers)
            if most != least or any(names != own.averaged[owner] for owner, names in used.items()):
                asked.add(group)
                raise UsedElsewhereError(used)
        if most != least:
            plan = own.plans[places[-1]] if own.plans else None
            _raise_difference(first.group, plan, own.problem)
    if own.problem is not None:
        raise own.problem


def _extremes(replica: Replica, *numbers: int) -> list[int]:
    """The highest and the lowest of each number, over the ranks of a module's group."""
    both = [signed for number in numbers for signed in (number, -number)]
    found = torch.tensor(both, device=replica.device)
    _reduce(replica, found)
    signs = itertools.cycle((1, -1))
    return [sign * number for sign, number in zip(signs, found.tolist(), strict=False)]


def _reduce(replica: Replica, numbers: Tensor) -> None:
    """Take the maximum over the ranks of a module's group."""
    with _disable_current_modes():  # what watches the user's program need not see it
        dist.all_reduce(numbers, dist.ReduceOp.MAX, replica.group)


def _raise_difference(group: Any, plan: Plan | None, problem: Exception | None) -> None:
    def decide() -> Plan | None:
        if problem is not None:
            raise problem
        return plan

    found = exchange_plans(group, WHAT, decide, LONGEST_WAIT)
    same = "  the same buckets, but other collectives" if same_buckets(found) else plan_difference(found)
    raise PlanMismatchError(
        f"{WHAT}: the ranks' steps do not communicate alike:\n{same}\n"
        "All ranks must take the same branches. Where they cannot, use ddpopt.compile(model), or "
        "fallback='inline'"
    )
