"""Expand a composite call into its operations where a bucket ends inside it.

In eager the gradients of the call's weights complete one after the other, and a bucket that ends between them
leaves before the rest of the call's backward. A cut can do the same only if the call is expanded.

Invariant: a graph in which no call is expanded is returned as the same object.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ddpopt.graph.composite_calls import can_trace, trace_call
from ddpopt.graph.nodes import MISSING, body_nodes, example_value, requires_grad, with_values
from ddpopt.graph.rewriting import Argument, Copies, rewritten
from ddpopt.graph.state import states
from ddpopt.planning.facts import GraphFacts
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import calls_where_buckets_end
from ddpopt.split.divide_checkpoints import divide_regions, inline_idle_regions

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
    wanted = calls_where_buckets_end(facts, plan)
    expanded: dict[fx.Node, fx.GraphModule] = {}
    atomic: set[object] = set()
    for node, state in states(gm.graph) if wanted else ():
        if node.name in wanted and node.target not in atomic and can_trace(node):
            traced = trace_call(node, state)
            if traced is not None and _separates_weights(node, traced):
                expanded[node] = traced
            else:
                atomic.add(node.target)
    writers = {node: functools.partial(_add_operations, traced) for node, traced in expanded.items()}
    return rewritten(gm, writers) if expanded else gm


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
