"""Overlap without any cut: one compiled graph, whose backward hands its gradients to DDP as they complete.

The graph is compiled unchanged, except for calls of `handover.lend` after the parameters, one per group of
gradients that are sent together. These calls are part of the graph, so that a compiler's cached results,
in this process or on disk, belong to this graph and are never mistaken for those of the graph without calls.

Invariant: forward and backward compute the same as without these calls, in autograd's order.
"""

import itertools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.compilers import nop
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from ddpopt.ddp.deferral import active_module
from ddpopt.graph.artifacts import code_of, show
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import CompilerFn, example_value, module_like, storages
from ddpopt.graph.rewriting import add_input, copy_input
from ddpopt.inline.handover import Call, empty_token, lend
from ddpopt.planning.facts import GraphFacts
from ddpopt.planning.plan import Bucket

Groups = Sequence[Sequence[fx.Node]]
"""The placeholders of parameters, by the call that hands their gradients over."""


def lendable(gm: fx.GraphModule, facts: GraphFacts) -> list[fx.Node]:
    """The placeholders of parameters that the graph does not return.

    If the graph returns a view of an input, autograd's edge leads to that input, not to the lent tensor.
    """
    leaving = {storage for node in gm.graph.output_node().all_input_nodes for storage in storages(node)}
    return [node for node in facts.sources if leaving.isdisjoint(storages(node))]


def together(lent: Sequence[fx.Node], facts: GraphFacts, buckets: Sequence[Bucket]) -> list[list[fx.Node]]:
    """Group the parameters that are lent in one call, so that their gradients are handed over together.

    No bucket can leave before its last gradient is ready. So gradients that complete between the ends of two
    buckets wait for the last one of them, and all stay in ready order. Sparse gradients do not wait:
    compilers take less care of their memory.

    Args:
        lent: the placeholders of parameters whose gradients the graph completes.
        facts: the parameter that each of them holds, and where in the graph its gradient becomes complete.
        buckets: the buckets, in which gradients leave together.

    Returns:
        The placeholders in ready order, without parameters that are in no bucket because they were frozen
        when the buckets were made.
    """
    uses = {use.spec.name: use for use in facts.params}
    bucket_of = {name: bucket.index for bucket in buckets for name in bucket.params}
    names = {node: next(iter(facts.sources[node].values())) for node in lent}
    held = {node: uses[name] for node, name in names.items() if name in bucket_of}

    def readiness(node: fx.Node) -> tuple[int, int, int]:
        use = held[node]  # gradients that complete at one node have no known order: sort by bucket
        return -use.completes_at, bucket_of[use.spec.name], use.spec.nbytes

    ready = sorted(held, key=readiness)
    last_of = {bucket_of[held[node].spec.name]: node for node in ready}
    groups: list[list[fx.Node]] = []
    device = ""
    closed = True
    for node in ready:
        spec = held[node].spec
        if closed or spec.sparse or spec.device != device:
            groups.append([])
        groups[-1].append(node)
        device = spec.device
        closed = spec.sparse or last_of[bucket_of[spec.name]] is node
    return groups


def compile_inline(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    groups: Groups,
    late: Container[fx.Node],
    compiler: CompilerFn,
) -> Callable[..., Any]:
    """Compile a graph so that its backward hands the gradients of some parameters to DDP.

    Args:
        gm: the graph; it is not modified.
        example_inputs: one value for each of its placeholders.
        groups: the placeholders that hold these parameters; the gradients of a group are handed over in one
            call, in this order.
        late: those that the backward may read after their gradients are complete; see `late_reads`.
        compiler: a Dynamo backend.

    Returns:
        A callable with the inputs and outputs of `gm`.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    place_of = {node: place for place, node in enumerate(inputs)}
    positions = [[place_of[node] for node in group] for group in groups]
    flat = [*itertools.chain.from_iterable(positions)]
    detached = {inputs[position]: _detached(example_inputs[position]) for position in flat}
    values = [detached.get(node, value) for node, value in zip(inputs, example_inputs, strict=True)]
    tokens = [empty_token(detached[group[0]]).requires_grad_() for group in groups]
    edited = _edited(gm, groups, detached, tokens)
    show("ddpopt_inline_graph", code_of(edited))
    compiled = compiler(edited, [*values, *tokens])
    others = [place for place, node in enumerate(inputs) if node not in detached]
    only_read = _only_read(gm)
    is_only_read = {place: inputs[place] in only_read for place in others}
    waiting = {place for node, place in place_of.items() if node in late}
    asserting = _asserts_gradients(compiler)

    def run(*arguments: Any) -> Any:
        given = [*arguments]
        lent = [{position: given[position] for position in group} for group in positions]
        call = Call(active_module(), lent, [given[place] for place in others], waiting)
        for place in others:
            given[place] = call.passed_on(given[place], is_only_read=is_only_read[place])
        tokens = call.open_gates()
        for position in flat if asserting else ():
            given[position] = given[position].detach()
        outputs = compiled(*given, *tokens)
        call.follow(outputs)
        return outputs

    return run


def _only_read(gm: fx.GraphModule) -> set[fx.Node]:
    """The inputs that the graph neither writes to nor returns, so that views of them may be given instead."""
    nodes = [*gm.graph.nodes]
    others = {storage for node in nodes for storage in written_storages(node)}
    others |= {storage for node in gm.graph.output_node().all_input_nodes for storage in storages(node)}
    return {node for node in gm.graph.find_nodes(op="placeholder") if others.isdisjoint(storages(node))}


def _asserts_gradients(compiler: Any) -> bool:
    """Whether compiled code asserts which inputs require grad, as AOTAutograd's debug mode does.

    It then gets detached parameters.
    """
    arguments = getattr(compiler, "kwargs", {})
    return bool(functorch_config.debug_assert or arguments.get("fw_compiler") is nop)


def _detached(value: Any) -> Tensor:
    """The example value of a parameter for a graph that sends no gradient to it."""
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    if mode is not None and not isinstance(value, FakeTensor):
        value = mode.from_tensor(value, static_shapes=True)
    detached: Tensor = value.detach()
    return detached


def _edited(
    gm: fx.GraphModule, groups: Groups, detached: Mapping[fx.Node, Tensor], tokens: Sequence[Tensor]
) -> fx.GraphModule:
    """`gm` with a call of `lend` for each group, which takes the detached parameters and the token."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    slots: dict[fx.Node, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        slots[node] = len(slots)
        copies[node] = copy_input(node, graph)
        if node in detached:
            copies[node].meta["example_value"] = detached[node]
    given = [add_input(graph, f"token_{n}", {"example_value": token}) for n, token in enumerate(tokens)]
    for group, token in zip(groups, given, strict=True):
        read = [copies[node] for node in group]
        lent = graph.call_function(lend, (read, token, [slots[node] for node in group]))
        lent.meta["example_value"] = tuple(map(example_value, group))
        for index, node in enumerate(group):
            copies[node] = graph.call_function(operator.getitem, (lent, index))
            copies[node].meta["example_value"] = example_value(node)
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_like(gm, graph)
