"""Write small forward graphs node by node, as Dynamo hands them to a backend, without tracing a model.

Invariant: each node that has a value carries it as a fake tensor in ``meta["example_value"]``, computed by
the node's own target; nodes that switch autograd or autocast carry none. Parameters, buffers and inputs are
placeholders in the order of their first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ddpopt.reducer import ParamSpec

AUTOCAST_DTYPE = torch.bfloat16


class SmallGraph(NamedTuple):
    """A forward graph with all that a planner and a test need to know of it.

    Attributes:
        gm: the graph; placeholders named as Dynamo names them.
        param_placeholders: placeholder name -> parameter name, for trainable and frozen parameters.
        example_values: the fake value of each placeholder, in the order of the placeholders.
    """

    gm: fx.GraphModule
    param_placeholders: Mapping[str, str]
    example_values: tuple[FakeTensor, ...]

    def specs(self) -> dict[int, ParamSpec]:
        """What DDP would reduce of its parameters, by the identity of their example values."""
        names = [self.param_placeholders.get(n.name) for n in self.gm.graph.find_nodes(op="placeholder")]
        return {
            id(value): ParamSpec(
                name, value.numel() * value.element_size(), str(value.dtype).removeprefix("torch."), "cpu"
            )
            for name, value in zip(names, self.example_values, strict=True)
            if name is not None and value.requires_grad
        }


class GraphBuilder:
    """An FX graph under construction.

    Args:
        batch: rows of the input ``l_x_``.
        width: columns of the input ``l_x_``.
    """

    def __init__(self, batch: int, width: int) -> None:
        self.batch = batch
        self.width = width
        self._fake_mode = FakeTensorMode()
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._last_placeholder: fx.Node | None = None
        self._param_placeholders: dict[str, str] = {}
        self._grad_enabled = True
        self._autocast = False
        self.x = self.input("x", batch, width)

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """Add an input that needs no gradient; returns its placeholder. Integers are 0 or 1."""
        with self._fake_mode:
            return self._placeholder(f"l_{name}_", torch.empty(shape, dtype=dtype))

    def parameter(
        self, layer: str, role: str, *shape: int, trainable: bool = True, dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        """Add the parameter ``layer.role``; returns its placeholder."""
        with self._fake_mode:
            value = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trainable)
        node = self._placeholder(f"l_self_{_mangled(layer)}_parameters_{role}_", value)
        self._param_placeholders[node.name] = f"{layer}.{role}"
        return node

    def buffer(self, layer: str, role: str, *shape: int) -> fx.Node:
        """Add the buffer ``layer.role`` (float32); returns its placeholder."""
        with self._fake_mode:
            return self._placeholder(f"l_self_{_mangled(layer)}_buffers_{role}_", torch.zeros(shape))

    def constant(self, value: torch.Tensor) -> fx.Node:
        """Add a tensor that the graph holds itself; returns its get_attr node."""
        name = f"_tensor_constant{len(list(self._root.buffers()))}"
        self._root.register_buffer(name, value)
        node = self._graph.get_attr(name)
        node.meta["example_value"] = self._fake_mode.from_tensor(value)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add ``target(*args, **kwargs)``; nodes stand for their values, also within lists and dicts."""
        return self._evaluated(self._graph.call_function(target, args, kwargs), target)

    def method(self, name: str, receiver: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """Add ``receiver.name(*args, **kwargs)``."""
        node = self._graph.call_method(name, (receiver, *args), kwargs)
        return self._evaluated(node, lambda value, *rest, **more: getattr(value, name)(*rest, **more))

    def set_grad_enabled(self, enabled: bool) -> None:
        """Switch autograd for the nodes that follow."""
        self._graph.call_function(torch._C._set_grad_enabled, (enabled,))
        self._grad_enabled = enabled

    def enter_autocast(self) -> fx.Node:
        """Compute the nodes that follow under CPU autocast to bfloat16; returns the handle to leave it by."""
        self._autocast = True
        arguments = ("cpu", AUTOCAST_DTYPE, True, None)
        return self._graph.call_function(torch.amp.autocast_mode._enter_autocast, arguments)

    def exit_autocast(self, handle: fx.Node) -> None:
        """Leave the autocast span that ``handle`` opened."""
        self._autocast = False
        self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (handle,))

    def finish(self, *outputs: fx.Node) -> SmallGraph:
        """Return ``outputs`` as a tuple and close the graph."""
        self._graph.output(outputs)
        self._graph.lint()
        gm = fx.GraphModule(self._root, self._graph)
        values = tuple(n.meta["example_value"] for n in self._graph.nodes if n.op == "placeholder")
        return SmallGraph(gm, self._param_placeholders, values)

    def _placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        after = self._last_placeholder or self._graph._root
        with self._graph.inserting_after(after):
            node = self._graph.placeholder(name)
        node.meta["example_value"] = value
        self._last_placeholder = node
        return node

    def _evaluated(self, node: fx.Node, target: Callable[..., Any]) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._fake_mode)
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            if self._autocast:
                stack.enter_context(torch.autocast("cpu", AUTOCAST_DTYPE))
            node.meta["example_value"] = target(*args, **kwargs)
        node.meta["stack_trace"] = f'  File "model.py", line {len(self._graph.nodes)}, in forward\n'
        return node


def _mangled(layer: str) -> str:
    return "modules_" + layer.replace(".", "_modules_")


def real_inputs(graph: SmallGraph, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Draw real tensors for a graph.

    Args:
        graph: the graph.
        seed: equal seeds give equal tensors.

    Returns:
        One tensor for each placeholder, in their order, on the CPU: normally distributed, or 0 and 1 for
        integers; trainable parameters require gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(_drawn(value, generator) for value in graph.example_values)


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (like.is_floating_point() or like.is_complex()):
        return torch.randint(0, 2, like.shape, generator=generator, dtype=like.dtype)
    value = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return value.requires_grad_(isinstance(like, nn.Parameter) and like.requires_grad)
