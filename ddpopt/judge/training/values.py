"""What a value contains, what a function can reach, and what a tensor is, apart from its elements.

Names of parts do not depend on the run.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 8
"""How deeply nested containers are searched."""
PLAIN = (bool, int, float, complex, str, type(None))
PASSED_OVER = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def leaves(value: Any, name: str, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in containers and plain objects, each with its path.

    >>> list(leaves({"a": [1, None]}, "output"))
    [("output['a'][0]", 1), ("output['a'][1]", None)]
    """
    return (found for found in walked(value, name, depth) if isinstance(found[1], (Tensor, *PLAIN)))


def walked(value: Any, name: str, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield each container and value, each with its path; a container before its contents."""
    yield name, value
    if depth > 0:
        for part, entry in _parts(value):
            yield from walked(entry, name + part, depth - 1)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, (Tensor, *PLAIN)):
        return []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if isinstance(value, (nn.Module, functools.partial, *PASSED_OVER)) or _is_inner(value):
        return []
    return [(f".{key}", entry) for key, entry in getattr(value, "__dict__", {}).items()]


def _is_inner(value: Any) -> bool:
    """Whether a value is internal to torch or ddpopt."""
    return type(value).__module__.startswith(("torch._", "torch.autograd", "torch.distributed", "ddpopt."))


def held_by(function: Any, depth: int = DEPTH // 2) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values that a user's function can reach without its arguments."""
    for name, value in _uses(function).items():
        if isinstance(value, nn.Module):
            yield from ((f"{name}.{path}", tensor) for path, tensor in value.named_buffers())
        elif depth > 0 and (callable(value) and not isinstance(value, type)):
            yield from held_by(value, depth - 1)
        else:
            yield from leaves(value, name)


def is_theirs(function: Any) -> bool:
    """Whether a function is torch's or ddpopt's own."""
    while isinstance(function, functools.partial):
        function = function.func
    return isinstance(function, types.FunctionType) and f"{function.__module__}.".startswith(
        ("torch.", "ddpopt.")
    )


def _uses(function: Any) -> dict[str, Any]:
    """The values a function refers to: bound arguments, its closure and defaults, globals of its module."""
    if is_theirs(function):
        return {}
    if isinstance(function, functools.partial):
        given = {str(place): value for place, value in enumerate(function.args)}
        return {"function": function.func, **given, **function.keywords}
    if isinstance(function, types.MethodType):
        return {"self": function.__self__, "function": function.__func__}
    if not isinstance(function, types.FunctionType):  # list.append, or a callable object
        return {"self": getattr(function, "__self__", function)}
    used: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # raised for a variable without a value
        closure = inspect.getclosurevars(function)
        used = {**closure.globals, **closure.nonlocals}
    defaults = {f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}
    return used | defaults | dict(function.__kwdefaults__ or {})


def reached(loss: Tensor) -> list[Tensor]:
    """List the leaves that a loss sends gradients to, in the order of its graph."""
    found: dict[int, Tensor] = {}
    pending = [loss.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        pending += [source for source, _ in reversed(node.next_functions)]
    if loss.grad_fn is None and loss.requires_grad:
        found[id(loss)] = loss
    return list(found.values())


def type_name_of(value: Any) -> str:
    """Name a type, and the keys of a mapping in their order.

    >>> type_name_of({"a": 1, "b": 2})
    "dict of 'a', 'b'"
    """
    keys = f" of {', '.join(map(repr, value))}" if isinstance(value, Mapping) else ""
    return f"{type(value).__name__}{keys}"


def form_of(tensor: Tensor, with_strides: bool = True) -> str:
    """Describe a tensor's dtype, shape, strides and device, and its autograd state."""
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    strides = ""
    if with_strides and tensor.layout is torch.strided and tensor.numel():
        # the stride of a dimension with a single element has no meaning
        used = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = f", strides {tuple(used)}"
    needs = ", requires grad" if tensor.requires_grad else ""
    # in inference mode, compiled code does not always return inference tensors
    foreign = tensor.is_inference() and not torch.is_inference_mode_enabled()
    inference = ", of inference mode" if foreign else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides} on {tensor.device}{layout}{needs}{inference}"
