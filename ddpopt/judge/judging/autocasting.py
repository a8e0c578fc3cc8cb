"""In which dtype a model computes where it opens autocast itself.

Autocast rounds operands to a coarser dtype before an operation. A compiler may leave out roundings that
cancel, so what it computes differs from eager by roundings of that dtype and not of the data's own.

Invariant: only looks; the default generators are left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ddpopt.cases.case import Case
from ddpopt.judge.trainer import on_device

DEVICES = ("cpu", "cuda")


class _Watching(TorchFunctionMode):
    """Notes the dtype of the autocast that each function is called under."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        self.dtypes.update(torch.get_autocast_dtype(d) for d in DEVICES if torch.is_autocast_enabled(d))
        return func(*args, **(kwargs or {}))


def autocast_dtypes(case: Case, rank: int, device: torch.device) -> set[torch.dtype]:
    """The dtypes of autocast in one forward of a case.

    Args:
        case: the case.
        rank: whose inputs to use.
        device: where to run it.

    Returns:
        Those that were seen; of a forward that fails alone, those up to there.
    """
    watching = _Watching()
    devices = [device] if device.type == "cuda" else []
    # whatever a model raises that runs under DDP only: judging goes on without this
    with torch.random.fork_rng(devices), contextlib.suppress(Exception):
        model = case.model().to(device)
        moved = replace(case, inputs=lambda r, s: on_device(case.inputs(r, s), device))
        with watching:
            moved.step(model, rank, 0)
    return watching.dtypes


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype with the fewest digits; None of none.

    >>> coarsest([torch.float16, torch.bfloat16])
    torch.bfloat16
    """
    return max(dtypes, key=lambda dtype: (torch.finfo(dtype).eps, str(dtype)), default=None)
