"""Drawn graphs, compiled inline: outputs, writes and gradients are those of the graph as it was."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import assume, given
from torch import fx

from ddpopt.inline.compile import compile_inline, lendable, together
from ddpopt.inline.handover import lend
from ddpopt.inline.why_not import why_not_inline
from ddpopt.planning.facts import GraphFacts, Sources
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket
from ddpopt.planning.planner import plan_graph
from tests.support.drawn_graphs import facts_of, small_configs
from tests.support.effects import Effects
from tests.support.graph_builder import SmallGraph, real_inputs
from tests.support.profiles import share
from tests.support.strategies import graphs


@share(1)
@given(graphs(), small_configs())
def test_a_graph_that_lends_parameters_is_the_same_program(graph: SmallGraph, config: BucketConfig) -> None:
    facts = facts_of(graph)
    sources = facts.sources
    assume(why_not_inline(graph.gm, sources) is None)
    edited: list[fx.GraphModule] = []

    def as_it_is(gm: fx.GraphModule, _: Sequence[object]) -> Callable[..., Any]:
        edited.append(gm)
        return gm.forward

    before = str(graph.gm.graph)
    read = {use.spec.name for use in facts.params}
    lent = [node for node in lendable(graph.gm, facts) if read.issuperset(sources[node].values())]
    buckets = plan_graph(facts, config).buckets
    groups = together(lent, facts, buckets)
    assert_in_order(groups, sources, facts, buckets)
    run = compile_inline(graph.gm, graph.example_values, groups, facts.late, as_it_is)
    inputs = list(real_inputs(graph))
    Effects(run, inputs).assert_equal(Effects(graph.gm, inputs))
    edited[0].graph.lint()
    assert len(edited[0].graph.find_nodes(op="call_function", target=lend)) == len(groups)
    assert str(graph.gm.graph) == before


def assert_in_order(
    groups: Sequence[Sequence[fx.Node]], sources: Sources, facts: GraphFacts, buckets: Sequence[Bucket]
) -> None:
    """What goes together is whole, in order, and holds up no bucket."""
    at = {use.spec.name: use.completes_at for use in facts.params}
    named = [[next(iter(sources[node].values())) for node in group] for group in groups]
    flat = [name for group in named for name in group]
    assert len({*flat}) == len(flat)
    assert [at[name] for name in flat] == sorted((at[name] for name in flat), reverse=True)
    ends = {name for bucket in buckets for name in [n for n in flat if n in bucket.params][-1:]}
    # a bucket's last gradient waits for no other; any other gradient only for its bucket's, or another one's
    assert all(ends.isdisjoint(group[:-1]) for group in named)
    sparse = any(use.spec.sparse for use in facts.params)
    assert sparse or all(group[-1] in ends for group in named)
