"""Whatever was cut as a plan says, the certificate rejects every plan that breaks one promise of it."""

from functools import partial

import pytest
from hypothesis import given

from ddpopt.errors import CertificateError
from ddpopt.planning.facts import collect
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.graph_builder import SmallGraph
from tests.mutants import PLAN_MUTANTS
from tests.profiles import share
from tests.property.drawn_graphs import small_configs
from tests.property.strategies import graphs
from tests.unit.tracing import parameter_names


@share(0.4)
@given(graphs(), small_configs())
def test_every_mutation_of_a_plan_is_rejected(graph: SmallGraph, config: BucketConfig) -> None:
    specs = graph.specs()
    plan = plan_graph(collect(graph.gm, graph.example_values, specs), config)
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
