"""Settings of DDP, Dynamo and the environment that prevent overlap.

Invariant: each check is one small function that reports nothing if a setting does no harm. Things that a run
cannot show (how ``no_sync`` is used, what a communication hook does) are not guessed.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ddpopt.ddp.specs import specs_from_module
from ddpopt.doctor.diagnosis import Advice, Weight
from ddpopt.terminal.tables import MIB, mib

GOOD_COUNT = 4
"""The number of buckets to suggest instead of one: of four, three quarters can leave early."""


def option_findings(model: nn.Module, buckets: int | None) -> Iterator[Advice]:
    """Return findings on the settings of this process.

    Args:
        model: the module inside DDP.
        buckets: the number of the reducer's buckets in eager training; None if that failed.
    """
    if buckets == 1:
        yield _one_bucket([spec.nbytes for spec in specs_from_module(model)])
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    for is_set, what, step in (*_of_dynamo(), *_of_the_environment(on_cuda)):
        if is_set:
            yield Advice("options", Weight.SLOW, what, step)


def _one_bucket(sizes: list[int]) -> Advice:
    total = sum(sizes)
    largest = max(sizes)
    what = (
        f"All gradients, {mib(total)} MiB, are one bucket: its all-reduce starts when the last of them is "
        "ready."
    )
    if total <= MIB:
        return Advice("options", Weight.NOTE, what, "None: there is too little data for this to matter.")
    if largest * 2 > total:
        alone = f"A smaller cap changes little: a single gradient has {mib(largest)} MiB."
        return Advice("options", Weight.NOTE, f"{what} {alone}", "None.")
    cap = max(math.floor(total / GOOD_COUNT / MIB * 100) / 100, 0.01)
    step = f"Lower the cap: bucket_cap_mb={cap:g} makes about {GOOD_COUNT} buckets."
    return Advice("options", Weight.SLOW, what, step)


Check = tuple[bool, str, str]
"""Whether the setting is active, its cost, and the next step."""


def _of_dynamo() -> Iterator[Check]:
    dynamo = torch._dynamo.config
    yield (
        dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1",
        "Dynamo is turned off (torch._dynamo.config.disable, TORCH_COMPILE_DISABLE=1 or "
        "TORCHDYNAMO_DISABLE=1): torch.compile does nothing.",
        "Unset it.",
    )
    yield (
        dynamo.optimize_ddp in (False, "no_optimization"),
        f"torch._dynamo.config.optimize_ddp is {dynamo.optimize_ddp!r}: torch.compile(ddp) makes no cut, so "
        "all gradients of a graph arrive when its backward ends, and no all-reduce overlaps with it. This "
        "report ran torch's optimizer anyway.",
        "Set it to True, or compile with ddpopt.compile(ddp), which does not depend on it.",
    )
    yield (
        dynamo.optimize_ddp == "python_reducer" and not dynamo.compiled_autograd,
        "torch._dynamo.config.optimize_ddp is 'python_reducer', which forms buckets only if the backward "
        "runs under compiled autograd; torch._dynamo.config.compiled_autograd is False. Each gradient is "
        "then sent separately.",
        "Set torch._dynamo.config.compiled_autograd = True, or optimize_ddp = True, or compile with "
        "ddpopt.compile(ddp).",
    )
    yield (
        dynamo.suppress_errors,
        "torch._dynamo.config.suppress_errors is True: a graph that cannot be compiled runs in eager, and "
        "only the log says so. For this report it was turned off.",
        "Set it to False, and fix the failures that appear.",
    )


def _of_the_environment(on_cuda: bool) -> Iterator[Check]:
    level: Any = getattr(dist, "get_debug_level")()  # noqa: B009  # torch does not declare it as exported
    yield (
        level.name == "DETAIL",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective all ranks compare what they are about to "
        "send, and wait for one another.",
        "Unset it, or set it to INFO, unless you are debugging a hang.",
    )
    yield (
        on_cuda and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
        "CUDA_LAUNCH_BLOCKING=1: each kernel, including the all-reduce, ends before the next one starts, "
        "so nothing overlaps.",
        "Unset it, unless you are debugging a failing kernel.",
    )
