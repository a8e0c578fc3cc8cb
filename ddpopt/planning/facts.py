"""Facts about the parameters of a forward graph: which nodes read them, and where a cut is possible.

Facts come from the graph and from the example values that Dynamo left on its nodes; nothing is run.
Positions count the *body* of a graph: all nodes except placeholders, attributes and the output.

Invariant: each trainable parameter appears once, with its own byte size, however often the graph reads it.
A reader counts only if gradient flows through it: not under ``no_grad``, not through ``detach``, not into a
value that reaches no output.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ddpopt.graph.aliases import first_names, passes_on_input, returned_input, tensors_of
from ddpopt.graph.effects import detaches, mutated_inputs
from ddpopt.graph.nodes import (
    SOURCES,
    body_nodes,
    by_storage,
    checkpointed,
    example_value,
    fetch,
    operands,
    read_storages,
    requires_grad,
    storages,
)
from ddpopt.graph.state import states
from ddpopt.planning.bucket_rule import ParamSpec, Specs
from ddpopt.planning.cut_points import Span, blocked_positions

Sources = Mapping[fx.Node, Mapping[str, str]]
"""The result of `parameter_sources`."""
_LATE = "the backward of {!r} may read {!r}, which may change once its gradient is sent"
NEGLIGIBLE_RATIO = 64
"""A parameter this many times smaller than another one in the same call is not worth its own cut."""


@dataclass(frozen=True)
class ParamUse:
    """A trainable parameter, and where in the graph its gradient becomes complete.

    Attributes:
        spec: its name, bytes, dtype and device as DDP counts them.
        readers: body positions of the nodes whose backward contributes to its gradient, ascending.
        inside: if the first reader is a checkpointed region, or a call that was traced for this, the position
            of the first reader in its body.
    """

    spec: ParamSpec
    readers: tuple[int, ...]
    inside: int = 0

    @property
    def completes_at(self) -> int:
        """Body position of the earliest reader, whose backward contributes last."""
        return self.readers[0]


@dataclass(frozen=True)
class GraphFacts:
    """Everything that planning needs to know about one graph.

    Attributes:
        nodes: names of the body nodes, in graph order.
        params: the trainable parameters read by the graph, in the order of the reducer's list.
        blocked: for each body position, why the graph cannot be cut right before it, or None if it can.
        sources: the result of `parameter_sources`: which nodes bring which parameters into the graph.
        late: the result of `late_reads`.
    """

    nodes: tuple[str, ...]
    params: tuple[ParamUse, ...]
    blocked: tuple[str | None, ...]
    sources: Sources = field(default_factory=dict, compare=False)
    late: Mapping[fx.Node, tuple[int, int]] = field(default_factory=dict, compare=False)

    @property
    def ready(self) -> list[ParamSpec]:
        """The parameters in ready order, smaller ones first where several complete together."""
        ready = sorted(self.params, key=lambda use: (-use.completes_at, -use.inside, use.spec.nbytes))
        return [use.spec for use in ready]


def has_multiple_weights(sizes: Sequence[int]) -> bool:
    """Whether parameters of these sizes are more than a single weight and its biases."""
    largest = max(sizes, default=0)
    return sum(size * NEGLIGIBLE_RATIO > largest for size in sizes) > 1


def collect(gm: fx.GraphModule, example_inputs: Sequence[object], specs: Specs) -> GraphFacts:
    """Collect the facts about one graph, in time linear in its nodes.

    Args:
        gm: a forward graph as Dynamo hands it to a backend.
        example_inputs: one value for each placeholder; parameters are recognized by identity.
        specs: the parameters that DDP reduces.

    Returns:
        The facts, without parameters that DDP does not reduce (frozen, ignored).
    """
    body = body_nodes(gm.graph)
    readers: dict[str, list[int]] = {spec.name: [] for spec in specs.values()}
    sources = parameter_sources(gm, example_inputs, specs)
    carries = gradient_carriers(gm.graph)
    first = first_names(body)
    for position, node in enumerate(body):
        if node not in carries:
            continue
        read = [first.get(source, source) for source in _inputs_by_gradient(gm, node)[0]]
        held = [node, *(source for source in read if source.op in SOURCES)]
        names = [name for source in held for name in sources.get(source, {}).values()]
        for name in dict.fromkeys(names):
            readers[name].append(position)
    inside = _places_in(gm, body, sources)
    read_at = [(spec, readers[spec.name]) for spec in specs.values() if readers[spec.name]]
    uses = tuple(ParamUse(spec, tuple(at), inside.get((spec.name, at[0]), 0)) for spec, at in read_at)
    late = late_reads(gm, sources, carries)
    spans = (Span(a + 1, b, _LATE.format(body[a].name, node.name)) for node, (a, b) in late.items())
    blocked = blocked_positions(gm.graph, carries, spans)
    return GraphFacts(tuple(node.name for node in body), uses, blocked, sources, late)


def _places_in(gm: fx.GraphModule, body: Sequence[fx.Node], sources: Sources) -> dict[tuple[str, int], int]:
    """For each parameter and each checkpointed region that reads it: the index of its first reader inside."""
    found: dict[tuple[str, int], int] = {}
    for position, node in enumerate(body):
        inner = checkpointed(gm, node)
        if inner is None:
            continue
        place = {step: index for index, step in enumerate(inner.graph.nodes)}
        for operand, source in operands(node, inner).items():
            first = min((place[user] for user in operand.users), default=0)
            found.update({(name, position): first for name in sources.get(source, {}).values()})
    return found


def parameter_sources(gm: fx.GraphModule, example_inputs: Sequence[object], specs: Specs) -> Sources:
    """Find the nodes that bring parameters into the graph.

    Args:
        gm: the graph.
        example_inputs: one value for each placeholder.
        specs: the parameters that DDP reduces.

    Returns:
        For each placeholder, attribute or module call that holds parameters that are not frozen: their names,
        keyed by their label in the graph: the node's name, or ``"<node>.<name in the module>"``.
    """
    values = iter(example_inputs)
    found: dict[fx.Node, dict[str, str]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            held = {node.name: next(values, None)}
        elif node.op in ("get_attr", "call_module"):
            value = fetch(gm, str(node.target))
            held = {node.name: value}
            if isinstance(value, torch.nn.Module):
                held = {f"{node.name}.{name}": param for name, param in value.named_parameters()}
        else:
            continue
        names = {label: specs[id(v)].name for label, v in held.items() if id(v) in specs and requires_grad(v)}
        if names:
            found[node] = names
    return found


def gradient_carriers(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes whose backward runs: their result requires grad and reaches an output.

    A result may also reach an output by being written into a tensor that outlives the graph, or that a later
    carrier reads through any of its views. Writes without gradient, such as running statistics, pass none on;
    but a node that reads the result of a write reads the tensor that was written.

    A node without an example value counts as carrying gradient: that can only delay a bucket, never
    send it too early. So does a node whose tensor is detached in place later.
    """
    carriers: dict[fx.Node, None] = {}
    # nodes under no_grad, except those that return an input unchanged: even under no_grad, tracing reports
    # that a view of a parameter requires grad
    ran = states(graph)
    off = {node: None for node, state in ran if not (state.grad_enabled or passes_on_input(node))}
    awaited = _outliving(graph)
    handing_on: dict[fx.Node, None] = {}
    detached: set[int] = set()

    def is_trained(node: fx.Node) -> bool:
        given_up = bool(detached) and not detached.isdisjoint(tensors_of([node]))
        return given_up or requires_grad(example_value(node))

    def is_awaited(written: fx.Node) -> bool:
        own = storages(written)
        return is_trained(written) and (not own or not awaited.isdisjoint(own))

    for node in reversed(graph.nodes):
        if detaches(node):
            detached.update(tensors_of(node.all_input_nodes))
            continue
        if node.op in (*SOURCES, "output") or not is_trained(node):
            continue
        used = any(user.op == "output" or user in carriers or user in handing_on for user in node.users)
        if node in off:
            if used and returned_input(node) is not None:
                handing_on[node] = None
            continue
        if used or any(map(is_awaited, mutated_inputs(node))):
            carriers[node] = None
            awaited.update(read_storages(node))
    return carriers


def _outliving(graph: fx.Graph) -> set[int]:
    """The storages that outlive a graph: of what it takes, and of what it returns."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op in SOURCES or node.op == "output":
            for held in (node, *node.all_input_nodes):
                found.update(storages(held))
    return found


def _inputs_by_gradient(gm: fx.GraphModule, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inputs that a carrier may pass gradient to, and those that it also reads without gradient.

    For a checkpointed region these depend on the nodes in its body that read them.
    """
    inner = checkpointed(gm, node)
    if inner is None:
        return node.all_input_nodes, []
    carriers = {*gradient_carriers(inner.graph), inner.graph.output_node()}
    pairs = [(given, operand.users.keys()) for operand, given in operands(node, inner).items()]
    passing = [given for given, users in pairs if not carriers.isdisjoint(users)]
    return passing, [given for given, users in pairs if users - carriers]


def late_reads(
    gm: fx.GraphModule, sources: Sources, carriers: Container[fx.Node]
) -> dict[fx.Node, tuple[int, int]]:
    """The parameters that backward may read after their gradients are complete.

    This happens when a node before the first one that passes gradient to the parameter reads a value computed
    from it without gradient: the node's backward may recompute that value. By then an optimizer in a
    communication hook may have changed the parameter, which it does as soon as the gradient is reduced. It
    also happens within a checkpointed region, and where an input shares the parameter's memory.

    Returns:
        For each such parameter among `sources`: the body positions of the first such node, and of the node
        where the gradient completes.
    """
    owners = by_storage(sources)
    others = (node for node in gm.graph.nodes if node.op in SOURCES and node not in sources)
    shared = {node: [p for key in storages(node) for p in owners.get(key, ())] for node in others}
    shared |= {source: [source] for source in sources}
    made_of: dict[fx.Node, dict[fx.Node, None]] = {}
    early: dict[fx.Node, int] = {}
    found: dict[fx.Node, tuple[int, int]] = {}
    complete: dict[fx.Node, None] = {}
    for position, node in enumerate(body_nodes(gm.graph)):
        given = node.all_input_nodes
        read = dict.fromkeys(p for s in given for p in (*shared.get(s, ()), *made_of.get(s, ())))
        if node not in carriers:
            made_of[node] = read
            continue
        passing, also_read = _inputs_by_gradient(gm, node)
        early.update({parameter: position for parameter in also_read if parameter not in early})
        for parameter in (source for source in passing if source in sources):
            if parameter in early and parameter not in complete:
                found[parameter] = early[parameter], position
            complete[parameter] = None
        for parameter in read:
            early.setdefault(parameter, position)
    return found
