"""Drawn graphs, cut: the recomposed program is the original one, bit by bit, and the certificate agrees."""

from unittest.mock import patch

import torch
from hypothesis import event, given, target
from hypothesis import strategies as st
from torch import fx

from ddpopt.errors import CertificateError
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph
from ddpopt.split.partition import partition
from tests.graph_builder import SmallGraph, real_inputs
from tests.mutants import MUTANTS, Mutant, recompile
from tests.profiles import share
from tests.property import naive
from tests.property.drawn_graphs import (
    assert_recomposes,
    cut_wherever_it_can_be,
    facts_of,
    possible_cuts,
    prove,
    small_configs,
)
from tests.property.strategies import graphs
from tests.unit.effects import Effects
from tests.unit.tracing import cut_before

SHARE = 3.5
"""Of the profile's examples, for the properties that are to find whatever bug there is."""


@share(SHARE)
@given(graphs(), small_configs())
def test_a_graph_cut_as_planned_is_the_same_program(graph: SmallGraph, config: BucketConfig) -> None:
    assert_recomposes(graph, plan_graph(facts_of(graph), config))


@share(SHARE)
@given(graphs())
def test_a_graph_cut_wherever_it_can_be_is_the_same_program(graph: SmallGraph) -> None:
    plan = cut_wherever_it_can_be(graph)
    stitched = assert_recomposes(graph, plan)
    assert_naive_reference_agrees(graph, plan, stitched)


# A property of its own: what is driven somewhere varies little otherwise, and leaves whole features out.
@share(0.75)
@given(graphs(), small_configs())
def test_a_graph_with_many_cuts_and_views_across_them_is_the_same_program(
    graph: SmallGraph, config: BucketConfig
) -> None:
    planned, everywhere = plan_graph(facts_of(graph), config), cut_wherever_it_can_be(graph)
    sizes = [bucket.nbytes for bucket in planned.buckets]
    target(float(len(planned.cuts)), label="cuts")
    target(float(max(sizes, default=0) - min(sizes, default=0)), label="skew of buckets")
    target(float(aliases_across_cuts(graph, planned)), label="names of one written tensor across cuts")
    for plan in (planned, everywhere):
        assert_recomposes(graph, plan)


@share(1.5)
@given(graphs(), st.data())
def test_a_graph_cut_at_any_places_is_the_same_program(graph: SmallGraph, data: st.DataObject) -> None:
    plan = drawn_cuts(graph, data)
    stitched = assert_recomposes(graph, plan)
    assert_naive_reference_agrees(graph, plan, stitched)


def drawn_cuts(graph: SmallGraph, data: st.DataObject) -> Plan:
    places = possible_cuts(graph)
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True) if places else st.just([]))
    return cut_before(graph.gm, *sorted(chosen, key=places.index))


def aliases_across_cuts(graph: SmallGraph, plan: Plan) -> int:
    """How often a view of a tensor that is written to is read behind a cut, which takes it anew there."""
    run = naive.Watched(graph.gm, real_inputs(graph))
    home = {name: segment.index for segment in plan.segments for name in segment.nodes}
    views = [node for node in graph.gm.graph.nodes if run.viewed(node) is not None]
    return sum(
        home.get(user.name, home[view.name]) != home[view.name] for view in views for user in view.users
    )


def assert_naive_reference_agrees(graph: SmallGraph, plan: Plan, stitched: fx.GraphModule) -> None:
    """The segments hold, take and hand on what a run of the graph says."""
    if stitched is graph.gm:
        return
    found = naive.pieces_of(stitched)
    run = naive.Watched(graph.gm, real_inputs(graph))
    expected = naive.pieces(run, [cut.before for cut in plan.cuts])
    # which segment is given a number, and which one computes it again, is nothing that a run could show
    valued = ((node.name, node.meta.get("example_value")) for node in graph.gm.graph.nodes)
    numbers = {name for name, value in valued if isinstance(value, torch.SymInt)}
    for piece, reference in zip(found, expected, strict=True):
        assert set(piece.nodes) >= set(reference.nodes)  # some are taken anew
        assert piece.given - numbers == reference.given - numbers
        assert piece.handed_on - numbers == reference.handed_on - numbers


@share(2)
@given(graphs(), st.sampled_from(MUTANTS), st.data())
def test_what_the_certificate_accepts_of_a_mutated_partition_is_still_the_same_program(
    graph: SmallGraph, mutant: Mutant, data: st.DataObject
) -> None:
    plan = drawn_cuts(graph, data)
    stitched = partition(graph.gm, plan)
    if stitched is graph.gm or not mutant.apply(
        stitched, lambda number: data.draw(st.integers(0, number - 1))
    ):
        event(f"nothing to mutate: {mutant.name}")
        return
    try:
        prove(graph, stitched, plan)
    except CertificateError:
        event(f"rejected: {mutant.name}")
        return
    event(f"accepted: {mutant.name}")
    assert not mutant.unseen
    recompile(stitched)
    inputs = list(real_inputs(graph))
    Effects(stitched, inputs).assert_equal(Effects(graph.gm, inputs))


@share(0.5)
@given(graphs())
def test_cutting_takes_work_that_grows_with_nodes_and_what_they_read_only(graph: SmallGraph) -> None:
    plan = cut_wherever_it_can_be(graph)
    nodes = list(graph.gm.graph.nodes)
    sources = [source for node in nodes for source in node.all_input_nodes]
    read = sum(len(naive.tensors(source.meta.get("example_value"))) for source in sources)
    with patch.object(fx.Graph, "create_node", autospec=True, side_effect=fx.Graph.create_node) as made:
        partition(graph.gm, plan)
    assert made.call_count <= 3 * (len(nodes) + read)
