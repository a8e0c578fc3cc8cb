"""The names of modes and options, without torch, so that a command can refuse a wrong one at once.

Invariant: they are those of `ddpopt.judge.engines.modes.MODES` and `ddpopt.judge.training.options.OPTIONS`
(a test compares).
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from ddpopt.errors import UsageError, did_you_mean

MODES = (
    "eager", "torch", "whole", "python_reducer", "ddpopt-split", "ddpopt-inline", "ddpopt-step",
    "ddpopt-step-coalesced", "step-replicate", "step-shard-optimizer", "fully_shard",
    "fully_shard-blocks", "hsdp", "fsdp1", "replicate", "replicate-fsdp", "zero", "accelerate", "fabric",
)  # fmt: skip
OPTIONS = (
    "default", "static_graph", "find_unused", "unused_somewhere", "unused_skipped", "static_unused",
    "static_find_unused", "accumulation", "accumulation_static", "forward_in_no_sync", "two_forwards",
    "zero_in_place", "bucket_view", "bucket_view_kept", "batched_copy", "cap_list", "cap_small", "frozen",
    "ignored", "hook_allreduce", "hook_fp16", "hook_bf16", "join", "no_broadcast", "tensor_hook",
    "stepping_hook", "saved_tensors", "accumulated_hook", "module_hooks", "autocast", "clipping", "scaling",
    "adamw_foreach", "adamw_fused", "resumed", "scheduled", "sync_batchnorm", "nested", "two_models",
    "train_eval", "eval_between", "last_batch", "all_to_all",
)  # fmt: skip
REGISTERED = "ddpopt.engines"
"""The entry-point group of packages that bring engines."""
STRATEGIES = ("split", "inline", "step", "auto")
T = TypeVar("T")


def registered() -> tuple[str, ...]:
    """The names of engines that installed packages bring."""
    return tuple(each.name for each in entry_points(group=REGISTERED))


def full_name(name: str) -> str:
    """The name of a mode; a strategy stands for the mode that runs it."""
    return mode_of(name) if name in STRATEGIES else name


def mode_of(strategy: str) -> str:
    """Name the mode that runs a strategy: ``inline`` and ``auto`` differ only in what is logged."""
    modes = {each: f"ddpopt-{each}" for each in STRATEGIES} | {"auto": "ddpopt-inline"}
    return named(strategy, modes, "strategy")


def named(name: str, known: Mapping[str, T], given_as: str) -> T:
    """Look up a name.

    Args:
        name: the name.
        known: all objects, by name.
        given_as: the caller's argument, a parameter or a command-line option, for the error.

    Returns:
        The object with this name.

    Raises:
        UsageError: there is none.
    """
    if name not in known:
        raise UsageError(
            f"{given_as}: expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )
    return known[name]
