"""The certificate passes right cuts of programs of all kinds, and rejects every way of getting them wrong."""

import functools
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from expecttest import assert_expected_inline
from torch import fx

from ddpopt.errors import CertificateError
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_for_buckets, plan_graph, plan_whole
from ddpopt.proof.certificate import INVARIANTS, certify
from ddpopt.split.partition import partition
from tests.support import mutants
from tests.support.effects import Effects
from tests.support.mutants import MUTANTS, PLAN_MUTANTS, Edits, Mutant, copy_left_out, input_returned, through
from tests.support.snippets import SNIPPETS
from tests.support.tracing import Traced, cut_before, parameter_names, trace

PROGRAMS = (
    "nested_autocast", "grad_mode_spans", "views_without_grad", "outputs_without_grad", "dynamic_float",
    "branches", "blocks_3", "doubled_size", "written_twice", "early_readers_without_gradient",
)  # fmt: skip
PLANNED = ("grad_mode_spans", "early_readers_without_gradient")
EACH = 2
"""So many edits of each mutant are tried in each program."""
SMALL = BucketConfig(cap_bytes=1, first_bucket_bytes=1)
"""A bucket for each parameter, so that cuts lie wherever they can between them."""


@dataclass
class Cut:
    """A traced program, and the plan by which it is cut."""

    traced: Traced
    plan: Plan

    def stitched(self) -> fx.GraphModule:
        return partition(self.traced.gm, self.plan)

    def violations(self, stitched: fx.GraphModule, plan: Plan | None = None) -> tuple[str, ...]:
        names = parameter_names(self.traced.gm, self.traced.inputs, self.traced.specs)
        try:
            certify(self.traced.gm, stitched, plan or self.plan, names)
        except CertificateError as error:
            return error.violations
        return ()

    @functools.cached_property
    def effects(self) -> Effects:
        return Effects(self.traced.gm, self.traced.inputs)

    def rejections(self, mutant: Mutant) -> list[tuple[str, ...]]:
        """What is said of some edits; those that are accepted change nothing that can be seen."""
        found = []
        count = len(list(mutant.edits(self.stitched())))
        for number in range(0, count, max(1, -(-count // EACH))):
            stitched = self.stitched()
            mutant.apply(stitched, lambda _, number=number: number)  # type: ignore[misc]
            found.append(self.violations(stitched))
            if not found[-1]:
                assert not mutant.unseen, f"accepted: {mutant.name}, {number}"
                mutants.recompile(stitched)
                Effects(stitched, self.traced.inputs).assert_equal(self.effects)
        return list(filter(None, found))


@functools.cache
def program(name: str) -> Cut:
    snippet = SNIPPETS[name]
    traced = trace(snippet.model(), *snippet.inputs(), dynamic=snippet.dynamic)
    return Cut(traced, plan_graph(traced.facts, SMALL))


@functools.cache
def rejected(name: str) -> Mapping[str, list[tuple[str, ...]]]:
    """What the certificate says of broken cuts of a program, by the name of the mutant."""
    return {mutant.name: program(name).rejections(mutant) for mutant in MUTANTS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_cut_is_certified_and_a_broken_one_rejected_unless_nobody_can_see_it(name: str) -> None:
    cut = program(name)
    assert cut.plan.cuts
    assert cut.violations(cut.stitched()) == ()
    assert sum(map(bool, rejected(name).values())) > len(MUTANTS) / 2


@pytest.mark.parametrize(
    ("name", "edits", "said"),
    [
        ("grad_mode_spans", [through("detach", early=True)], "was already made before segment"),
        ("grad_mode_spans", [through("clone")], "node clone: is in no segment"),
        ("early_readers_without_gradient", [input_returned], "is detached, but its return sends gradient"),
        ("views_without_grad", [through("detach")], "output: out.detach() is a copy"),
        ("outputs_without_grad", [copy_left_out], "output: turned.detach() is a copy"),
        ("outputs_without_grad", [copy_left_out] * 2, "turned is a view that was taken without gradient"),
    ],
)
def test_what_no_number_may_show_is_rejected_too(name: str, edits: list[Edits], said: str) -> None:
    cut = program(name)
    assert any(said in violation for each in every(cut, edits) for violation in each)


def every(cut: Cut, edits: list[Edits]) -> Iterator[tuple[str, ...]]:
    """What the certificate says of a cut after each edit of the first kind, and all of the others."""
    first, *others = edits
    for number in range(len([*first(cut.stitched())])):
        stitched = cut.stitched()
        [*first(stitched)][number]()
        for more in (more for other in others for more in [*other(stitched)]):
            more()
        yield cut.violations(stitched)


def of_broken_plans(cut: Cut, stitched: fx.GraphModule, plan: Plan) -> list[tuple[str, ...]]:
    assert cut.violations(stitched, plan) == ()
    return [cut.violations(stitched, broken) for mutate in PLAN_MUTANTS for broken in mutate(plan)]


def of_a_forbidden_cut(name: str, first_node: str, *edits: Edits) -> tuple[str, ...]:
    """What the certificate says of a cut before a node that planning never makes, after some edits."""
    cut = program(name)
    plan = cut_before(cut.traced.gm, first_node)
    stitched = partition(cut.traced.gm, plan)
    for edit in edits:
        next(edit(stitched))()
    return cut.violations(stitched, plan)


def test_every_invariant_is_one_sentence() -> None:
    sentences = [row.check.__doc__ or "" for row in INVARIANTS]
    assert [s for s in sentences if s.count("\n") or not s.endswith(".") or ". " in s] == []


def test_a_graph_that_is_not_cut_has_to_keep_its_plan() -> None:
    cut = program("grad_mode_spans")
    assert all(of_broken_plans(cut, cut.traced.gm, plan_whole(cut.traced.facts, cut.plan.buckets)))
    assert "planned cuts: cut 0: expected before" in "\n".join(cut.violations(cut.traced.gm))


def test_buckets_of_ddp_may_wait_on_several_segments_and_go_in_order() -> None:
    cut = program("grad_mode_spans")
    first, second, third, *others = [name for bucket in cut.plan.buckets for name in bucket.params]
    plan = plan_for_buckets(cut.traced.facts, [[first], [third, second], others])
    assert [len(plan.segments_of(bucket)) for bucket in plan.buckets] == [1, 2, 2]
    found = [clause for each in of_broken_plans(cut, partition(cut.traced.gm, plan), plan) for clause in each]
    assert "bucket segment: bucket 1: complete in segment 1, planned for 2" in found


def test_all_violations_are_raised_at_once_and_name_the_place() -> None:
    cut = program("grad_mode_spans")
    stitched = cut.stitched()
    MUTANTS[0].apply(stitched)
    violations = cut.violations(stitched)
    assert {each.partition(":")[0] for each in violations} == {"nodes", "calls", "planned nodes"}
    assert_expected_inline(
        str(CertificateError(violations[:2])),
        """\
the cut graph is not the program it was cut from; 2 violation(s):
  - nodes: node linear is in no segment
  - calls: segment 0, node abs_1: args[0]: expected linear, found l_args_0_
This is a bug in ddpopt: please report it with the graph (TORCH_LOGS=graph_code).""",
    )


def test_each_invariant_says_what_is_wrong_and_where() -> None:
    of_cuts = (violations for name in PROGRAMS for each in rejected(name).values() for violations in each)
    cuts = map(program, PLANNED)
    of_plans = (each for cut in cuts for each in of_broken_plans(cut, cut.stitched(), cut.plan))
    first: dict[str, str] = {}
    by_hand = (
        *of_a_forbidden_cut("reshaped_in_place", "t_", mutants.handed_on),
        *of_a_forbidden_cut("gradient_turned_round", "out"),
        *of_a_forbidden_cut("written_twice", "add__1"),
    )
    for violation in itertools.chain(*of_cuts, *of_plans, by_hand):
        first.setdefault(violation.partition(":")[0], violation)
    lines = (first[row.name].replace("l_self_modules_layers_modules_", "") for row in INVARIANTS)
    text = "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)
    assert_expected_inline(
        text,
        """\
inputs: expected 0_parameters_weight_, 0_parameters_bias_, l_args_0_, 1_parameters_weight_,
    1_parameters_bias_, 2_parameters_weight_, 2_parameters_bias_, found 0_parameters_bias_,
    0_parameters_weight_, l_args_0_, 1_parameters_weight_, 1_parameters_bias_, 2_parameters_weight_,
    2_parameters_bias_
nodes: node y_1 is in no segment
nothing added: segment 0, node _enter_autocast_2: is not in the original, and no cut needs it
order: segment 0, node _enter_autocast: runs after y, which the original runs later
definitions: segment 0: 3 inputs expected, 2 arguments passed
outputs: output[0]: expected float_2, found y_1
calls: segment 2, node z: args[0]: expected y_1, found float_1
metadata: segment 2, input y_1: its example value is not that of float_1
state: segment 0, node y: expected autocast('cpu', torch.bfloat16, True, None) and grad mode on,
    found autocast('cpu', torch.bfloat16, True, None) in autocast('cpu', torch.bfloat16, True, None)
    and grad mode on
balance: segment 0: expected no autocast and grad mode on after it, found autocast('cpu',
    torch.bfloat16, True, None) in autocast('cpu', torch.bfloat16, True, None) and grad mode on
writes: segment 1, node add_: writes to memory that row makes or uses in segment 0
aliases: segment 1, input view_1: is one tensor with input y, and t_ writes to it
descriptions: segment 1, input view_1: is described as it is after t_, which changes it in place
detached values: segment 0, input l_args_0_: is detached, but y sends gradient to it
views without gradient: segment 1, input turned_1: is a view that was taken without gradient
gradients: segment 2, input _enter_autocast_1: requires grad, but gets no gradient
own gradients: segment 1, input getitem: shares another value's memory, but has its own gradient
symbols: segment 2, input linear_1: no input binds the symbol s33
planned nodes: segment 1: expected y_1, found _exit_autocast
planned cuts: cut 0: expected before y_1, found before _exit_autocast
one bucket: parameter layers.1.bias (read by linear_3) is in no bucket
bucket segment: bucket 2: layers.1.bias completes in segment 0 (read by y_1), the bucket in 1
bucket order: bucket 2: completes in segment 2, before bucket 1 of segment 1
segment contents: parameter layers.1.weight: complete in no segment, listed in segment 1""",
    )
