"""The properties of cutting find each bug that is put in for a moment into what cuts a graph.

Some bugs make partition give a mutant of what it made, and some are slips in one line of partition, layout or
facts.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx

from ddpopt.graph.nodes import body_nodes
from ddpopt.graph.state import ENTER_AUTOCAST, EXIT_AUTOCAST, GRAD_MODE, State
from ddpopt.planning.plan import Plan
from ddpopt.split import partition
from ddpopt.split.layout import Layout
from tests.mutants import MUTANTS, Mutant, recompile
from tests.profiles import EXAMPLES
from tests.property import drawn_graphs, strategies, test_partition
from tests.property.strategies import graph_features, graphs

Bug = Callable[[], AbstractContextManager[Any]]
Property = Callable[..., None]


class BrokenBugError(BaseException):
    """A bug could not be put in: no property has found anything."""


# --- bugs that change what partition made ----------------------------------------------------------------


def edited(mutant: Mutant) -> Bug:
    """Have each module that partition makes be a mutant of itself, where it has a place for that."""

    def changed(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        stitched = partition.partition(gm, plan)
        try:
            if stitched is not gm and mutant.apply(stitched):
                recompile(stitched)
        except Exception as error:
            raise BrokenBugError(f"{mutant.name} failed: {error!r}") from error
        return stitched

    return lambda: patch.object(drawn_graphs, "partition", changed)


# --- slips in one line -----------------------------------------------------------------------------------


def replaced(holder: Any, name: str, changed: Any) -> Bug:
    return lambda: patch.object(holder, name, changed)


def after_without(*targets: object) -> Bug:
    """A state that some switches do not reach."""
    after = State.after
    return replaced(State, "after", lambda self, node: self if node.target in targets else after(self, node))


def one_node_too_late(graph: fx.Graph, openers: Any) -> Layout:
    body = [node.name for node in body_nodes(graph)]
    later = [body[min(body.index(name) + 1, len(body) - 1)] for name in openers]
    return LAYOUT_OF(graph, list(dict.fromkeys(later)))


def opener_in_both(graph: fx.Graph, openers: Any) -> Layout:
    made = LAYOUT_OF(graph, openers)
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
MADE = {mutant.name: edited(mutant) for mutant in MUTANTS if mutant.name not in UNSEEN}
ANYWHERE: dict[str, Bug] = {
    **{name: bug for name, bug in MADE.items() if name not in WITHIN},
    "grad mode is not carried across a cut": after_without(GRAD_MODE),
    "autocast is not left at a cut": after_without(ENTER_AUTOCAST),
    "autocast goes on behind its end": after_without(EXIT_AUTOCAST),
    "grad mode is not resumed": replaced(partition, "_enter", enter_without_grad_mode),
    "spans are not suspended at a cut": replaced(partition, "_leave", lambda *_: None),
    "the first item is handed on for each": replaced(partition, "_pick", first_item),
    "a tuple arrives reversed": replaced(partition, "_rebuild", items_reversed),
    "every parameter is detached": replaced(Layout, "detached", all_parameters),
    "the opener runs in both segments": replaced(Layout, "of", opener_in_both),
}
PLANNED: dict[str, Bug] = {
    **{name: MADE[name] for name in WITHIN},
    "a segment opens one node too late": replaced(Layout, "of", one_node_too_late),
}
BUGS = {**ANYWHERE, **PLANNED}

# --- the properties, as the profile `ci` has them --------------------------------------------------------


def _of_ci(test: Property, *drawn: st.SearchStrategy[Any]) -> Property:
    """A property with the examples that the profile ``ci`` draws for it, whatever the profile is now."""
    of_ci = settings(
        max_examples=round(test_partition.SHARE * EXAMPLES["ci"]),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    # what is drawn follows from the source of the test itself
    return of_ci(given(*drawn)(test.hypothesis.inner_test))  # type: ignore[attr-defined]  # of Hypothesis


CUT_ANYWHERE = _of_ci(test_partition.test_a_graph_cut_wherever_it_can_be_is_the_same_program, graphs())
CUT_AS_PLANNED = _of_ci(
    test_partition.test_a_graph_cut_as_planned_is_the_same_program, graphs(), drawn_graphs.small_configs()
)
PROPERTIES = {**dict.fromkeys(ANYWHERE, CUT_ANYWHERE), **dict.fromkeys(PLANNED, CUT_AS_PLANNED)}
"""Each bug's name, and the property that is to find it."""


def draw_only(test: Property) -> None:
    """Draw the examples of a property, and do nothing with them: which are drawn does not depend on it."""
    holds = test.hypothesis.inner_test  # type: ignore[attr-defined]  # of Hypothesis

    @functools.wraps(holds)
    def nothing(*_: Any, **__: Any) -> None:
        pass

    nothing.__signature__ = inspect.signature(holds)  # type: ignore[attr-defined]  # decides what is drawn
    with patch.object(test.hypothesis, "inner_test", nothing):  # type: ignore[attr-defined]
        test()


def found(name: str) -> str:
    """The error by which the property that is to find a bug does; empty if it does not."""
    try:
        with BUGS[name]():
            PROPERTIES[name]()
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.long
@pytest.mark.timeout(900)  # many bugs, some seconds each, on cores that others may use too
@pytest.mark.skipif(
    settings.get_current_profile_name() == "dev",
    reason="it judges the examples of profile ci, for most of a minute: profiles ci and nightly",
)
def test_each_bug_that_is_put_in_is_found() -> None:
    errors = {name: found(name) for name in BUGS}
    assert [name for name, error in errors.items() if not error] == []
    assert {*errors.values()} <= {
        "CertificateError",
        "AssertionError",
        "KeyError",
    }  # no slip of the bug itself


@pytest.mark.parametrize("property_of_ci", [CUT_ANYWHERE, CUT_AS_PLANNED])
def test_the_examples_of_ci_have_every_step_and_output(property_of_ci: Callable[[], None]) -> None:
    """Which are drawn follows from the text of the property: a lucky one would hide what it never tries."""
    with patch.object(strategies, "event") as told:
        draw_only(property_of_ci)
    words = {call.args[0].partition(": ")[2] for call in told.call_args_list}
    assert graph_features() - words == set()
