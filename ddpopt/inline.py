"""Overlap without any cut: one compiled graph, whose backward hands its gradients to DDP as they complete.

The graph is compiled as it came, but for a call of `ddpopt.handover.lend` behind each parameter. That call
is part of the graph, so that whatever a compiler keeps of it, in this process or on disk, is kept for this
graph and never mistaken for the one without.

Invariant: forward and backward compute what they would have, in the order in which autograd would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddpopt.deferred import active_module
from ddpopt.graphs import example_value, module_like, storages
from ddpopt.handover import Call, lend
from ddpopt.mutation import mutated_inputs
from ddpopt.segments import CompilerFn

Sources = Mapping[fx.Node, Mapping[str, str]]
"""What `ddpopt.facts.parameter_sources` says of a graph."""


def obstacle(gm: fx.GraphModule, sources: Sources) -> str | None:
    """Why a graph cannot be compiled inline.

    Args:
        gm: a forward graph as Dynamo hands it to a backend.
        sources: which of its nodes bring which parameters into it.

    Returns:
        The reason, for the user; None if there is none.
    """
    held: dict[int, str] = {}
    for node, names in sources.items():
        name = next(iter(names.values()))
        if node.op != "placeholder":
            return f"parameter {name!r} is no input of the graph but an attribute of it"
        if is_traceable_wrapper_subclass(example_value(node)):
            return f"parameter {name!r} is a {type(example_value(node)).__name__}, a tensor made of others"
        held.update(dict.fromkeys(storages(node), name))
    for node in gm.graph.nodes:
        for written in mutated_inputs(node):
            for storage in storages(written):
                if storage in held:
                    return f"parameter {held[storage]!r} is written to in the graph"
    return None


def lendable(gm: fx.GraphModule, sources: Sources) -> list[fx.Node]:
    """The placeholders of parameters of which no view leaves the graph.

    Such a view leads autograd to the input that it is a view of, not to what the graph computed it from.
    """
    leaving = {storage for node in gm.graph.output_node().all_input_nodes for storage in storages(node)}
    return [node for node in sources if leaving.isdisjoint(storages(node))]


def compile_inline(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    lent: Sequence[fx.Node],
    compiler: CompilerFn,
    memory: int,
) -> Callable[..., Any]:
    """Compile a graph so that its backward hands the gradients of some parameters to DDP.

    Args:
        gm: the graph; it is left as it is.
        example_inputs: one value for each of its placeholders.
        lent: the placeholders that hold these parameters.
        compiler: a Dynamo backend.
        memory: what its code does with the memory of a gradient that it has handed over: one of
            `ddpopt.handover.USED_AGAIN` (each gradient is copied), `READ_AGAIN` and `GIVEN`.

    Returns:
        A callable with the inputs and outputs of `gm`.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    positions = [inputs.index(node) for node in lent]
    values = [*example_inputs]
    detached = [_detached(values[position]) for position in positions]
    for position, value in zip(positions, detached, strict=True):
        values[position] = value
    tokens = [_token(value) for value in detached]
    edited = _edited(gm, dict(zip(lent, zip(detached, tokens, strict=True), strict=True)), memory)
    compiled = compiler(edited, [*values, *tokens, torch.tensor(0, device="cpu")])

    def run(*arguments: Any) -> Any:
        given = [*arguments]
        call = Call(active_module(), [given[position] for position in positions])
        tokens = call.open_gate()
        for position in positions:
            given[position] = given[position].detach()
        return compiled(*given, *tokens, call.ticket)

    return run


def _detached(value: Any) -> Tensor:
    """The example value of an input that is given in the place of a parameter."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and not isinstance(value, FakeTensor):
        value = mode.from_tensor(value, static_shapes=True)
    detached: Tensor = value.detach()
    return detached


def _token(parameter: Tensor) -> Tensor:
    mode = parameter.fake_mode if isinstance(parameter, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty(0, dtype=parameter.dtype, device=parameter.device, requires_grad=True)


def _edited(gm: fx.GraphModule, lent: Mapping[fx.Node, tuple[Tensor, Tensor]], memory: int) -> fx.GraphModule:
    """`gm` with a call of `lend` for each parameter, given what comes in its place and its token."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    nodes = [*gm.graph.nodes]
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = copied = graph.node_copy(node)
            copied._dynamo_source = getattr(node, "_dynamo_source", None)
            if node in lent:
                copied.meta["example_value"] = lent[node][0]
    given = {node: _input(graph, f"token_of_{node.name}", token) for node, (_, token) in lent.items()}
    ticket = _input(graph, "ticket", torch.tensor(0, device="cpu"))
    for slot, (node, token) in enumerate(given.items()):
        copies[node] = graph.call_function(lend, (copies[node], token, ticket, slot, memory))
        copies[node].meta["example_value"] = example_value(node)
    for node in nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_like(gm, graph)


def _input(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    node._dynamo_source = None  # AOTAutograd asks each input where Dynamo found it
    return node
