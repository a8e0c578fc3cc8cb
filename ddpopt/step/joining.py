"""Steps under ``join()``, in which a rank without inputs repeats what DDP sends in the others' iterations.

A step sends the same in the same order: what DDP sends before a forward, by DDP's own functions before the
graph runs; then the reducer's buckets, in the graph. The reducer is told of each step, so that it rebuilds
its buckets when those of the ranks without inputs do.

Uses private parts of torch: DDP's methods for ``join()``, and those of its reducer.

Invariant: a step sends what DDP's iteration would, and nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.algorithms.join import Join

from ddpopt.ddp.held import bucket_members, running_reducer
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import UnsupportedError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.step.replicas import Replica
from ddpopt.step.settings import INSTEAD, WHAT


class RebuiltError(Exception):
    """The reducer has other buckets than the graph of a step was captured for."""


def is_joining(ddp: Any) -> bool:
    """Whether a DDP module is used under ``join()``."""
    return bool(ddp._join_config.enable)


def require_joinable(replica: Replica, others: Sequence[Replica], forwards: int, *, is_reduced: bool) -> None:
    """Check that ranks without inputs can repeat what a module sends in a step.

    Args:
        replica: the module.
        others: all modules of the step.
        forwards: how often the step calls it.
        is_reduced: whether the step reduces it.

    Raises:
        UnsupportedError: they cannot.
    """
    ddp: Any = replica.owner
    if not is_joining(ddp):
        return
    problems = {
        "join() with find_unused_parameters or static_graph": ddp.find_unused_parameters or ddp.static_graph,
        "join(divide_by_initial_world_size=False)": not ddp._divide_by_initial_world_size,
        "join() in a step with several forwards, or without a backward": forwards != 1 or not is_reduced,
        "join() in a step of several modules": len(others) > 1,
    }
    if wrong := [what for what, there in problems.items() if there]:
        name = replica.name
        raise UnsupportedError(f"{WHAT} does not support that {name} uses {' and '.join(wrong)}; {INSTEAD}")


def reducers_buckets(ddp: Any) -> list[list[ParamSpec]]:
    """The parameters of each bucket of a module's reducer, in the order in which they are reduced."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    by_name: Mapping[str, ParamSpec] = {spec.name: spec for spec in specs_from_ddp(ddp)}
    members = bucket_members(running_reducer(ddp))
    assert members is not None  # a step refuses sparse gradients
    return [[by_name[names[id(parameter)]] for parameter in bucket] for bucket in members]


def begin(ddp: Any) -> None:
    """Send what DDP sends before a forward.

    Raises:
        RuntimeError: another rank has no more inputs, and ``join(throw_on_early_termination=True)``.
        RebuiltError: the reducer has rebuilt its buckets; all has been sent.
    """
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
    is_rebuilt = ddp.reducer._rebuild_buckets()
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()
    ddp._check_global_requires_backward_grad_sync(is_joined_rank=False)
    if is_rebuilt:
        ddp._has_rebuilt_buckets = True
        raise RebuiltError


def end(ddp: Any) -> None:
    """Tell the reducer that its gradients have arrived."""
    ddp.reducer._push_all_rebuilt_params()
