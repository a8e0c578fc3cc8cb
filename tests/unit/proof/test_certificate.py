"""The certificate passes a right cut, and rejects every way of getting it wrong."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from torch.fx import GraphModule

from ddpopt.errors import CertificateError
from ddpopt.planning.plan import Segment
from ddpopt.proof.certificate import INVARIANTS, certify
from tests.unit import memory_mutants, plan_mutants, program_mutants, stories
from tests.unit.stitching import Piece, Row, Story, refs
from tests.unit.stories import GRAD, Mutant, story

TABLES = (program_mutants.MUTANTS, memory_mutants.MUTANTS, plan_mutants.MUTANTS)


def report(told: Story) -> str:
    """The violations, wrapped to the width of this file."""
    return "\n".join(textwrap.fill(v, 100, subsequent_indent="    ") for v in violations(told))


def violations(told: Story) -> tuple[str, ...]:
    return violations_of(told.original(), told.stitched(), told)


def violations_of(original: GraphModule, stitched: GraphModule, told: Story) -> tuple[str, ...]:
    try:
        certify(original, stitched, told.plan, told.names)
    except CertificateError as error:
        return error.violations
    return ()


def mutants() -> Iterator[tuple[str, Mutant]]:
    for table in TABLES:
        yield from ((invariant, mutant) for invariant, rows in table.items() for mutant in rows)


@pytest.mark.parametrize("told", [story, *stories.SMALL])
def test_a_right_cut_is_certified(told: Callable[[], Story]) -> None:
    assert violations(told()) == ()


@pytest.mark.parametrize(
    ("invariant", "mutant"), list(mutants()), ids=lambda v: v if isinstance(v, str) else v.claim
)
def test_a_broken_cut_is_rejected_by_the_invariant_that_it_breaks(invariant: str, mutant: Mutant) -> None:
    told = mutant.told()
    mutant.breaks(told)
    found = violations(told)
    assert any(v.startswith(f"{invariant}: ") and mutant.says in v for v in found), "\n".join(found)


def test_every_invariant_has_a_mutant_and_every_mutant_an_invariant() -> None:
    broken = {invariant for invariant, _ in mutants()}
    assert broken == {row.name for row in INVARIANTS}


def test_every_invariant_is_one_sentence() -> None:
    sentences = [row.check.__doc__ or "" for row in INVARIANTS]
    assert [s for s in sentences if s.count("\n") or not s.endswith(".") or ". " in s] == []


class TestMessages(TestCase):
    def test_all_violations_are_raised_at_once_and_name_the_place(self) -> None:
        told = story()
        program_mutants.drop(told)
        plan_mutants.spread_bucket(told)
        with pytest.raises(CertificateError) as caught:
            certify(told.original(), told.stitched(), told.plan, told.names)
        self.assertExpectedInline(
            str(caught.value),
            """\
the cut graph is not the program it was cut from; 4 violation(s):
  - nodes: node drop1 is in no segment
  - calls: segment 1, node parts: args[0]: expected drop1, found lin1
  - planned nodes: segment 1: expected drop1, found close
  - bucket segment: bucket 1: layer.b2 completes in segment 2 (read by lin2), the bucket in 1
This is a bug in ddpopt: please report it with the graph (TORCH_LOGS=graph_code).""",
        )

    def test_a_cut_that_falls_apart_altogether_still_gets_a_report(self) -> None:
        told = story()
        told.pieces = [Piece({}, [], {"total": 0, "inside": 1, "twice": 2, "pick": 3, "read": 4})]
        self.assertExpectedInline(
            "\n".join(violations(told)[:4]),
            """\
nodes: node enter is in no segment
nodes: node lin0 is in no segment
nodes: node drop0 is in no segment
nodes: node count is in no segment""",
        )


def story_in_one_segment() -> Story:
    told = story()
    names = tuple(told.names.values())
    nodes = tuple(name for segment in told.plan.segments for name in segment.nodes)
    bucket = replace(told.plan.buckets[0], params=names, segment=0)
    told.replan(buckets=(bucket,), segments=(Segment(0, 0, nodes, names, (0,)),), cuts=())
    return told


def test_a_graph_that_is_not_cut_is_certified_as_it_is() -> None:
    told = story_in_one_segment()
    gm = told.original()
    assert violations_of(gm, gm, told) == ()


def test_a_graph_that_is_not_cut_still_has_to_be_all_of_the_planned_segment() -> None:
    told = story_in_one_segment()
    gm = told.original()
    told.resegment(0, nodes=told.plan.segments[0].nodes[:-1])
    assert violations_of(gm, gm, told) == ("planned nodes: segment 0: expected its end, found inside",)


def test_a_graph_that_is_not_cut_still_has_to_keep_the_plan() -> None:
    told = story()
    gm = told.original()
    with pytest.raises(CertificateError, match="planned cuts: cut 0: expected before lin1"):
        certify(gm, gm, told.plan, told.names)


def test_buckets_of_ddp_may_wait_on_several_segments() -> None:
    told = story()
    first, second, third = told.plan.buckets
    first = replace(first, params=("layer.w2", "layer.w1"), segment=1)
    second = replace(second, params=("layer.b2",), segment=1)  # complete in 2, sent behind the first
    told.replan(policy="ddp", buckets=(first, second, third))
    told.resegment(1, buckets=(0, 1))
    told.resegment(2, buckets=())
    assert violations(told) == ()


@pytest.mark.parametrize(
    "early",
    [
        [Row("look", "detach", refs("w"))],
        [Row("off", GRAD, (False,)), Row("look", "sum", refs("w")), Row("on", GRAD, (True,))],
        [Row("look", "sum", refs("w"))],
        [Row("look", torch.argmax, refs("w"))],
        [Row("look", "sin", refs("w")), Row("more", "add_", (*refs("look"), 1))],
    ],
    ids=["detached", "without grad mode", "read by nobody", "integer", "written for nobody"],
)
def test_a_reader_that_no_gradient_passes_does_not_complete_a_parameter(early: list[Row]) -> None:
    assert violations(stories.early_reader_without_gradient(*early)) == ()
