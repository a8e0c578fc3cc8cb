"""Drawn graphs show each way to get a cut wrong: partition is made to give a mutant of what it made.

Each drawn graph is cut with all mutants that no earlier one has shown.
"""

from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ddpopt.errors import CertificateError
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph
from ddpopt.split import partition
from tests.support.drawn_graphs import assert_same_program, cut_wherever_it_can_be, facts_of, small_configs
from tests.support.graph_builder import SmallGraph
from tests.support.mutants import MUTANTS, Mutant, recompile
from tests.support.profiles import EXAMPLES
from tests.support.strategies import graphs


def edited(mutant: Mutant, graph: SmallGraph, plan: Plan) -> None:
    """Judge a mutant of what partition made, where it has a place for that."""
    stitched = partition.partition(graph.gm, plan)
    if stitched is not graph.gm and mutant.apply(stitched):
        recompile(stitched)
        assert_same_program(graph, plan, stitched)


WITHIN = ("what draws or writes runs early", "what writes runs late", "two nodes are swapped")
"""Mutants that take segments of several nodes."""
UNSEEN = ("a segment is given a copy", "a segment is not given what it does not read", "a source is lost")
"""Mutants that mostly change nothing in a drawn graph; the unit tests of the proof have them."""
MADE = {mutant.name: partial(edited, mutant) for mutant in MUTANTS if mutant.name not in UNSEEN}


@pytest.mark.timeout(900)  # many bugs, some milliseconds for each graph, on cores that others may use too
def test_each_bug_is_found_among_the_graphs_of_a_property_in_ci() -> None:
    missing, errors = MADE.copy(), set[type[Exception]]()

    @settings(
        max_examples=EXAMPLES["ci"],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(graphs(), small_configs())
    def look(graph: SmallGraph, config: BucketConfig) -> None:
        if not missing:
            return
        plans = plan_graph(facts_of(graph), config), cut_wherever_it_can_be(graph)
        for name, bug in list(missing.items()):
            try:
                bug(graph, plans[name not in WITHIN])
            except Exception as error:
                errors.add(type(error))
                del missing[name]

    look()
    assert missing == {}
    assert errors <= {CertificateError, AssertionError, KeyError}  # no slip of the bug itself
