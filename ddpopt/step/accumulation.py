"""What a backward does to each leaf, as Dynamo traces it: hooks, and the accumulation between them.

Dynamo leaves hooks on parameters out of a traced backward. Here they are traced next to the accumulation, in
the order in which eager's autograd reaches the leaves.

Uses private parts of torch: how Dynamo accumulates gradients, and looks up attributes of tensors.

Invariant: a hook runs once for each gradient of its leaf, before or after the accumulation as in eager.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import polyfills
from torch._dynamo.comptime import comptime
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable

from ddpopt.errors import UnsupportedError
from ddpopt.step.settings import INSTEAD, WHAT
from ddpopt.step.unused import FILLED, Filled

torch.library.define("ddpopt::mark", "(Tensor parameter, Tensor gradient) -> Tensor")
torch.library.impl("ddpopt::mark", "default", lambda _, gradient: gradient.clone())
MARK: Any = torch.ops.ddpopt.mark
"""Marks a parameter's gradient before it is accumulated, and what it is afterwards."""
HOOKS = {
    f"torch._dynamo.variables.TensorVariable.method_attr_{kind}": kind
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
}
"""What Dynamo looks for when it reads the hooks of a tensor, and has for no tensor of its own."""
Hook = Callable[[Tensor], Tensor | None]
Accumulate = Callable[[Tensor, Tensor | None, Tensor | None], Tensor | None]
_accumulate: Any = polyfills.accumulate_grad
_collected: Any = TensorVariable._collect_backward_inputs
_gradient: Any = TensorVariable.method_attr_grad


def patches(filled: Filled, accumulate: Accumulate) -> dict[str, Any]:
    """What replaces which part of torch while a step is traced; the reasons are in `ddpopt.torch_private`.

    Args:
        filled: the parameters that only other ranks use.
        accumulate: what `traced` made of them.
    """
    return {
        "torch._dynamo.polyfills.accumulate_grad": accumulate,
        "torch._dynamo.variables.TensorVariable._collect_backward_inputs": functools.partialmethod(
            _leaves, filled
        ),
        "torch._dynamo.variables.TensorVariable.method_attr_grad": _own_none,
        **{name: functools.partialmethod(_hooks, kind) for name, kind in HOOKS.items()},
    }


def traced(filled: Filled) -> Accumulate:
    """The accumulation of a gradient as Dynamo traces it.

    Args:
        filled: the parameters that only other ranks use.
    """

    def ask(ctx: Any) -> None:
        parameter = ctx.get_local("parameter")._i_will_not_complain_if_bc_breaks_VariableTracker()
        if parameter.proxy.node in filled:
            tx = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
            tx.symbolic_locals["is_filled"] = ConstantVariable.create(True)

    def accumulate(parameter: Tensor, gradient: Tensor | None, new: Tensor | None) -> Tensor | None:
        """Accumulate a gradient, between the user's hooks; Dynamo traces this for each leaf.

        Args:
            parameter: the leaf.
            gradient: the one that it has.
            new: the one that it gets; None leaves it as it is, and runs no hook.
        """
        leaf: Any = parameter  # torch does not type its hooks
        if new is None:
            is_filled = False
            comptime(ask)  # may make it True
            if not is_filled:
                return cast("Tensor | None", _accumulate(parameter, gradient, new))
            local = _accumulate(parameter, gradient, MARK(parameter, FILLED(parameter)))
        else:
            new = MARK(parameter, new)
            if leaf._backward_hooks:
                new = _changed(new, leaf._backward_hooks)
            local = _accumulate(parameter, gradient, new)
            if leaf._post_accumulate_grad_hooks:
                local = _told(leaf, local, leaf._post_accumulate_grad_hooks)
        accumulated: Tensor = MARK(parameter, local)
        return accumulated if gradient is None else gradient.copy_(accumulated)

    return accumulate


def _refuse_none(_: Any) -> None:
    raise UnsupportedError(
        f"{WHAT} does not support hooks on a parameter that set its gradient to None before it is reduced; "
        f"{INSTEAD}"
    )


def _changed(gradient: Any, hooks: Mapping[int, Hook]) -> Any:
    """A gradient after the hooks on it."""
    for hook in hooks.values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _told(parameter: Any, gradient: Tensor, hooks: Mapping[int, Hook]) -> Any:
    """An accumulated gradient after the hooks that see its parameter."""
    parameter.grad = gradient
    for hook in hooks.values():
        hook(parameter)
    if parameter.grad is None:
        comptime(_refuse_none)
    return parameter.grad


def _hooks(variable: Any, kind: str, tx: Any) -> Any:
    """The hooks of a tensor that the step reads; Dynamo would look at its fake tensor."""
    return variable.dynamic_getattr(tx, kind) if variable.source else ConstantVariable(None)


def _leaves(loss: Any, filled: Filled, *args: Any, **kwargs: Any) -> Any:
    """What a backward accumulates into; if hooks see it, in eager's order."""
    found = _collected(loss, *args, **kwargs)
    nodes = [each.proxy.node for each in found]
    filled.begin(loss.proxy.node, nodes)
    read = [node.meta["grapharg"].example for node in nodes if "grapharg" in node.meta]
    if not any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in read):
        return found
    fakes = [node.meta["example_value"] for node in nodes]
    ready = _in_ready_order(loss.proxy.node.meta["example_value"], fakes)
    return [found[place] for place in (*ready, *sorted({*range(len(found))} - {*ready}))]


def _in_ready_order(loss: Tensor, leaves: list[Any]) -> list[int]:
    """The places of leaves, in the order in which a backward reaches them."""
    ready: list[int] = []
    mode: Any = InstructionTranslator.current_tx().fake_mode
    notes = [functools.partial(_note, ready, place) for place in range(len(leaves))]
    handles = [leaf.register_hook(note) for leaf, note in zip(leaves, notes, strict=True)]
    try:
        with mode:
            torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return ready


def _note(ready: list[int], place: int, _: Tensor) -> None:
    ready.append(place)


def _own_none(variable: Any, tx: Any) -> Any:
    """A gradient that the step has set to None; Dynamo would name its only None after that gradient."""
    found = _gradient(variable, tx)
    return ConstantVariable(None) if found is not None and found.is_python_constant() else found
