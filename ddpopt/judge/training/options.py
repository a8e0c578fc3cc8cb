"""The ways to use DDP that can be verified: its arguments, and common actions around its steps.

Each option is a row of one table: its changes to the case, DDP's arguments, how the model is trained, and
which checks apply to the result. Invariant: an option changes the reference and the mode in the same way.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from ddpopt.cases import option_cases as cases
from ddpopt.judge.engines.names import named
from ddpopt.judge.training import option_steps as do
from ddpopt.judge.training.trainer import Option
from ddpopt.judge.training.updating import LEARNING_RATE, Recipe

UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
CYCLE = partial(OneCycleLR, max_lr=LEARNING_RATE, total_steps=100, cycle_momentum=False)
MOMENTUM = {"lr": LEARNING_RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}
VIEWS = {"gradient_as_bucket_view": True}


def _unused(name: str, about: str, ddp_kwargs: Mapping[str, Any], *, sends_as_usual: bool = True) -> Option:
    """An option with an extra parameter that no rank uses."""
    return Option(
        name,
        about,
        "arguments",
        ddp_kwargs,
        before_step=do.use_extra_nowhere,
        sends_as_usual=sends_as_usual,
        adapt=partial(cases.around, kind=cases.WithExtra),
    )


def _sending(
    name: str, about: str, hook: Callable[..., Any], comm_dtype: torch.dtype | None = None
) -> Option:
    """An option with one of torch's communication hooks."""
    return Option(name, about, "module", configure=partial(do.comm_hook, hook=hook), comm_dtype=comm_dtype)


OPTIONS: tuple[Option, ...] = (
    Option("default", "only the case's own arguments", probes=True, extras=True),
    Option("static_graph", "static_graph=True", "arguments", STATIC),
    Option("find_unused", "find_unused_parameters=True, all used", "arguments", UNUSED),
    Option(
        "unused_somewhere",
        "a parameter that only some ranks use in a step",
        "arguments",
        UNUSED,
        before_step=do.use_extra_somewhere,
        more_graphs=True,
        adapt=partial(cases.around, kind=cases.WithExtra, ranks_differ=True),
    ),
    _unused(
        "unused_skipped",
        "a parameter that no rank ever uses, with skip_all_reduce_unused_params",
        {**UNUSED, "skip_all_reduce_unused_params": True},
        sends_as_usual=False,
    ),
    _unused("static_unused", "static_graph=True and a parameter that no rank uses", STATIC),
    _unused("static_find_unused", "the same with find_unused_parameters=True too", {**STATIC, **UNUSED}),
    Option(
        "accumulation",
        "two micro-batches under no_sync, then one that is reduced",
        take_step=do.accumulate,
        probes=True,
    ),
    Option(
        "accumulation_static",
        "the same with static_graph=True, from the second step on",
        "arguments",
        STATIC,
        take_step=do.accumulate_later,
    ),
    Option(
        "forward_in_no_sync",
        "a forward that syncs and one under no_sync, then one backward through both",
        take_step=do.mixed_forwards,
        more_graphs=True,
        forwards=2,
    ),
    Option("two_forwards", "two forwards before one backward", take_step=do.two_forwards, forwards=2),
    Option("zero_in_place", "zero_grad(set_to_none=False)", keeps_gradients=True, probes=True),
    Option("bucket_view", "gradient_as_bucket_view=True", "arguments", VIEWS, probes=True),
    Option(
        "bucket_view_kept",
        "gradient_as_bucket_view=True, accumulation, zero_grad(set_to_none=False)",
        "arguments",
        VIEWS,
        take_step=do.accumulate,
        keeps_gradients=True,
    ),
    Option("batched_copy", "batched_grad_copy=True", "arguments", {"batched_grad_copy": True}),
    Option("cap_list", "bucket_cap_mb_list=[1, 0.5]", "arguments", {"bucket_cap_mb_list": [1, 0.5]}),
    Option("cap_small", "bucket_cap_mb=0.5", "arguments", {"bucket_cap_mb": 0.5}),
    Option("frozen", "the first parameter is frozen", adapt=cases.freezing_first),
    Option("ignored", "DDP ignores the first parameter", "arguments", adapt=cases.ignoring_first),
    _sending("hook_allreduce", "the all-reduce communication hook", default_hooks.allreduce_hook),
    _sending("hook_fp16", "the fp16 compression hook", default_hooks.fp16_compress_hook, torch.float16),
    _sending("hook_bf16", "the bf16 compression hook", default_hooks.bf16_compress_hook, torch.bfloat16),
    Option(
        "join",
        "ranks with different numbers of steps, under join()",
        "module",
        around=do.joining,
        steps=do.fewer_steps_later,
        local=False,
        sends_as_usual=False,
    ),
    Option("no_broadcast", "broadcast_buffers=False", "arguments", {"broadcast_buffers": False}),
    Option(
        "tensor_hook",
        "the user's hook on a parameter changes its gradient",
        "arguments",
        configure=do.tensor_hook,
    ),
    Option(
        "stepping_hook",
        "a communication hook that steps the parameters of its bucket",
        "module",
        configure=do.hook_stepping,
        local=False,
    ),
    Option(
        "saved_tensors", "hooks that store saved tensors in a different dtype", around=do.saving_otherwise
    ),
    Option(
        "accumulated_hook",
        "the user's post-accumulate hook on every parameter",
        "arguments",
        configure=do.accumulated_hooks,
    ),
    Option(
        "module_hooks", "forward and backward hooks on modules", configure=do.module_hooks, more_graphs=True
    ),
    Option("autocast", "forward under bfloat16 autocast", take_step=do.autocast, computes=torch.bfloat16),
    Option("clipping", "clip_grad_norm_ after each backward", finish_step=do.clip),
    Option(
        "scaling",
        "GradScaler scales the loss, differently in each step, and leaves out one that overflows on a rank",
        recipe=Recipe(SGD, {"lr": LEARNING_RATE}, scales=True),
        before_step=do.rescale,
        take_step=do.scaled,
        finish_step=do.unscale,
    ),
    Option("adamw_foreach", "AdamW with foreach=True", recipe=Recipe(AdamW, {"foreach": True})),
    Option("adamw_fused", "AdamW with fused=True", recipe=Recipe(AdamW, {"fused": True})),
    Option(
        "resumed",
        "AdamW with a scheduler, and all steps but the first in new processes, from a checkpoint",
        recipe=Recipe(AdamW, schedule=CYCLE),
        resumes=True,
        local=False,
        more_graphs=True,
    ),
    Option(
        "scheduled",
        "SGD with momentum, a scheduler that changes the learning rate after each step, and averaged weights",
        recipe=Recipe(SGD, MOMENTUM, CYCLE, averages=True),
    ),
    Option("sync_batchnorm", "BatchNorm becomes SyncBatchNorm", adapt=cases.sync_batchnorm, local=False),
    Option(
        "nested",
        "a DDP module inside the model",
        "module",
        grouped=cases.nested,
        local=False,
        sends_as_usual=False,
    ),
    Option(
        "two_models",
        "two DDP models in one process",
        take_step=do.both_models,
        configure=do.other_model,
        finish_step=do.keep_other_gradients,
        more_graphs=True,
        sends_as_usual=False,
    ),
    Option(
        "train_eval",
        "an evaluation between two steps",
        before_step=do.evaluate_between_steps,
        more_graphs=True,
    ),
    Option(
        "eval_between",
        "an evaluation on fewer samples between two micro-batches, and between a forward and its backward",
        take_step=do.evaluate_between,
        more_graphs=True,
    ),
    Option("last_batch", "fewer samples in each third step", before_step=do.shrink_last, more_graphs=True),
    Option(
        "all_to_all",
        "an all-to-all in the graph, and an expert that only some ranks use",
        "arguments",
        UNUSED,
        before_step=do.use_extra_somewhere,
        grouped=cases.exchanging_in,
        local=False,
        more_graphs=True,
        adapt=partial(cases.around, kind=cases.WithExchange, ranks_differ=True),
    ),
)


def option(name: str) -> Option:
    """Return an option by its name.

    Args:
        name: one of those in `OPTIONS`.

    Returns:
        The option.

    Raises:
        UsageError: there is no such option.
    """
    return named(name, {each.name: each for each in OPTIONS}, "options")
