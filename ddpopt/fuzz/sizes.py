"""How large a drawn model is, in what a reader has to read and a machine to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ddpopt.testing.drawn import DrawnModel


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        ops: calls of torch's functions in one forward, those inside of layers once for each layer.
        parameters: elements of all parameters.
        nbytes: of them.
        lines: of the model's source.
    """

    ops: int
    parameters: int
    nbytes: int
    lines: int


class _Calls(TorchFunctionMode):
    """Counts calls of torch's functions and tensors' methods, but not what is read off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        self.count += getattr(func, "__name__", "") != "__get__"
        return func(*args, **(kwargs or {}))


def size_of(model: DrawnModel) -> Size:
    """Measure a model, in one forward in eager.

    Args:
        model: what to measure.
    """
    program = model.program
    module = program.model()
    args, kwargs = program.inputs()
    with torch.random.fork_rng(devices=()), _Calls() as calls:
        module(*args, **kwargs)
    parameters = list(module.parameters())
    return Size(
        calls.count,
        sum(each.numel() for each in parameters),
        sum(each.numel() * each.element_size() for each in parameters),
        len(model.source.splitlines()),
    )
