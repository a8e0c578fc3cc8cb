"""Runs in which verification must find nothing: ddpopt's strategies over the corpus, some as captured steps.

Every case as it is, with the backend that keeps eager's order; some under other options; some with a backend
that is judged by arithmetic; and a few with Inductor itself. Invariant: eager DDP can do each, and so can
torch's whole graph, in the installed release.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from ddpopt.cases import corpus
from ddpopt.judge.trials.on_rank import Request

CleanRuns = Mapping[str, Sequence[Request]]
"""What to verify, by backend: ``"aot_eager"``, ``"rounding"`` or ``"inductor"``."""
AT_LEAST = 200
MODES = ("ddpopt-split", "ddpopt-inline")
# captured steps need torch 2.13
STEPS = () if torch.__version__ < "2.13" else ("ddpopt-step", "step-replicate", "step-shard-optimizer")
WITH_INDUCTOR = ("tied", "buffers", "frozen", "gpt")
WITH_ROUNDING = (
    "tied", "called_twice", "frozen", "in_place", "views_in_place", "dropout", "buffers", "mixed_dtypes",
    "complex", "transposed",
)  # fmt: skip
UNDER_OPTIONS = ("tied", "called_twice", "frozen", "in_place", "buffers", "list", "dict", "shared_module")
OPTIONS = (
    "accumulation", "bucket_view", "zero_in_place", "clipping", "two_forwards", "batched_copy",
    "tensor_hook", "scaling", "hook_allreduce", "no_broadcast", "module_hooks", "find_unused",
    "forward_in_no_sync", "bucket_view_kept", "accumulated_hook",
)  # fmt: skip
NOT_CLEAN = (
    # before 2.13, torch's whole graph under DDP compiles changing numbers once more than the model alone
    *(("stochastic_depth",) if torch.__version__ < "2.13" else ()),
    *(("batched_copy",) if torch.__version__ < "2.12" else ()),  # DDP does not have it
)
"""The cases and options that eager DDP or torch's whole graph cannot do in this release."""


def rounding(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile like aot_eager, but be judged like a backend that may round differently."""
    return lookup_backend("aot_eager")(gm, list(example_inputs))


def clean_runs() -> CleanRuns:
    """All cases, and enough pairs of a case and an option."""
    pairs = (
        (UNDER_OPTIONS[(place + shift) % len(UNDER_OPTIONS)], option)
        for shift in range(len(UNDER_OPTIONS))
        for place, option in enumerate(OPTIONS)
        if option not in NOT_CLEAN
    )
    plain = [(case.name, "default") for case in corpus.cases() if case.name not in NOT_CLEAN]
    missing = AT_LEAST // len(MODES) - len(plain) - len(WITH_ROUNDING) - len(WITH_INDUCTOR)
    exact = [*plain, *itertools.islice(pairs, max(0, missing))]
    return {
        "aot_eager": [Request(case, option, MODES) for case, option in exact],
        "rounding": [Request(case, "default", MODES) for case in WITH_ROUNDING],
        "inductor": [Request(case, "default", (*MODES, *STEPS)) for case in WITH_INDUCTOR],
    }
