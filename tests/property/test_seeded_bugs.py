"""Drawn graphs show each bug that is put in for a moment into what cuts a graph.

Some bugs make partition give a mutant of what it made, and some are slips in one line of partition, layout or
facts. Each drawn graph is cut with all bugs that no earlier one has shown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx

from ddpopt.errors import CertificateError
from ddpopt.graph.nodes import body_nodes
from ddpopt.graph.state import ENTER_AUTOCAST, EXIT_AUTOCAST, GRAD_MODE, State
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph
from ddpopt.split import partition
from ddpopt.split.layout import Layout
from tests.graph_builder import SmallGraph
from tests.mutants import MUTANTS, Mutant, recompile
from tests.profiles import EXAMPLES
from tests.property.drawn_graphs import (
    assert_recomposes,
    assert_same_program,
    cut_wherever_it_can_be,
    facts_of,
    small_configs,
)
from tests.property.strategies import graphs

Bug = Callable[[SmallGraph, Plan], object]
"""Cuts a graph wrongly; raises if that is found."""


def edited(mutant: Mutant, graph: SmallGraph, plan: Plan) -> None:
    """Judge a mutant of what partition made, where it has a place for that."""
    stitched = partition.partition(graph.gm, plan)
    if stitched is not graph.gm and mutant.apply(stitched):
        recompile(stitched)
        assert_same_program(graph, plan, stitched)


# --- slips in one line -----------------------------------------------------------------------------------


def replaced(holder: Any, name: str, changed: Any) -> Bug:
    def cut(graph: SmallGraph, plan: Plan) -> None:
        with patch.object(holder, name, changed):
            assert_recomposes(graph, plan)

    return cut


def after_without(*targets: object) -> Bug:
    """A state that some switches do not reach."""
    after = State.after
    return replaced(State, "after", lambda self, node: self if node.target in targets else after(self, node))


def one_node_too_late(graph: fx.Graph, first_nodes: Any) -> Layout:
    body = [node.name for node in body_nodes(graph)]
    later = [body[min(body.index(name) + 1, len(body) - 1)] for name in first_nodes]
    return LAYOUT_OF(graph, list(dict.fromkeys(later)))


def first_node_in_both(graph: fx.Graph, first_nodes: Any) -> Layout:
    made = LAYOUT_OF(graph, first_nodes)
    for former, latter in zip(made.segments, made.segments[1:], strict=False):
        former.append(latter[0])
    return made


def enter_without_grad_mode(segment: Any, read: Any) -> None:
    state = segment.state
    segment.state = State(state.autocast)
    ENTER(segment, read)
    segment.state = state


def first_item(graph: fx.Graph, value: Any, path: Any) -> Any:
    for _ in path:
        value = graph.call_function(operator.getitem, (value, 0))
    return value


def items_reversed(node: fx.Node, leaves: Any) -> Any:
    value: Any = REBUILD(node, leaves)
    return value[::-1] if isinstance(value, tuple) else value


def all_parameters(self: Layout, inputs: Any, index: int) -> list[Any]:
    del self, index
    return [leaf for leaf in inputs if "parameters" in leaf.node.name]


LAYOUT_OF, ENTER, REBUILD = Layout.of, partition._enter, partition._rebuild
WITHIN = ("what draws or writes runs early", "what writes runs late", "two nodes are swapped")
"""Mutants that take segments of several nodes."""
UNSEEN = ("a segment is given a copy", "a segment is not given what it does not read", "a source is lost")
"""Mutants that mostly change nothing in a drawn graph; the unit tests of the proof have them."""
MADE = {mutant.name: partial(edited, mutant) for mutant in MUTANTS if mutant.name not in UNSEEN}
ANYWHERE: dict[str, Bug] = {
    **{name: bug for name, bug in MADE.items() if name not in WITHIN},
    "grad mode is not carried across a cut": after_without(GRAD_MODE),
    "autocast is not left at a cut": after_without(ENTER_AUTOCAST),
    "autocast continues past its end": after_without(EXIT_AUTOCAST),
    "grad mode is not resumed": replaced(partition, "_enter", enter_without_grad_mode),
    "spans are not suspended at a cut": replaced(partition, "_leave", lambda *_: None),
    "the first item is handed on for each": replaced(partition, "_pick", first_item),
    "a tuple arrives reversed": replaced(partition, "_rebuild", items_reversed),
    "every parameter is detached": replaced(Layout, "detached", all_parameters),
    "the first node runs in both segments": replaced(Layout, "of", first_node_in_both),
}
PLANNED: dict[str, Bug] = {
    **{name: MADE[name] for name in WITHIN},
    "a segment opens one node too late": replaced(Layout, "of", one_node_too_late),
}
BUGS = {**ANYWHERE, **PLANNED}


@pytest.mark.timeout(900)  # many bugs, some milliseconds for each graph, on cores that others may use too
def test_each_bug_is_found_among_the_graphs_of_a_property_in_ci() -> None:
    missing, errors = BUGS.copy(), set[type[Exception]]()

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
                bug(graph, plans[name in ANYWHERE])
            except Exception as error:
                errors.add(type(error))
                del missing[name]

    look()
    assert missing == {}
    assert errors <= {CertificateError, AssertionError, KeyError}  # no slip of the bug itself
