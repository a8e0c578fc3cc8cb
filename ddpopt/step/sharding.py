"""Optimizers whose state is divided over the ranks: each rank updates its own parameters.

While a step is traced, an optimizer sees no gradient of parameters that other ranks own, so it makes no state
for them and does not change them. After its step each is marked; `ddpopt.step.gathering` sends them.

Invariant: an optimizer's step leaves gradients as they were.
"""

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.variables import ConstantVariable
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.step.parallel import Ownership
from ddpopt.step.settings import WHAT

torch.library.define("ddpopt::updated", "(Tensor parameter, int key) -> ()")
torch.library.impl("ddpopt::updated", "default", lambda *_: None)
torch.library.define("ddpopt::owned", "(Tensor gradient) -> Tensor")
torch.library.impl("ddpopt::owned", "default", torch.clone)
OWNED: Any = torch.ops.ddpopt.owned
"""Marks a gradient that only the owner of its parameter reads here, on all ranks."""
torch.fx.node.has_side_effect(OWNED.default)
torch.fx.node.has_side_effect(OWNED)
UPDATED: Any = torch.ops.ddpopt.updated
"""Marks a parameter, with its ``id``, that its owner has updated; an all-gather takes the marks' place."""
torch.fx.node.has_side_effect(UPDATED.default)
torch.fx.node.has_side_effect(UPDATED)


_divided: MutableMapping[Tensor, dict[tuple[str, int], int]] = cast("Any", WeakIdKeyDictionary())
"""For each parameter, its owner in each group. It has one for good, whichever modules it is found in."""


def owners_in(group: Any, parameters: Iterable[Tensor]) -> dict[int, int]:
    """The owner of each parameter, by its ``id``.

    A parameter without one goes to the rank that has least, the largest first.

    Args:
        group: the ranks.
        parameters: in an order that is equal on all ranks.
    """
    key = group.group_name, group.size()
    held = [0] * group.size()
    known = {parameter: _divided.setdefault(parameter, {}) for parameter in parameters}
    for parameter, owners in known.items():
        if key in owners:
            held[owners[key]] += parameter.numel()
    for parameter, owners in sorted(known.items(), key=lambda each: -each[0].numel()):
        if key not in owners:
            owners[key] = held.index(min(held))
            held[owners[key]] += parameter.numel()
    return {id(parameter): owners[key] for parameter, owners in known.items()}


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


def divide(optimizer: Any, shares: Ownership) -> Callable[[], None]:
    """Keep this rank's part of an optimizer's state, and refuse calls outside of captured steps.

    Args:
        optimizer: the optimizer; some make all state when they are built.
        shares: the owners of its parameters.

    Returns:
        A function that undoes this.
    """
    others = [each for each in optimizer.state if shares.owners.get(id(each), shares.rank) != shares.rank]
    removed = {parameter: optimizer.state.pop(parameter) for parameter in others}
    is_known = refuse_outside in optimizer._optimizer_step_pre_hooks.values()
    handle = None if is_known else optimizer.register_step_pre_hook(refuse_outside)

    def undo() -> None:
        optimizer.state.update(removed)
        if handle is not None:
            handle.remove()

    return undo


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


def _refuse_closure(_: Any) -> None:
    raise UnsupportedError(
        f"{WHAT}: parallel=ddpopt.ShardOptimizer() does not support optimizers that are called with a "
        "closure; use ddpopt.Replicate()"
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
        key = id(variable.proxy.node.meta["grapharg"].example)
        owner = known.owners.get(key)
        tx = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        tx.symbolic_locals["is_shared"] = ConstantVariable.create(owner is not None)
        tx.symbolic_locals["is_own"] = ConstantVariable.create(owner == known.rank)
        tx.symbolic_locals["key"] = ConstantVariable.create(key)

    def step(optimizer: Any, closure: Any = None) -> Any:
        """Update this rank's parameters; Dynamo traces this."""
        if closure is not None:
            comptime(_refuse_closure)
        shared = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                is_shared = is_own = True
                key = 0
                comptime(ask)  # which sets these
                if is_shared:
                    gradient = parameter.grad
                    owned = OWNED(gradient)
                    shared.append((parameter, gradient, key))
                    parameter.grad = owned if is_own else None
        returned = type(optimizer).step(optimizer)
        for parameter, gradient, _ in shared:
            parameter.grad = gradient
        for parameter, _, key in shared:
            UPDATED(parameter, key)
        return returned

    return step
