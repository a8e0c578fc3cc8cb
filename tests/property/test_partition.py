"""Drawn graphs, cut: the recomposed program is the original one, bit for bit, and the certificate agrees."""

from functools import partial

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ddpopt.errors import CertificateError
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.support.drawn_graphs import (
    assert_recomposes,
    cut_wherever_it_can_be,
    facts_of,
    possible_cuts,
    prove,
    small_configs,
)
from tests.support.effects import Effects
from tests.support.graph_builder import SmallGraph, real_inputs
from tests.support.mutants import MUTANTS, PLAN_MUTANTS, Mutant, recompile
from tests.support.profiles import share
from tests.support.strategies import graphs
from tests.support.tracing import cut_before, parameter_names


@share(1)  # test_seeded_bugs.py shows that so many graphs are enough
@given(graphs(), small_configs())
def test_a_graph_cut_as_planned_is_the_same_program(graph: SmallGraph, config: BucketConfig) -> None:
    assert_recomposes(graph, plan_graph(facts_of(graph), config))


@share(1)
@given(graphs())
def test_a_graph_cut_wherever_it_can_be_is_the_same_program(graph: SmallGraph) -> None:
    assert_recomposes(graph, cut_wherever_it_can_be(graph))


def drawn_cuts(graph: SmallGraph, data: st.DataObject) -> Plan:
    places = possible_cuts(graph)
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True) if places else st.just([]))
    return cut_before(graph.gm, *sorted(chosen, key=places.index))


@share(1)
@given(graphs(), st.sampled_from(MUTANTS), st.data())
def test_what_the_certificate_accepts_of_a_mutated_partition_is_still_the_same_program(
    graph: SmallGraph, mutant: Mutant, data: st.DataObject
) -> None:
    plan = drawn_cuts(graph, data)
    stitched = partition(graph.gm, plan)
    if stitched is graph.gm or not mutant.apply(stitched, lambda n: data.draw(st.integers(0, n - 1))):
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


@share(0.4)
@given(graphs(), small_configs())
def test_every_plan_that_breaks_a_promise_is_rejected(graph: SmallGraph, config: BucketConfig) -> None:
    plan, specs = plan_graph(facts_of(graph), config), graph.specs()
    names = parameter_names(graph.gm, graph.example_values, specs)
    judge = partial(certify, graph.gm, partition(graph.gm, plan), names=names)
    judge(plan=plan)
    for mutate in PLAN_MUTANTS:
        for broken in mutate(plan):
            try:
                judge(plan=broken)
            except CertificateError:
                continue
            pytest.fail(f"accepted, with {mutate.__doc__} {broken}")
