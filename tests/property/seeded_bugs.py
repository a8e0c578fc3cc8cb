"""Bugs in what cuts a graph, each put in for a moment; the properties have to find every one.

Some are those that verification puts in itself (`tests.selftest.graphs`), some are what an optimizer
of graphs might do to segments, and some are slips in one line of partition, layout or facts.

    python -m tests.property.seeded_bugs

looks for all of them and prints the smallest graph that each was found by.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx

from ddpopt.graph.nodes import body_nodes
from ddpopt.graph.state import ENTER_AUTOCAST, EXIT_AUTOCAST, GRAD_MODE, State
from ddpopt.planning.plan import Plan
from ddpopt.split import partition
from ddpopt.split.layout import Layout
from ddpopt.testing.profiles import EXAMPLES
from tests.graph_builder import SmallGraph
from tests.property import drawn_graphs, test_partition
from tests.property.strategies import graphs
from tests.selftest import graphs as injected
from tests.selftest.sites import NotInjected

Bug = Callable[[], AbstractContextManager[Any]]
Change = Callable[[fx.GraphModule], None]
Property = Callable[..., None]
SHRINKS = 100
"""Calls of a property to shrink what it fails for."""


class BrokenBugError(BaseException):
    """A bug could not be put in: no property has found anything."""


class Found(NamedTuple):
    """A bug as it was found: how many operations its smallest graph has, the error, and the graph as text."""

    name: str
    ops: int
    error: str
    text: str


# --- bugs that change what partition made ----------------------------------------------------------------


def edited(change: Change) -> Bug:
    """Change each module that partition makes."""

    def changed(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        stitched = partition.partition(gm, plan)
        if stitched is not gm:
            try:
                change(stitched)
            except NotInjected:
                return stitched
            except Exception as error:
                raise BrokenBugError(f"{change.__name__} failed: {error!r}") from error
            stitched.recompile()
        return stitched

    return lambda: patch.object(drawn_graphs, "partition", changed)


def segments(stitched: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for call in stitched.graph.find_nodes(op="call_module"):
        yield getattr(stitched, str(call.target))


def remove_dead_code(stitched: fx.GraphModule) -> None:
    for segment in segments(stitched):
        segment.graph.eliminate_dead_code()
        segment.recompile()


def reverse_outputs(stitched: fx.GraphModule) -> None:
    output = stitched.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(reversed(results)),)


def give_copies(stitched: fx.GraphModule) -> None:
    """Every segment works on copies of what it is given."""
    for call in stitched.graph.find_nodes(op="call_module"):
        for source in call.all_input_nodes:
            if not isinstance(source.meta.get("example_value"), torch.Tensor):
                continue
            with stitched.graph.inserting_before(call):
                copied = stitched.graph.call_method("clone", (source,))
            copied.meta.update(source.meta)
            call.replace_input_with(source, copied)


def move_forward(stitched: fx.GraphModule) -> None:
    """What draws or writes runs as soon as its operands are there."""
    for segment in segments(stitched):
        body = body_nodes(segment.graph)
        for node in (n for n in body if "dropout" in n.name or n.target in ("add_", "lerp_")):
            while node.prev in body and node.prev not in node.all_input_nodes:
                node.prev.prepend(node)
        segment.recompile()


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
ANYWHERE: dict[str, Bug] = {
    "a segment is given the input of the one before": edited(injected.skipped_segment),
    "two segments use each other's weights": edited(injected.swapped_parameters),
    "a tied weight loses a contribution": edited(injected.lost_contribution),
    "no gradient flows through the first cut": edited(injected.detached_crossing),
    "a value crosses in half precision": edited(injected.rounded_crossing),
    "two segments run in the other order": edited(injected.swapped_segments),
    "dead code is removed, whatever it writes or draws": edited(remove_dead_code),
    "results are returned in the other order": edited(reverse_outputs),
    "segments work on copies": edited(give_copies),
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
    "what draws or writes is moved forward": edited(move_forward),
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
        phases=[Phase.generate, Phase.shrink],
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


# --- looking for one -------------------------------------------------------------------------------------


@dataclass
class Search:
    """Stands for a property: notes what fails, and has Hypothesis shrink it only so far."""

    holds: Property
    left: int = SHRINKS
    failing: list[tuple[fx.Graph, str]] = field(default_factory=list)

    def as_test(self) -> Property:
        @functools.wraps(self.holds)
        def ask(graph: SmallGraph, *others: Any) -> None:
            self.left -= bool(self.failing)
            if self.left < 0:
                return
            try:
                self.holds(graph, *others)
            except Exception as error:
                self.failing.append((graph.gm.graph, type(error).__name__))
                raise

        ask.__signature__ = inspect.signature(self.holds)  # type: ignore[attr-defined]  # decides what is drawn
        return ask


def draw_only(test: Property) -> None:
    """Draw the examples of a property, and do nothing with them: which are drawn does not depend on it."""
    holds = test.hypothesis.inner_test  # type: ignore[attr-defined]  # of Hypothesis

    @functools.wraps(holds)
    def nothing(*_: Any, **__: Any) -> None:
        pass

    nothing.__signature__ = inspect.signature(holds)  # type: ignore[attr-defined]  # decides what is drawn
    with patch.object(test.hypothesis, "inner_test", nothing):  # type: ignore[attr-defined]
        test()


def look_for(name: str) -> Found | None:
    """Find a bug by the property that is to find it; None if it is not found."""
    test = PROPERTIES[name]
    search = Search(test.hypothesis.inner_test)  # type: ignore[attr-defined]  # of Hypothesis
    # at the end Hypothesis asks once more for the smallest one: it may find that there is no answer left
    with (
        BUGS[name](),
        patch.object(test.hypothesis, "inner_test", search.as_test()),  # type: ignore[attr-defined]
        contextlib.suppress(Exception, ExceptionGroup),
    ):
        test()
    if not search.failing:
        return None
    smallest, error = min(search.failing, key=lambda failed: len(body_nodes(failed[0])))
    return Found(name, len(body_nodes(smallest)), error, str(smallest))


if __name__ == "__main__":
    for each in BUGS:
        print(look_for(each) or f"NOT FOUND: {each}")  # noqa: T201
