"""What verification must raise nothing of: ddpopt's strategies over the corpus.

Every case as it is, with the backend that keeps eager's order; some under other options; some with a backend
that is judged by arithmetic; and a few with Inductor itself. Invariant: each is one that eager DDP can do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from ddpopt.cases import corpus
from ddpopt.judge.trials import Asked

AT_LEAST = 200
MODES = ("ddpopt-split", "ddpopt-inline")
WITH_INDUCTOR = ("tied", "buffers", "frozen")
WITH_ROUNDING = (
    "tied",
    "called_twice",
    "frozen",
    "in_place",
    "views_in_place",
    "dropout",
    "buffers",
    "mixed_dtypes",
    "complex",
    "transposed",
)
UNDER_OPTIONS = ("tied", "called_twice", "frozen", "in_place", "buffers", "list", "dict", "shared_module")
OPTIONS = (
    "accumulation",
    "bucket_view",
    "zero_in_place",
    "clipping",
    "two_forwards",
    "batched_copy",
    "tensor_hook",
    "scaling",
    "hook_allreduce",
    "no_broadcast",
    "module_hooks",
    "find_unused",
    "forward_in_no_sync",
    "bucket_view_kept",
    "accumulated_hook",
    "finalized",
)


@dataclass(frozen=True)
class CleanRun:
    """A case under an option, in both strategies.

    Attributes:
        asked: what to verify.
        backend: ``"aot_eager"``, ``"rounding"`` or ``"inductor"``.
    """

    asked: Asked
    backend: str


def rounding(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile like aot_eager, but be judged like a backend that may round otherwise."""
    return lookup_backend("aot_eager")(gm, list(example_inputs))


def clean_runs(at_least: int = AT_LEAST) -> list[CleanRun]:
    """List the clean runs.

    Args:
        at_least: how many; beside all cases, options are gone through until there are enough.

    Returns:
        The runs, those of one backend after those of another.
    """
    runs = [_run(case.name) for case in corpus.cases()]
    others = [_run(case, backend="rounding") for case in WITH_ROUNDING]
    others += [_run(case, backend="inductor") for case in WITH_INDUCTOR]
    pairs = (
        (UNDER_OPTIONS[(place + shift) % len(UNDER_OPTIONS)], option)
        for shift in range(len(UNDER_OPTIONS))
        for place, option in enumerate(OPTIONS)
    )
    missing = -(-at_least // len(MODES)) - len(runs) - len(others)
    runs += [_run(*pair) for pair in itertools.islice(pairs, max(0, missing))]
    return [*runs, *others]


def _run(case: str, option: str = "default", backend: str = "aot_eager") -> CleanRun:
    return CleanRun(Asked(case, option, MODES), backend)
