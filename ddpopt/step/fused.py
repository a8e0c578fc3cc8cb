"""Fused optimizers in a step: their kernels as operators of ours, each of which calls torch's.

torch keeps Dynamo from the functions that call these kernels, some of the kernels have no version for fake
tensors, and its functionalization fails where a list is empty (``max_exp_avg_sqs`` without ``amsgrad``). An
operator with the same schema has none of these problems, and is the same kernel, so equal bit for bit. Its
learning rate is a tensor, as a number would be a constant of the graph.

Invariant: no operator of torch is changed.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("sgd", "adam", "adamw", "adagrad")
CALLERS = ("torch.optim.adagrad._fused_adagrad", "torch.optim.adam._fused_adam", "torch.optim.sgd._fused_sgd")
"""The functions that Dynamo has to trace."""
library: Any = torch.library  # torch leaves it untyped
_ours = library.Library("ddpopt", "FRAGMENT")


def _defined(kind: str) -> Callable[..., None]:
    """What a step calls for one kind of optimizer."""
    kernel: Any = getattr(torch.ops.aten, f"_fused_{kind}_").tensor_lr
    _, _, parameters = str(kernel._schema).partition("(")
    name = f"fused_{kind}"
    _ours.define(f"{name}({parameters}")
    _ours.impl(name, functools.partial(_call, kernel), "CompositeExplicitAutograd")
    library.register_fake(f"ddpopt::{name}", _leave, lib=_ours)
    operator: Any = getattr(torch.ops.ddpopt, name).default

    def update(*args: Any, lr: Any, **kwargs: Any) -> None:
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64)
        operator(*args, lr=rate, **kwargs)

    return update


def _call(kernel: Any, *args: Any, **kwargs: Any) -> None:
    kernel(*args, **kwargs)


def _leave(*_: Any, **__: Any) -> None:
    """On fake tensors nothing is computed, and no shape changes."""


OPERATORS: Mapping[str, Any] = {f"torch._fused_{kind}_": _defined(kind) for kind in KINDS}


def patches() -> dict[str, Any]:
    """What replaces which part of torch while a step is traced, by dotted name."""
    return {**OPERATORS, **{name: inspect.unwrap(pkgutil.resolve_name(name)) for name in CALLERS}}
