"""Drawn graphs, cut: the recomposed program is the original one, bit by bit, and the certificate agrees."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from ddpopt.certificate import certify
from ddpopt.facts import collect, parameter_names
from ddpopt.partition import partition
from ddpopt.plan import Plan
from ddpopt.planner import plan_graph
from ddpopt.reducer import BucketConfig
from ddpopt.testing.graph_builder import SmallGraph, real_inputs
from ddpopt.testing.strategies import graphs
from tests.property.test_plan import small_configs, specs_of
from tests.unit.effects import Effects
from tests.unit.tracing import cut_before


def assert_recomposes(graph: SmallGraph, plan: Plan) -> None:
    """Cut as planned, prove it, and run both; a plan without buckets promises nothing of parameters."""
    specs = specs_of(graph) if plan.buckets else {}
    stitched = partition(graph.gm, plan)
    for module in stitched.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
    certify(graph.gm, stitched, plan, parameter_names(graph.gm, graph.example_values, specs))
    inputs = list(real_inputs(graph))
    Effects(stitched, inputs).assert_equal(Effects(graph.gm, inputs))


def possible_cuts(graph: SmallGraph) -> list[str]:
    facts = collect(graph.gm, graph.example_values, specs_of(graph))
    return [name for name, why in zip(facts.nodes[1:], facts.blocked[1:], strict=True) if why is None]


@settings(max_examples=200)
@given(graphs(), small_configs())
def test_a_graph_cut_as_planned_is_the_same_program(graph: SmallGraph, config: BucketConfig) -> None:
    facts = collect(graph.gm, graph.example_values, specs_of(graph))
    assert_recomposes(graph, plan_graph(facts, config))


@settings(max_examples=200)
@given(graphs())
def test_a_graph_cut_wherever_it_can_be_is_the_same_program(graph: SmallGraph) -> None:
    assert_recomposes(graph, cut_before(graph.gm, *possible_cuts(graph)))


@settings(max_examples=200)
@given(graphs(), st.data())
def test_a_graph_cut_at_any_places_is_the_same_program(graph: SmallGraph, data: st.DataObject) -> None:
    places = possible_cuts(graph)
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True) if places else st.just([]))
    assert_recomposes(graph, cut_before(graph.gm, *sorted(chosen, key=places.index)))
