"""The order in which gradients complete within a composite call, where a bucket ends inside it.

The compiled backward of a graph that stays whole delivers these gradients one after the other, as eager does.

Invariant: only the order of gradients within one call changes.
"""

from dataclasses import replace

from torch import fx

from ddpopt.graph.aliases import is_view
from ddpopt.graph.composite_calls import can_trace, trace_call
from ddpopt.graph.state import states
from ddpopt.planning.facts import GraphFacts
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import calls_where_buckets_end


def ordered_within_calls(gm: fx.GraphModule, facts: GraphFacts, plan: Plan) -> GraphFacts:
    """`facts` with the order in which gradients complete within the calls where a bucket of `plan` ends."""
    wanted = calls_where_buckets_end(facts, plan)
    places: dict[str, int] = {}
    for node, state in states(gm.graph) if wanted else ():
        traced = trace_call(node, state) if node.name in wanted and can_trace(node) else None
        operations = [] if traced is None else [*traced.graph.nodes]
        for source, placeholder in zip(node.all_input_nodes, operations, strict=False):
            place = operations.index(_first_use(placeholder))
            places.update(dict.fromkeys(facts.sources.get(source, {}).values(), place))
    uses = (replace(use, inside=places.get(use.spec.name, use.inside)) for use in facts.params)
    return replace(facts, params=tuple(uses)) if places else facts


def _first_use(value: fx.Node) -> fx.Node:
    """The first node of a graph that computes with a value, or with a view of it; the value if none does."""
    return min((_first_use(user) if is_view(user) else user for user in value.users), default=value)
