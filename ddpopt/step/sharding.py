"""Optimizers whose state is divided over the ranks: each rank updates its own parameters.

While a step is traced, an optimizer sees no gradient of parameters that other ranks own, so it makes no state
for them and does not change them. After its step each is marked; `ddpopt.step.gathering` sends them.

Invariant: an optimizer's step leaves gradients as they were.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.variables import ConstantVariable
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ddpopt.errors import UsageError
from ddpopt.step.parallel import Ownership
from ddpopt.step.settings import WHAT

torch.library.define("ddpopt::updated", "(Tensor parameter) -> ()")
torch.library.impl("ddpopt::updated", "default", lambda _: None)
torch.library.define("ddpopt::owned", "(Tensor gradient) -> Tensor")
torch.library.impl("ddpopt::owned", "default", torch.clone)
OWNED: Any = torch.ops.ddpopt.owned
"""Marks a gradient that only the owner of its parameter reads here, on all ranks."""
torch.fx.node.has_side_effect(OWNED.default)
torch.fx.node.has_side_effect(OWNED)
UPDATED: Any = torch.ops.ddpopt.updated
"""Marks a parameter that its owner has updated, until its bucket's all-gather takes the marks' place."""
torch.fx.node.has_side_effect(UPDATED.default)
torch.fx.node.has_side_effect(UPDATED)


def divided(parameters: Iterable[Tensor], size: int) -> dict[int, int]:
    """The owner of each parameter, by its ``id``: the largest first, each to the rank that has least.

    Args:
        parameters: in an order that is equal on all ranks.
        size: the number of ranks.
    """
    held = [0] * size
    owners: dict[int, int] = {}
    for parameter in sorted(parameters, key=lambda each: -each.numel()):
        owner = held.index(min(held))
        held[owner] += parameter.numel()
        owners[id(parameter)] = owner
    return owners


def whole_state(own: dict[str, Any], group: Any) -> dict[str, Any]:
    """The state of an optimizer of all ranks, on the CPU.

    Args:
        own: ``state_dict()`` of this rank's optimizer.
        group: the ranks that own parameters of it; all of them call this.
    """
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tree_map_only(Tensor, Tensor.cpu, own["state"]), group)
    merged = {number: state for part in parts for number, state in part.items()}
    return {**own, "state": dict(sorted(merged.items()))}


def keep_own_state(optimizer: Any, shares: Ownership) -> None:
    """Remove the state of parameters that other ranks own."""
    for parameter in [*optimizer.state]:
        if shares.owners.get(id(parameter), shares.rank) != shares.rank:
            del optimizer.state[parameter]


def keep_in_steps(optimizer: Any) -> RemovableHandle | None:
    """Let an optimizer, whose state is divided, be called within a captured step only.

    Returns:
        What removes this again; None if it was so before.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if refuse_outside in hooks.values():
        return None
    handle: RemovableHandle = optimizer.register_step_pre_hook(refuse_outside)
    return handle


def refuse_outside(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer's step that is not a part of a captured one; a hook of torch's.

    Raises:
        UsageError: it is not.
    """
    del args, kwargs
    if not torch.compiler.is_compiling():
        raise UsageError(
            f"{WHAT}: {type(optimizer).__name__}.step() was called outside of the train step, but each rank "
            "has only a part of its state (parallel=ddpopt.ShardOptimizer()); call it within the step"
        )


def traced(shares: Callable[[], Ownership | None]) -> Callable[..., Any]:
    """An optimizer's step as Dynamo traces it.

    Args:
        shares: asked while Dynamo traces.
    """

    def ask(ctx: Any) -> None:
        variable = ctx.get_local("parameter")._i_will_not_complain_if_bc_breaks_VariableTracker()
        known = shares()
        assert known is not None  # or this step would not be traced
        owner = known.owners.get(id(variable.proxy.node.meta["grapharg"].example))
        tx = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        tx.symbolic_locals["is_shared"] = ConstantVariable.create(owner is not None)
        tx.symbolic_locals["is_own"] = ConstantVariable.create(owner == known.rank)

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Update this rank's parameters; Dynamo traces this."""
        shared = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                is_shared = is_own = True
                comptime(ask)  # may make them False
                if is_shared:
                    gradient = parameter.grad
                    owned = OWNED(gradient)
                    shared.append((parameter, gradient))
                    parameter.grad = owned if is_own else None
        returned = type(optimizer).step(optimizer, *args, **kwargs)
        for parameter, gradient in shared:
            parameter.grad = gradient
        for parameter, _ in shared:
            UPDATED(parameter)
        return returned

    return step
