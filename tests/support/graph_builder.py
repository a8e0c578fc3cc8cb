"""Write small forward graphs node by node, as Dynamo hands them to a backend, without tracing a model.

Invariant: in a finished graph each node that has a value carries one of its form in
``meta["example_value"]``: a fake tensor, a number or a symbol. Nodes that switch autograd or autocast carry
none, nor do those that name a graph. Parameters, buffers and inputs are placeholders in the order of their
first use.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ddpopt.graph.nodes import unwritten_module, with_values
from ddpopt.planning.bucket_rule import ParamSpec

AUTOCAST_DTYPE = torch.bfloat16


class SmallGraph(NamedTuple):
    """A forward graph with all that a planner and a test need to know of it.

    Attributes:
        gm: the graph; placeholders named as Dynamo names them.
        param_placeholders: placeholder name -> parameter name, for trainable and frozen parameters, in the
            order in which a model would register them.
        example_values: the fake value of each placeholder, in the order of the placeholders; a symbol where a
            placeholder stands for a size.
    """

    gm: fx.GraphModule
    param_placeholders: Mapping[str, str]
    example_values: tuple[Any, ...]

    def specs(self) -> dict[int, ParamSpec]:
        """What DDP would reduce of its parameters, by the identity of their example values.

        In the order of ``param_placeholders``, whatever the order of the placeholders.
        """
        placeholders = (node.name for node in self.gm.graph.find_nodes(op="placeholder"))
        values = dict(zip(placeholders, self.example_values, strict=True))
        params = ((name, values[label]) for label, name in self.param_placeholders.items())
        return {id(param): _spec(name, param) for name, param in params if is_trained(param)}


def is_trained(value: object) -> TypeGuard[nn.Parameter]:
    """Whether a value is a parameter that needs a gradient."""
    return isinstance(value, nn.Parameter) and value.requires_grad


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    dtype = str(param.dtype).removeprefix("torch.")
    return ParamSpec(name, param.numel() * param.element_size(), dtype, "cpu")


class _Pending(NamedTuple):
    """A node whose example value is still to be computed, and under which modes."""

    node: fx.Node
    value: Callable[[], Any]
    grad_enabled: bool
    autocast: bool


class GraphBuilder:
    """An FX graph under construction.

    Example values are computed when the graph is finished, or before by :meth:`evaluate`: most of a graph's
    cost, and none of it is spent on a draw that Hypothesis gives up halfway.

    Args:
        batch: rows of the input ``l_x_``; two or more where they are a symbol.
        width: columns of the input ``l_x_``.
        symbolic: whether the graph knows of its rows as a symbol only, as Dynamo does under dynamic shapes.

    Attributes:
        batch, width: as given; or the symbol.
        rows: what nodes name the rows by: the number, or the placeholder of the symbol.
    """

    def __init__(self, batch: int, width: int, *, symbolic: bool = False) -> None:
        self.width = width
        self.rows: int | fx.Node = batch
        self.batch: Any = batch
        self._fake_mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._last_placeholder: fx.Node | None = None
        self._param_placeholders: dict[str, str] = {}
        self._pending: list[_Pending] = []
        self._grad_enabled = True
        self._autocast = False
        if symbolic:
            sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
            real = torch.empty(batch, width)
            fake = self._fake_mode.from_tensor(real, symbolic_context=sizes, source=ConstantSource("x"))
            self.batch = fake.shape[0]
            self.rows = self._placeholder(str(self.batch), lambda: self.batch)
        self.x = self.input("x", self.batch, width)

    def input(self, name: str, *shape: int | torch.SymInt) -> fx.Node:
        """Add an input that needs no gradient; returns its placeholder."""
        return self._placeholder(f"l_{name}_", lambda: torch.empty(shape))

    def parameter(
        self, layer: str, role: str, *shape: int, trainable: bool = True, dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        """Add the parameter ``layer.role``; returns its placeholder."""
        node = self._placeholder(
            f"l_self_{_mangled(layer)}_parameters_{role}_",
            lambda: nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trainable),
        )
        self._param_placeholders[node.name] = f"{layer}.{role}"
        return node

    def buffer(self, layer: str, role: str, *shape: int) -> fx.Node:
        """Add the buffer ``layer.role`` (float32); returns its placeholder."""
        label = f"l_self_{_mangled(layer)}_buffers_{role}_"
        return self._placeholder(label, lambda: torch.zeros(shape))

    def constant(self, value: torch.Tensor) -> fx.Node:
        """Add a tensor that the graph holds itself; returns its get_attr node."""
        name = f"_tensor_constant{len(list(self._root.buffers()))}"
        self._root.register_buffer(name, value)
        return self._later(self._graph.get_attr(name), lambda: self._fake_mode.from_tensor(value))

    def subgraph(self, name: str, operands: Mapping[str, fx.Node], write: Callable[..., Any]) -> fx.Node:
        """Add a graph that a node of this one calls, as Dynamo does for higher-order operators.

        Args:
            name: of the attribute, which gets a number.
            operands: by the name of each of its placeholders, a node whose value it gets.
            write: ``(builder, *placeholders) -> results``: writes it, returns nested tuples of nodes.

        Returns:
            The get_attr node that stands for it; it has no value.
        """
        inner = copy.copy(self)  # shares the fake mode, and what is to be evaluated
        inner._root, inner._graph, inner._last_placeholder = nn.Module(), fx.Graph(), None
        given = [inner._placeholder(n, functools.partial(_value, node)) for n, node in operands.items()]
        inner._graph.output(write(inner, *given))
        label = f"{name}_{len(list(self._root.children()))}"
        self._root.add_module(label, unwritten_module(inner._root, inner._graph))
        return self._graph.create_node("get_attr", label, name=label)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add ``target(*args, **kwargs)``; nodes stand for their values, also within lists and dicts."""
        return self._evaluated(self._graph.call_function(target, args, kwargs), target)

    def call_like(
        self, like: Callable[..., Any], target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Add ``target(*args, **kwargs)``, whose value has the form of ``like(*args)`` (None for a graph)."""
        node = self._graph.call_function(target, args, kwargs)
        return self._evaluated(node, lambda *values, **_: like(*values))

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
        self.evaluate()
        gm = unwritten_module(self._root, self._graph)
        values = tuple(_value(node) for node in self._graph.find_nodes(op="placeholder"))
        return SmallGraph(gm, self._param_placeholders, values)

    def evaluate(self) -> None:
        """Compute the example values of all nodes that there are by now."""
        pending = [*self._pending]
        self._pending.clear()  # graphs within this one have the same list
        with self._fake_mode:
            for node, value, grad_enabled, autocast in pending:
                if grad_enabled and not autocast:  # nearly always, and modes cost as much as an op
                    node.meta["example_value"] = value()
                    continue
                with torch.set_grad_enabled(grad_enabled), torch.autocast("cpu", AUTOCAST_DTYPE, autocast):
                    node.meta["example_value"] = value()

    def _placeholder(self, name: str, value: Callable[[], Any]) -> fx.Node:
        after = self._last_placeholder or self._graph._root
        with self._graph.inserting_after(after):
            node = self._graph.placeholder(name)
        self._last_placeholder = node
        self._pending.append(_Pending(node, value, grad_enabled=True, autocast=False))
        return node

    def _evaluated(self, node: fx.Node, target: Callable[..., Any]) -> fx.Node:
        def value() -> Any:
            args, kwargs = with_values((node.args, node.kwargs), _value)
            return target(*args, **kwargs)

        return self._later(node, value)

    def _later(self, node: fx.Node, value: Callable[[], Any]) -> fx.Node:
        node.meta["stack_trace"] = f'  File "model.py", line {len(self._graph.nodes)}, in forward\n'
        self._pending.append(_Pending(node, value, self._grad_enabled, self._autocast))
        return node


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _mangled(layer: str) -> str:
    return "modules_" + layer.replace(".", "_modules_")


def real_inputs(graph: SmallGraph) -> tuple[Any, ...]:
    """Draw real tensors for a graph, the same at each call.

    One for each placeholder, in their order, on the CPU, normally distributed; trainable parameters require
    gradients. A number for a size that is a symbol.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(
        _drawn(value, generator) if isinstance(value, torch.Tensor) else _number(value)
        for value in graph.example_values
    )


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    value = torch.randn(tuple(map(_number, like.shape)), generator=generator, dtype=like.dtype)
    return value.requires_grad_(is_trained(like))


def _number(size: int | torch.SymInt) -> int:
    """The number that a symbol was made from; asking the symbol itself would make it that number for good."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size
