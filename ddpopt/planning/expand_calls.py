"""Expand a composite call into its operations where a bucket ends inside it.

``multi_head_attention_forward``, ``lstm_cell`` or ``multi_dot`` is one node of Dynamo's graph and reads
several weights. In eager their gradients complete one after the other, and a bucket that ends between them
leaves before the rest of the call's backward. A cut can do the same only if the call is expanded.

A call is expanded by tracing it on the example values of its arguments, below autograd. The result is
exactly the operations that autograd would record, so the computation does not change.

Invariant: a graph in which no call is expanded is returned as the same object.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from ddpopt.graph.aliases import is_view
from ddpopt.graph.nodes import MISSING, body_nodes, example_value, requires_grad, with_values
from ddpopt.graph.rewriting import Argument, Copies, rewritten
from ddpopt.graph.state import State, states
from ddpopt.planning.divide_checkpoints import divide_regions, inline_idle_regions
from ddpopt.planning.facts import GraphFacts, has_multiple_weights
from ddpopt.planning.plan import Plan

logger = logging.getLogger("ddpopt")


class Expanded(NamedTuple):
    """A graph to be cut, perhaps with calls expanded, the facts about it, and the plan made from them."""

    gm: fx.GraphModule
    facts: GraphFacts
    plan: Plan


def expanded_and_planned(best: Expanded, planned: Callable[[fx.GraphModule], Expanded]) -> Expanded:
    """Expand the calls in which the buckets of a graph end, and replan it, until no call is worth expanding.

    Args:
        best: the graph with its plan; it is not modified.
        planned: plans another form of the graph.

    Returns:
        The graph that the plan is for (the same if nothing was expanded), its facts and the plan.
    """
    trained = {use.spec.name for use in best.facts.params}
    while (expanded := expand_calls(*best)) is not best.gm:
        again = planned(expanded)
        if {use.spec.name for use in again.facts.params} != trained:
            logger.warning("ddpopt: composite calls are not expanded: other parameters would get gradients")
            break
        best = again
    while True:
        gm = divide_regions(best.gm, lambda graph: [cut.before for cut in planned(graph).plan.cuts])
        if gm is best.gm and best.plan.cuts:
            gm = inline_idle_regions(gm)
        if gm is best.gm:
            return best
        best = planned(gm)


def expand_calls(gm: fx.GraphModule, facts: GraphFacts, plan: Plan) -> fx.GraphModule:
    """Expand the calls in which a bucket of `plan` ends while other gradients of the call still follow.

    Args:
        gm: a graph, with an example value on each node; it is not modified.
        facts: the facts about `gm`.
        plan: made from `facts`.

    Returns:
        A new module; or `gm` itself if no call is worth expanding.
    """
    wanted = _calls_where_buckets_end(facts, plan)
    expanded: dict[fx.Node, fx.GraphModule] = {}
    atomic: set[object] = set()
    for node, state in states(gm.graph) if wanted else ():
        if node.name in wanted and node.target not in atomic and _can_trace(node):
            traced = _trace(node, state)
            if traced is not None and _separates_weights(node, traced):
                expanded[node] = traced
            else:
                atomic.add(node.target)
    writers = {node: functools.partial(_add_operations, traced) for node, traced in expanded.items()}
    return rewritten(gm, writers) if expanded else gm


def ordered_within_calls(gm: fx.GraphModule, facts: GraphFacts, plan: Plan) -> GraphFacts:
    """`facts` with the order in which gradients complete within the calls where a bucket of `plan` ends."""
    wanted = _calls_where_buckets_end(facts, plan)
    places: dict[str, int] = {}
    for node, state in states(gm.graph) if wanted else ():
        traced = _trace(node, state) if node.name in wanted and _can_trace(node) else None
        operations = [] if traced is None else [*traced.graph.nodes]
        for source, placeholder in zip(node.all_input_nodes, operations, strict=False):
            place = operations.index(_first_use(placeholder))
            places.update(dict.fromkeys(facts.sources.get(source, {}).values(), place))
    uses = (replace(use, inside=places.get(use.spec.name, use.inside)) for use in facts.params)
    return replace(facts, params=tuple(uses)) if places else facts


def _first_use(value: fx.Node) -> fx.Node:
    """The first node of a graph that computes with a value, or with a view of it; the value if none does."""
    return min((_first_use(user) if is_view(user) else user for user in value.users), default=value)


def _calls_where_buckets_end(facts: GraphFacts, plan: Plan) -> frozenset[str]:
    """Names of the nodes at which a bucket ends and the gradients of at least two weights complete."""
    position = {use.spec.name: use.completes_at for use in facts.params}
    sizes: dict[int, list[int]] = {}
    for use in facts.params:
        sizes.setdefault(use.completes_at, []).append(use.spec.nbytes)
    read = [[position[name] for name in bucket.params if name in position] for bucket in plan.buckets]
    ends = {min(positions) for positions in read if positions}
    return frozenset(facts.nodes[end] for end in ends if has_multiple_weights(sizes[end]))


def _can_trace(node: fx.Node) -> bool:
    """Whether a call is a plain function of tensors with static shapes."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return False
    values = [example_value(source) for source in node.all_input_nodes]
    leaves = pytree.tree_leaves(values)
    fake = all(isinstance(leaf, FakeTensor) and not free_symbols(leaf) for leaf in leaves)
    return fake and not any(source.op == "get_attr" for source in node.all_input_nodes)


def _trace(node: fx.Node, state: State) -> fx.GraphModule | None:
    """The operations of one call as a graph over its input nodes; None if it cannot be traced alone."""
    sources = node.all_input_nodes

    def call(*values: object) -> object:
        given = dict(zip(sources, values, strict=True))
        args, kwargs = with_values((node.args, node.kwargs), given.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is callable

    # as AOTAutograd traces: some operators are composed of others by Python code only
    with _settings(state), enable_python_dispatcher():
        try:
            values = [*map(example_value, sources)]
            operations = make_fx(call)(*values)
            # a call's own writes would forbid cuts; a composite call is not functionalized until it is traced
            traced = make_fx(torch.func.functionalize(operations))(*values)
        except Exception:  # whatever it is, the unexpanded call is still correct
            logger.info("ddpopt: %s cannot be expanded", node.name, exc_info=True)
            return None
    traced.graph.eliminate_dead_code()
    return None if traced.graph.find_nodes(op="get_attr") else traced  # these are constants


@contextlib.contextmanager
def _settings(state: State) -> Iterator[None]:
    """Autocast as in `state`, without a cache: each node that reads a weight casts it again."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for span in state.autocast:
            device, dtype, enabled, _ = span.args
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))  # type: ignore[arg-type]
        stack.enter_context(torch.enable_grad())
        yield


def _separates_weights(node: fx.Node, traced: fx.GraphModule) -> bool:
    """Whether different operations read the weights of `node` once it is expanded."""
    inputs = zip(node.all_input_nodes, traced.graph.nodes, strict=False)  # placeholders come first
    weights = [n for s, n in inputs if s.op == "placeholder" and requires_grad(example_value(s)) and n.users]
    return len({min(placeholder.users) for placeholder in weights}) > 1


def _add_operations(traced: fx.GraphModule, node: fx.Node, graph: fx.Graph, copies: Copies) -> Argument:
    """Add the operations of an expanded call to `graph`; return the call's result as nodes."""
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    inner = {placeholder: copies[source] for placeholder, source in inputs.items()}
    mode = next(v.fake_mode for v in map(example_value, inputs.values()) if isinstance(v, FakeTensor))
    returned = graph.graph_copy(traced.graph, inner)
    for step in body_nodes(traced.graph):
        copied = inner[step]
        copied.meta = {**node.meta, "example_value": MISSING}
        args, kwargs = with_values((copied.args, copied.kwargs), example_value)
        with mode, torch.enable_grad():
            copied.meta["example_value"] = step.target(*args, **kwargs)  # type: ignore[operator]
    # later nodes refer to the call's values, and their views share its storages
    leaves = pytree.tree_leaves(traced.graph.output_node().args[0])
    for leaf, value in zip(leaves, pytree.tree_leaves(example_value(node)), strict=True):
        if isinstance(leaf, fx.Node) and leaf.op != "placeholder":
            inner[leaf].meta["example_value"] = value
    return returned
