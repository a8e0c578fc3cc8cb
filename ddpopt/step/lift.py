"""The inputs of a captured step: every tensor and number that it may read, found anew in each call.

State belongs to the user: parameters, buffers, gradients and the optimizer's state are read from where they
are when a step begins, so they may have been loaded, scheduled or replaced since the last one.

Invariant: two calls with equal `Inputs.form` may use the same graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.step.reach import PLAIN, Reached

DDP_STATE = ("training", "require_backward_grad_sync", "require_forward_param_sync")
"""Attributes of a DDP module that decide what its next forward does."""
Place = tuple[Any, Any]
"""A dictionary, and the key under which it holds a tensor."""


@dataclass
class Inputs:
    """The inputs of one call.

    Attributes:
        reached: where they were found.
        names: of each tensor, for messages.
        tensors: each tensor once, in the order in which they were found.
        places: where modules hold tensors.
        staged: for each of `places`, the index of the tensor.
        gradients: index of a tensor, and index of its ``.grad``.
        loose: indices of the tensors outside modules and optimizers.
        numbers: the hyperparameters that may change without recompilation, by name.
        plain: all other plain values, by name.
    """

    reached: Reached
    names: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    index: dict[int, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> int:
        """Add a tensor; return its index."""
        place = self.index.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.names.append(name)
            self.tensors.append(tensor)
        return place

    def hold(self, name: str, held: Any, key: Any) -> None:
        """Add a tensor that a module holds."""
        self.places.append((held, key))
        self.staged.append(self.add(name, held[key]))

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything that a graph depends on, except the sizes of its tensors."""
        forms = tuple(map(form_of, self.tensors))
        return self.plain, (*self.numbers,), forms, self.staged, self.gradients, self.loose

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Sizes and strides of all tensors."""
        return tuple((tensor.shape, tensor.stride()) for tensor in self.tensors)

    def difference(self, other: "Inputs") -> list[str]:
        """Names of the plain values and tensors in which other inputs differ."""
        names = {**self.plain, **other.plain}
        found = [name for name in names if self.plain.get(name, name) != other.plain.get(name, name)]
        pairs = zip(self.names, self.tensors, other.tensors, strict=False)
        found += [name for name, mine, its in pairs if form_of(mine) != form_of(its)]
        return found or (["the number of tensors"] if len(self.tensors) != len(other.tensors) else [])


def gather(reached: Reached, lifted: frozenset[str]) -> Inputs:
    """Collect the inputs of a call.

    Args:
        reached: what the step can read.
        lifted: names of numbers, besides learning rates, that are inputs of the graph.

    Returns:
        The inputs.
    """
    inputs = Inputs(reached)
    inputs.plain.update(_settings())
    for name, value in reached.plain.items():
        _add_plain(inputs, name, value, lifted)
    _gather_modules(inputs)
    _gather_optimizers(inputs, lifted)
    inputs.loose.extend(inputs.add(name, tensor) for name, tensor in reached.tensors.items())
    for place, tensor in enumerate([*inputs.tensors]):
        if tensor.is_leaf and tensor.grad is not None:
            inputs.gradients[place] = inputs.add(f"{inputs.names[place]}.grad", tensor.grad)
    return inputs


def _settings() -> Mapping[str, Any]:
    """Global settings of torch that decide what a program computes."""
    cast = {
        f"autocast({kind})": torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    }
    return {
        **cast,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }


def _add_plain(inputs: Inputs, name: str, value: Any, lifted: frozenset[str]) -> None:
    if name in lifted and type(value) is float:
        inputs.numbers[name] = value
    else:
        inputs.plain[name] = value


def _gather_modules(inputs: Inputs) -> None:
    for name, module in inputs.reached.every_module():
        own = vars(module)
        chosen = DDP_STATE if isinstance(module, DistributedDataParallel) else [*own]
        for key in chosen:
            value = own[key]
            if isinstance(value, PLAIN):
                inputs.plain[f"{name}.{key}"] = value
            elif isinstance(value, Tensor):
                inputs.hold(f"{name}.{key}", own, key)
            elif isinstance(value, list | tuple):
                tensors = (each for each in value if isinstance(each, Tensor))
                inputs.loose.extend(inputs.add(f"{name}.{key}[...]", each) for each in tensors)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            inputs.plain[f"{name}.{kind}"] = len(own[kind])
        for held in (own["_parameters"], own["_buffers"]):
            for key in [key for key, tensor in held.items() if tensor is not None]:
                inputs.hold(f"{name}.{key}", held, key)


def _gather_optimizers(inputs: Inputs, lifted: frozenset[str]) -> None:
    for name, optimizer in inputs.reached.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            where = f"{name}.param_groups[{number}]"
            members = [inputs.add(f"{where}['params']", each) for each in group["params"]]
            inputs.plain[where] = (tuple(members), len(group))
            for key, value in group.items():
                if key != "params":
                    _add_hyperparameter(inputs, f"{where}['{key}']", key, value, lifted)
        for parameter, state in optimizer.state.items():
            where = f"{name}.state[{inputs.add(f'{name}.state', parameter)}]"
            for key, value in state.items():
                if isinstance(value, Tensor):
                    inputs.plain[f"{where}['{key}']"] = inputs.add(f"{where}['{key}']", value)
                else:
                    inputs.plain[f"{where}['{key}']"] = value


def _add_hyperparameter(inputs: Inputs, name: str, key: str, value: Any, lifted: frozenset[str]) -> None:
    if isinstance(value, Tensor):
        inputs.plain[name] = inputs.add(name, value)
    elif isinstance(value, list | tuple):  # betas
        for place, each in enumerate(value):
            _add_plain(inputs, f"{name}[{place}]", each, lifted)
    elif key == "lr" and isinstance(value, float):
        inputs.numbers[name] = value
    else:
        _add_plain(inputs, name, value, lifted)


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor's form that a graph depends on, except its sizes and strides."""
    return (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout, tensor.dim())
