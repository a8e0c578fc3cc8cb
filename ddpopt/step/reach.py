"""What a step function can read: modules, optimizers, tensors, and the plain values that decide its course.

A step is captured once and then repeated, so everything that Python reads is either an input of the graph
or must be as it was. The arguments are searched, and what the function's code names: variables of enclosing
functions, globals, the object of a method, and the same for the user's functions that it calls.

Invariant: a function, its arguments and its surroundings are searched in the same order in every call.
"""

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Types of values that are compared by value."""
DEEPEST = 6
FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
"""Packages whose functions read nothing of the user's."""


@dataclass
class Reached:
    """What a step function can read, by name as a user would write it.

    Attributes:
        modules: the outermost modules, in the order in which they are found.
        optimizers: the optimizers.
        tensors: tensors outside modules and optimizers.
        plain: plain values, and the lengths of containers.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def every_module(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules, inner ones included, each once."""
        seen: set[int] = set()
        for name, module in self.modules.items():
            for inner, each in module.named_modules(prefix=name):
                if id(each) not in seen:
                    seen.add(id(each))
                    yield inner, each

    def groups(self) -> list[Any]:
        """The process group of each DDP module."""
        every = (module for _, module in self.every_module())
        return [each.process_group for each in every if isinstance(each, DistributedDataParallel)]


def reach(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Reached:
    """Search a step function and its arguments.

    Args:
        function: the user's function.
        arguments: its arguments, by parameter name.

    Returns:
        What was found.
    """
    search = _Reaching(_names(function))
    for name, value in arguments.items():
        search.visit(name, value, 0)
    search.visit_function(function, 0)
    for hook in [*_hooks(search.found)]:
        search.learn(hook)
    return search.found


def _hooks(found: Reached) -> Iterator[Callable[..., Any]]:
    """The user's hooks on modules and parameters."""
    for _, module in found.every_module():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from vars(module)[kind].values()
        for parameter in module.parameters(recurse=False):
            yield from (parameter._backward_hooks or {}).values()
            yield from (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()


class _Reaching:
    """One search; each object is visited once."""

    def __init__(self, names: frozenset[str]) -> None:
        self.found = Reached()
        self._names = set(names)
        self._seen: set[int] = set()

    def visit(self, name: str, value: Any, depth: int) -> None:  # noqa: C901  # one case for each kind
        """Visit a value, and what it contains."""
        if isinstance(value, PLAIN):
            self.found.plain[name] = value
            return
        if id(value) in self._seen or depth > DEEPEST:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.found.tensors[name] = value
        elif isinstance(value, nn.Module):
            self.found.modules[name] = value
        elif isinstance(value, Optimizer):
            self.found.optimizers[name] = value
        elif isinstance(value, LRScheduler):  # its counters change with each epoch
            self.visit(f"{name}.optimizer", getattr(value, "optimizer", None), depth + 1)
        elif isinstance(value, list | tuple | Mapping):
            self._visit_container(name, value, depth)
        elif isinstance(value, functools.partial):
            for part, each in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self.visit(f"{name}.{part}", each, depth + 1)
        elif isinstance(value, types.MethodType):
            self.visit(f"{name}.__self__", value.__self__, depth + 1)
            self.visit_function(value, depth + 1)
        elif isinstance(value, types.FunctionType):
            self.visit_function(value, depth + 1)
        elif _is_users(value):
            for key, each in vars(value).items():
                if key in self._names:
                    self.visit(f"{name}.{key}", each, depth + 1)

    def _visit_container(self, name: str, value: Any, depth: int) -> None:
        self.found.plain[f"len({name})"] = len(value)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            self.visit(f"{name}[{key!r}]", each, depth + 1)

    def learn(self, function: Callable[..., Any]) -> None:
        """Visit a function that torch calls."""
        self._names |= _names(function)
        self.visit_function(function, 0)

    def visit_function(self, function: Callable[..., Any], depth: int) -> None:
        """Visit what a function's code reads from its surroundings."""
        function = inspect.unwrap(function)
        if isinstance(function, types.MethodType):
            self.visit("self", function.__self__, depth)
            function = function.__func__
        if not isinstance(function, types.FunctionType) or _package(function) in FOREIGN:
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.visit(key, cell.cell_contents, depth)
            except ValueError:  # not assigned yet
                continue
        for key in _code_names(function.__code__):
            if key in function.__globals__:
                self.visit(key, function.__globals__[key], depth)


def _is_users(value: object) -> bool:
    """Whether a value is an object of a class that the user wrote."""
    plain_object = not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__")
    return plain_object and _package(type(value)) not in FOREIGN


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _code_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in that of its inner functions."""
    inner = (
        name for const in code.co_consts if isinstance(const, types.CodeType) for name in _code_names(const)
    )
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _names(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the attributes that a function may read, in its own code or in methods that it calls."""
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    known: dict[str, None] = {}
    waiting = [function]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        for name in _code_names(code) if code is not None else ():
            if name not in known:
                known[name] = None
                waiting.extend(each for each in (_method(owner, name), _global(function, name)) if each)
    return frozenset(known)


def _method(owner: Any, name: str) -> Any:
    return getattr(inspect.getattr_static(type(owner), name, None), "__code__", None) and getattr(
        type(owner), name
    )


def _global(function: Any, name: str) -> Any:
    found = getattr(function, "__globals__", {}).get(name)
    return found if isinstance(found, types.FunctionType) and _package(found) not in FOREIGN else None
