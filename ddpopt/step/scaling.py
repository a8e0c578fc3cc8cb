"""``GradScaler`` in a step: whether its optimizer's update is kept is decided in the graph.

Eager reads from the device whether a gradient is infinite, and skips the optimizer's step. A graph updates in
any case, and keeps what was before where a gradient is infinite. State that the optimizer makes in that step
is removed after it, as no tensor can say that there was none.

Uses private parts of torch: which files Dynamo traces, and how ``GradScaler`` notes infinite gradients.

Invariant: parameters, the optimizer's state and the scale are bit for bit those of an eager step.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.comptime import comptime
from torch.amp import grad_scaler

from ddpopt.errors import UnsupportedError
from ddpopt.step.settings import INSTEAD, WHAT

MADE: list[tuple[Tensor, Any, list[tuple[Any, list[str]]]]] = []
"""Of each optimizer's step that made state: how many gradients are infinite, the optimizer, and the names of
what it made for which parameter."""
_traced_files: Any = trace_rules.get_mod_inlinelist
_step: Any = torch.amp.GradScaler.step
_unscale: Any = torch.amp.GradScaler.unscale_


def patches() -> dict[str, Any]:
    """What replaces which part of torch while a step is traced; the reasons are in `ddpopt.torch_private`."""
    return {
        "torch._dynamo.trace_rules.get_mod_inlinelist": lambda: {
            *_traced_files(),
            grad_scaler.__file__.removesuffix(".py"),
        },
        "torch.amp.grad_scaler.GradScaler._maybe_opt_step": step_unless_infinite,
        "torch.amp.grad_scaler.GradScaler.step": step,
        "torch.amp.grad_scaler.GradScaler.unscale_": unscale,
    }


def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``GradScaler.step``; Dynamo traces this."""
    _make_entry(scaler, optimizer)
    return _step(scaler, optimizer, *args, **kwargs)


def unscale(scaler: Any, optimizer: Any) -> None:
    """``GradScaler.unscale_``; Dynamo traces this."""
    _make_entry(scaler, optimizer)
    _unscale(scaler, optimizer)


def _make_entry(scaler: Any, optimizer: Any) -> None:
    """Note that an optimizer has not been unscaled; Dynamo cannot call torch's function that does."""
    if scaler.is_enabled() and id(optimizer) not in scaler._per_optimizer_states:
        scaler._per_optimizer_states[id(optimizer)] = {
            "stage": grad_scaler.OptState.READY,
            "found_inf_per_device": {},
        }


def step_unless_infinite(_: Any, optimizer: Any, noted: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of ``GradScaler._maybe_opt_step``, which skips a step; Dynamo traces this."""
    infinite: Any = sum(noted["found_inf_per_device"].values())
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    updated = [each for each in parameters if each.grad is not None]
    states = [optimizer.state[each] if optimizer.state.get(each) else {} for each in updated]
    known = [[*state] for state in states]
    before = [(each, each.clone()) for each in [*updated, *_values(states, Tensor)]]
    numbers = _values(states, (int, float))
    returned = optimizer.step(*args, **kwargs)
    if _values(states, (int, float)) != numbers:
        comptime(_refuse_numbers)
    with torch.no_grad():
        for each, old in before:
            each.copy_(torch.where(infinite > 0, old, each))
    made = [
        (each, [name for name in optimizer.state[each] if name not in names])
        for each, names in zip(updated, known, strict=True)
        if optimizer.state.get(each)
    ]
    if any(names for _, names in made):
        MADE.append((infinite, optimizer, made))
    return returned


def _values(states: list[dict[str, Any]], kind: Any) -> list[Any]:
    return [value for state in states for value in state.values() if isinstance(value, kind)]


def _refuse_numbers(_: Any) -> None:
    raise UnsupportedError(
        f"{WHAT} does not support GradScaler with an optimizer that counts in its state with numbers and not "
        f"with tensors; {INSTEAD}"
    )


@contextlib.contextmanager
def forgetting_skipped() -> Iterator[None]:
    """A block with a step, after which the state that it made is removed if eager would not have made it."""
    try:
        yield
        for infinite, optimizer, made in MADE:
            if infinite.item():
                _remove(optimizer.state, made)
    finally:
        MADE.clear()


def _remove(state: Any, made: Iterable[tuple[Any, list[str]]]) -> None:
    for parameter, names in made:
        for name in names:
            del state[parameter][name]
        if not state[parameter]:
            del state[parameter]
