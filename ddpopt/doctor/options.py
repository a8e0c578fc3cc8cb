"""Options of DDP, of Dynamo and of the environment that take overlap away, or memory.

Invariant: a table of checks, each one small function that looks at settings and says nothing if they do no
harm. What a run cannot show (how ``no_sync`` is used, what a communication hook does) is not guessed at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ddpopt.doctor.diagnosis import Finding, Weight
from ddpopt.explanation.tables import MIB, mib
from ddpopt.planning.bucket_rule import specs_from_module

_GOOD_SHARE = 4
"""Into how many buckets to divide what is one: with four, three quarters can leave before backward ends."""


@dataclass(frozen=True)
class Settings:
    """What the checks look at.

    Attributes:
        ddp_kwargs: DDP's arguments.
        buckets: how many buckets the reducer had in eager training; None if it failed there.
        gradient_bytes: what DDP reduces in each step.
        largest_bytes: the largest gradient among them.
        buffers: how many buffers the model has.
        buffer_bytes: their size.
        on_cuda: whether the model has parameters on a CUDA device.
        optimize_ddp: ``torch._dynamo.config.optimize_ddp``.
        suppress_errors: ``torch._dynamo.config.suppress_errors``.
        disabled: whether Dynamo is turned off.
        compiled_autograd: ``torch._dynamo.config.compiled_autograd``.
        environment: the environment's variables.
        debug_level: torch.distributed's, ``"OFF"``, ``"INFO"`` or ``"DETAIL"``.
    """

    ddp_kwargs: Mapping[str, Any]
    buckets: int | None
    gradient_bytes: int
    largest_bytes: int
    buffers: int
    buffer_bytes: int
    on_cuda: bool
    optimize_ddp: bool | str
    suppress_errors: bool
    disabled: bool
    compiled_autograd: bool
    environment: Mapping[str, str]
    debug_level: str


def read_settings(model: nn.Module, ddp_kwargs: Mapping[str, Any], buckets: int | None) -> Settings:
    """Read what is set for a model, in this process.

    Args:
        model: the module inside DDP.
        ddp_kwargs: DDP's arguments.
        buckets: how many buckets the reducer had; None if not known.

    Returns:
        The settings.
    """
    sizes = [spec.nbytes for spec in specs_from_module(model)]
    buffers = list(model.buffers())
    dynamo = torch._dynamo.config
    return Settings(
        ddp_kwargs=ddp_kwargs,
        buckets=buckets,
        gradient_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
        buffers=len(buffers),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        on_cuda=any(parameter.is_cuda for parameter in model.parameters()),
        optimize_ddp=dynamo.optimize_ddp,
        suppress_errors=dynamo.suppress_errors,
        disabled=dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1",
        compiled_autograd=dynamo.compiled_autograd,
        environment=dict(os.environ),
        debug_level=_debug_level(),
    )


def _debug_level() -> str:
    level: Any = getattr(dist, "get_debug_level")()  # noqa: B009  # torch does not declare it as exported
    return str(level.name)


def option_findings(settings: Settings) -> Iterator[Finding]:
    """What the settings cost."""
    for check in CHECKS:
        found = check(settings)
        if found is not None:
            yield found


def _one_bucket(settings: Settings) -> Finding | None:
    if settings.buckets != 1:
        return None
    size = f"{mib(settings.gradient_bytes)} MiB"
    one = f"All gradients, {size}, are one bucket: its all-reduce starts when the last of them is there."
    parts = f"one gradient alone has {mib(settings.largest_bytes)} MiB"
    if settings.gradient_bytes <= MIB:
        return Finding(
            "options", Weight.NOTE, one, "None: there is too little to send for overlap to matter."
        )
    if settings.largest_bytes * 2 > settings.gradient_bytes:
        return Finding("options", Weight.NOTE, f"{one} A smaller cap changes little: {parts}.", "None.")
    cap = max(math.floor(settings.gradient_bytes / _GOOD_SHARE / MIB * 100) / 100, 0.01)
    step = f"Lower the cap: bucket_cap_mb={cap:g} makes about {_GOOD_SHARE} buckets."
    return Finding("options", Weight.SLOW, one, step)


def _optimizer_off(settings: Settings) -> Finding | None:
    if settings.optimize_ddp in (False, "no_optimization"):
        return Finding(
            "options",
            Weight.SLOW,
            f"torch._dynamo.config.optimize_ddp is {settings.optimize_ddp!r}: torch.compile(ddp) makes no "
            "cut, so all gradients of a graph come when its backward has ended, and no all-reduce overlaps "
            "with it. This report ran torch's optimizer all the same.",
            "Set it to True, or compile with ddpopt.compile(ddp), which does not depend on it.",
        )
    if settings.optimize_ddp == "python_reducer" and not settings.compiled_autograd:
        return Finding(
            "options",
            Weight.SLOW,
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which forms buckets only if the backward "
            "runs under compiled autograd; torch._dynamo.config.compiled_autograd is False. Each gradient "
            "then travels alone.",
            "Set torch._dynamo.config.compiled_autograd = True, or optimize_ddp = True, or compile with "
            "ddpopt.compile(ddp).",
        )
    return None


def _nothing_compiles(settings: Settings) -> Finding | None:
    if not settings.disabled:
        return None
    return Finding(
        "options",
        Weight.SLOW,
        "Dynamo is turned off (torch._dynamo.config.disable, TORCH_COMPILE_DISABLE=1 or "
        "TORCHDYNAMO_DISABLE=1): torch.compile does nothing.",
        "Unset it.",
    )


def _errors_suppressed(settings: Settings) -> Finding | None:
    if not settings.suppress_errors:
        return None
    return Finding(
        "options",
        Weight.SLOW,
        "torch._dynamo.config.suppress_errors is True: a graph that cannot be compiled runs in eager, and "
        "only the log says so. This report ran without it.",
        "Set it to False, and fix what then fails.",
    )


def _debug_detail(settings: Settings) -> Finding | None:
    if settings.debug_level != "DETAIL":
        return None
    return Finding(
        "options",
        Weight.SLOW,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective all ranks compare what they are about to "
        "send, and wait for one another.",
        "Unset it, or set it to INFO, unless you look for a hang.",
    )


def _blocking_launches(settings: Settings) -> Finding | None:
    if not settings.on_cuda or settings.environment.get("CUDA_LAUNCH_BLOCKING") != "1":
        return None
    return Finding(
        "options",
        Weight.SLOW,
        "CUDA_LAUNCH_BLOCKING=1: each kernel, the all-reduce too, ends before the next starts, so nothing "
        "overlaps.",
        "Unset it, unless you look for a failing kernel.",
    )


def _buffers_broadcast(settings: Settings) -> Finding | None:
    if not settings.buffers or not settings.ddp_kwargs.get("broadcast_buffers", True):
        return None
    return Finding(
        "options",
        Weight.NOTE,
        f"broadcast_buffers=True: each forward starts with a broadcast of {settings.buffers} buffers, "
        f"{mib(settings.buffer_bytes)} MiB, from rank 0.",
        "Give DDP broadcast_buffers=False if no forward changes a buffer, or if ranks may differ in them.",
    )


def _gradients_twice(settings: Settings) -> Finding | None:
    if settings.gradient_bytes <= MIB or settings.ddp_kwargs.get("gradient_as_bucket_view"):
        return None
    return Finding(
        "options",
        Weight.NOTE,
        f"Gradients are held twice, in .grad and in DDP's buckets: {mib(settings.gradient_bytes)} MiB more.",
        "Give DDP gradient_as_bucket_view=True, unless something calls detach_() on gradients.",
    )


CHECKS: tuple[Callable[[Settings], Finding | None], ...] = (
    _nothing_compiles,
    _optimizer_off,
    _errors_suppressed,
    _one_bucket,
    _debug_detail,
    _blocking_launches,
    _buffers_broadcast,
    _gradients_twice,
)
