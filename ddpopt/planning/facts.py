"""What a forward graph says about its parameters: who reads which, and where a cut is possible.

Facts are read off the graph and off the example values that Dynamo left on its nodes; nothing is run.
Positions count the *body* of a graph: all nodes but placeholders, attributes and the output.

Invariant: each trainable parameter appears once, at its own byte size, wherever and however often the
graph reads it. A reader counts only if gradient flows through it: not under ``no_grad``, not through
``detach``, not into a value that reaches no output.
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
"""What `parameter_sources` says of a graph."""
_LATE = "the backward of {!r} may read {!r}, which may change once its gradient has left"
NEGLIGIBLE_RATIO = 64
"""A parameter this many times smaller than another one of the same call is not worth a cut of its own."""


@dataclass(frozen=True)
class ParamUse:
    """A trainable parameter, and where in the graph its gradient becomes complete.

    Attributes:
        spec: name, bytes, dtype, device as DDP counts them.
        readers: body positions of the nodes whose backward contributes to its gradient, ascending.
        inside: where the first reader is a checkpointed region: the place in its body that reads it first.
    """

    spec: ParamSpec
    readers: tuple[int, ...]
    inside: int = 0

    @property
    def completes_at(self) -> int:
        """Body position of the earliest reader: its backward is the last to contribute."""
        return self.readers[0]


@dataclass(frozen=True)
class GraphFacts:
    """All that planning needs to know of one graph.

    Attributes:
        nodes: names of the body nodes, in graph order.
        params: the trainable parameters read by the graph, in the order of the reducer's list.
        blocked: for each body position, why no cut may lie right before it, or None if one may.
        sources: which nodes bring which parameters into the graph, as `parameter_sources` says.
    """

    nodes: tuple[str, ...]
    params: tuple[ParamUse, ...]
    blocked: tuple[str | None, ...]
    sources: Sources = field(default_factory=dict, compare=False)

    @property
    def ready(self) -> list[ParamSpec]:
        """The parameters in the order in which their gradients become complete, the smaller ones first."""

        def readiness(use: ParamUse) -> tuple[int, int, int]:
            return -use.completes_at, -use.inside, use.spec.nbytes

        return [use.spec for use in sorted(self.params, key=readiness)]


def has_multiple_weights(sizes: Sequence[int]) -> bool:
    """Whether parameters of these sizes are more than one weight and its biases."""
    largest = max(sizes, default=0)
    return sum(size * NEGLIGIBLE_RATIO > largest for size in sizes) > 1


def collect(gm: fx.GraphModule, example_inputs: Sequence[object], specs: Specs) -> GraphFacts:
    """Read the facts off one graph, in time linear in its nodes.

    Args:
        gm: a forward graph as Dynamo hands it to a backend.
        example_inputs: one value for each placeholder; parameters are recognised by identity.
        specs: what DDP reduces.

    Returns:
        The facts; parameters that DDP does not reduce (frozen, ignored) are not among them.
    """
    body = body_nodes(gm.graph)
    readers: dict[str, list[int]] = {spec.name: [] for spec in specs.values()}
    sources = parameter_sources(gm, example_inputs, specs)
    carries = gradient_carriers(gm.graph)
    first = first_names(body)
    for position, node in enumerate(body):
        if node not in carries:
            continue
        read = [first.get(source, source) for source in _inputs_with_gradient(gm, node)]
        held = [node, *(source for source in read if source.op in SOURCES)]
        names = [name for source in held for name in sources.get(source, {}).values()]
        for name in dict.fromkeys(names):
            readers[name].append(position)
    inside = _places_inside(gm, body, sources)
    read_at = [(spec, readers[spec.name]) for spec in specs.values() if readers[spec.name]]
    uses = tuple(ParamUse(spec, tuple(at), inside.get((spec.name, at[0]), 0)) for spec, at in read_at)
    spans = late_reads(gm, sources, carries).items()
    late = (Span(first + 1, last, _LATE.format(body[first].name, node.name)) for node, (first, last) in spans)
    return GraphFacts(tuple(node.name for node in body), uses, blocked_positions(gm.graph, late), sources)


def _places_inside(
    gm: fx.GraphModule, body: Sequence[fx.Node], sources: Sources
) -> dict[tuple[str, int], int]:
    """For each parameter and checkpointed region that reads it: which node of the region reads it first."""
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
    """Which nodes bring which parameters into the graph.

    Args:
        gm: the graph.
        example_inputs: one value for each placeholder.
        specs: what DDP reduces.

    Returns:
        For each placeholder, attribute or module call that holds parameters that are not frozen: their names,
        by what the graph calls them: the node's name, or ``"<node>.<name in the module>"``.
    """
    values = iter(example_inputs)
    found: dict[fx.Node, dict[str, str]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            held = {node.name: next(values, None)}
        elif node.op in ("get_attr", "call_module"):
            held = _held(node, fetch(gm, str(node.target)))
        else:
            continue
        names = {label: specs[id(v)].name for label, v in held.items() if id(v) in specs and requires_grad(v)}
        if names:
            found[node] = names
    return found


def _held(node: fx.Node, value: object) -> dict[str, object]:
    if isinstance(value, torch.nn.Module):
        return {f"{node.name}.{name}": param for name, param in value.named_parameters()}
    return {node.name: value}


def gradient_carriers(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes whose backward runs: their result requires grad and reaches an output.

    It may also reach one by being written into a tensor that a later carrier reads by any of its views,
    or that outlives the graph. What is written without gradient, as running statistics are, passes none on;
    but who reads what a write returns, reads what was written to.

    A node without an example value counts as carrying gradient: that can only delay a bucket, never
    send it too early. So does one whose tensor is detached in place later.
    """
    carriers: dict[fx.Node, None] = {}
    # under no_grad, but for what returns an input as it is: tracing says of a view of a parameter that it
    # requires grad even there
    ran = states(graph)
    off = {node: None for node, state in ran if not (state.grad_enabled or passes_on_input(node))}
    outliving = (node for node in graph.nodes if node.op in SOURCES or node.op == "output")
    awaited = {key for node in outliving for held in (node, *node.all_input_nodes) for key in storages(held)}
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


def _inputs_with_gradient(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """What a carrier may pass gradient to: of a checkpointed region, what a carrier in its body reads."""
    inner = checkpointed(gm, node)
    if inner is None:
        return node.all_input_nodes
    carriers = gradient_carriers(inner.graph)
    pairs = operands(node, inner).items()
    return [
        given for operand, given in pairs if any(u in carriers or u.op == "output" for u in operand.users)
    ]


def late_reads(
    gm: fx.GraphModule, sources: Container[fx.Node], carriers: Container[fx.Node]
) -> dict[fx.Node, tuple[int, int]]:
    """The parameters that backward may read after their gradients are complete.

    Such a backward is that of a node before the first one that passes gradient to the parameter. It reads
    what was computed from the parameter without gradient, and may have to compute it again. An optimizer in a
    communication hook changes a parameter as soon as its gradient is reduced.

    Returns:
        For each of `sources` that is such a parameter: the body positions of the first such node, and of the
        one where the gradient completes.
    """
    made_of: dict[fx.Node, dict[fx.Node, None]] = {}
    early: dict[fx.Node, int] = {}
    found: dict[fx.Node, tuple[int, int]] = {}
    complete: dict[fx.Node, None] = {}
    for position, node in enumerate(body_nodes(gm.graph)):
        held = [source for source in node.all_input_nodes if source in sources]
        read = dict.fromkeys([*held, *(p for s in node.all_input_nodes for p in made_of.get(s, ()))])
        if node not in carriers:
            made_of[node] = read
            continue
        for parameter in (source for source in _inputs_with_gradient(gm, node) if source in sources):
            if parameter in early and parameter not in complete:
                found[parameter] = early[parameter], position
            complete[parameter] = None
        for parameter in read:
            early.setdefault(parameter, position)
    return found
