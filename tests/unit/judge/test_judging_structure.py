"""ddpopt.judge.judging.structure: each claim has a run that breaks it, and a right run breaks none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Bench, Subject
from ddpopt.judge.judging.structure import CLAIMS, Evidence, Peer, peer_of, structure
from ddpopt.judge.matrix import CASES
from ddpopt.judge.modes import mode
from ddpopt.judge.options import option
from ddpopt.observation.observe import Collective
from ddpopt.ranks.group import joined
from tests.multigpu.single import single_rank

NAME = "layers.1.weight"
SEEN = "all that a script can see is of eager DDP's form, hooks run as often, and as early"
MEMORY = "tensors share memory where eager DDP's do and nowhere else, and none is written after its step"


@pytest.fixture(scope="module")
def right() -> Iterator[Evidence]:
    """A run of inline, and what eager DDP did."""
    with single_rank(), joined() as ranks:
        bench = Bench(Subject(CASES[0], option("default"), 3, ranks.device), ranks)
        eager, got = bench.run(mode("eager"), None), bench.run(mode("ddpopt-inline"), "eager")
        assert eager is not None
        assert got is not None
        yield Evidence(
            mode=mode("ddpopt-inline"),
            option=option("default"),
            compiled=True,
            got=got,
            eager=eager,
            peers=[peer_of(0, got), peer_of(1, got)],
            eager_peers=[peer_of(0, eager), peer_of(1, eager)],
            alone=[1, 1, 1],
            ranks_differ=False,
        )
        bench.close()


def claims_broken(evidence: Evidence) -> set[str]:
    return {finding.claim for finding in structure(evidence, rank=0)}


def test_a_right_run_breaks_no_claim(right: Evidence) -> None:
    assert structure(right, rank=0) == []


def changed_step(record: Record, **changes: Any) -> Record:
    """The same run with something else in its second step."""
    first, second, *others = record.steps
    return replace(record, steps=[first, replace(second, **changes), *others])


def with_gradient(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Evidence], Evidence]:
    def changed(evidence: Evidence) -> Evidence:
        gradients = evidence.got.steps[1].gradients
        gradient = gradients[NAME]
        assert gradient is not None
        got = changed_step(evidence.got, gradients={**gradients, NAME: change(gradient)})
        return replace(evidence, got=got)

    return changed


def with_collectives(order: list[int | None]) -> Callable[[Evidence], Evidence]:
    def changed(evidence: Evidence) -> Evidence:
        first, *others = evidence.got.iterations or ()
        collectives = tuple(Collective("allreduce", 4, "float32", bucket) for bucket in order)
        got = replace(evidence.got, iterations=(replace(first, collectives=collectives), *others))
        return replace(evidence, got=got)

    return changed


def with_second_peer(**changes: Any) -> Callable[[Evidence], Evidence]:
    return lambda evidence: replace(
        evidence, peers=[evidence.peers[0], replace(evidence.peers[1], **changes)]
    )


def other_state(evidence: Evidence) -> Evidence:
    peer: Peer = evidence.peers[1]
    states = ({**peer.states[0], NAME: b"other"}, *peer.states[1:])
    return with_second_peer(states=states)(evidence)


def with_second_sending(
    change: Callable[[list[Collective]], list[Collective]],
) -> Callable[[Evidence], Evidence]:
    def changed(evidence: Evidence) -> Evidence:
        sent = tuple(change(list(evidence.got.collectives)))
        return with_second_peer(collectives=peer_of(1, replace(evidence.got, collectives=sent)).collectives)(
            evidence
        )

    return changed


MUTANTS: dict[str, tuple[str, Callable[[Evidence], Evidence]]] = {
    "a step too few": (
        "as many steps as in eager DDP",
        lambda e: replace(
            e, got=replace(e.got, steps=e.got.steps[:2], iterations=(e.got.iterations or ())[:2])
        ),
    ),
    "a gradient is missing": ("a gradient wherever eager DDP has one", with_gradient(lambda _: None)),
    "a parameter more": (
        "a gradient wherever eager DDP has one",
        lambda e: replace(
            e, got=changed_step(e.got, gradients={**e.got.steps[1].gradients, "new": torch.ones(1)})
        ),
    ),
    "another shape": (
        "gradients of eager DDP's shape, dtype, strides and device",
        with_gradient(lambda gradient: gradient.flatten()),
    ),
    "another dtype": (
        "gradients of eager DDP's shape, dtype, strides and device",
        with_gradient(lambda gradient: gradient.double()),
    ),
    "other strides": (
        "gradients of eager DDP's shape, dtype, strides and device",
        with_gradient(lambda gradient: gradient.t()),
    ),
    "another layout": (
        "gradients of eager DDP's shape, dtype, strides and device",
        with_gradient(lambda gradient: gradient.to_sparse()),
    ),
    "a parameter of another form": (
        "parameters and buffers of eager DDP's form, integers equal",
        lambda e: replace(e, got=changed_step(e.got, state={**e.got.steps[1].state, NAME: torch.zeros(1)})),
    ),
    "a buffer more": (
        "parameters and buffers of eager DDP's form, integers equal",
        lambda e: replace(e, got=changed_step(e.got, state={**e.got.steps[1].state, "new": torch.zeros(1)})),
    ),
    "random numbers drawn": (
        "the random generator as after eager's step",
        lambda e: replace(e, got=changed_step(e.got, random=e.got.steps[1].random.flip(0))),
    ),
    "a hook twice": (
        SEEN,
        lambda e: replace(e, got=changed_step(e.got, extras={"hooks": 2})),
    ),
    "an output without gradient": (
        SEEN,
        lambda e: replace(
            e, got=changed_step(e.got, extras={**e.got.steps[1].extras, "form of output": "torch.float32"})
        ),
    ),
    "two gradients in one memory": (
        MEMORY,
        lambda e: replace(
            e, got=changed_step(e.got, sharing=frozenset({("gradient of a", "gradient of b")}))
        ),
    ),
    "outputs that share memory no more": (
        MEMORY,
        lambda e: replace(e, eager=changed_step(e.eager, sharing=frozenset({("output[0]", "output[1]")}))),
    ),
    "a gradient that the next step writes to": (
        MEMORY,
        lambda e: replace(e, got=changed_step(e.got, written=("gradient of a",))),
    ),
    "another evaluation": (
        "the random generator as after eager's step",
        lambda e: replace(
            e,
            got=replace(
                e.got, evaluation=replace(e.got.moments[3], random=torch.zeros(1, dtype=torch.uint8))
            ),
        ),
    ),
    "a rank drifts": ("parameters and buffers equal on all ranks where they are in eager DDP", other_state),
    "another bucket on a rank": (
        "the same buckets on every rank",
        with_second_peer(buckets=((("layers.0.bias",),),)),
    ),
    "a bucket twice": ("every bucket reduced exactly once, in order", with_collectives([0, 0, 1])),
    "a bucket not at all": ("every bucket reduced exactly once, in order", with_collectives([0])),
    "buckets out of order": ("every bucket reduced exactly once, in order", with_collectives([1, 0])),
    "one backward too many": (
        "as many synchronised backwards as asked for, none under no_sync",
        lambda e: replace(
            e, got=replace(e.got, iterations=(*(e.got.iterations or ()), *(e.got.iterations or ())))
        ),
    ),
    "no plan": ("the reducer follows the plan", lambda e: replace(e, got=replace(e.got, plan=None))),
    "nothing compiled": ("something was compiled", lambda e: replace(e, got=replace(e.got, graphs=()))),
    "no backward captured": (
        "something was compiled",
        lambda e: replace(e, mode=mode("python_reducer"), got=replace(e.got, iterations=None)),
    ),
    "a rank compiles more": (
        "the same graphs on every rank, step by step",
        with_second_peer(graphs=(("0/0", "0/1"), (), ())),
    ),
    "a rank compiles something else": (
        "the same graphs on every rank, step by step",
        with_second_peer(graphs=(("999/0",), (), ())),
    ),
    "a rank compiles as much, but later": (
        "the same graphs on every rank, step by step",
        with_second_peer(graphs=((), ("0/0",), ())),
    ),
    "a collective that is no bucket": (
        "no collective but buckets and what eager DDP sends",
        lambda e: replace(e, got=replace(e.got, elsewhere=(Collective("allreduce", 4, "float32", None),))),
    ),
    "a rank sends in another order": (
        "the same collectives on every rank, in the same order",
        with_second_sending(lambda sent: [sent[1], sent[0], *sent[2:]]),
    ),
    "a rank sends less": (
        "the same collectives on every rank, in the same order",
        with_second_sending(lambda sent: sent[:-1]),
    ),
    "a rank sends another size": (
        "the same collectives on every rank, in the same order",
        with_second_sending(lambda sent: [replace(sent[0], nbytes=sent[0].nbytes + 4), *sent[1:]]),
    ),
    "a recompile": ("as many graphs as of the model alone", lambda e: replace(e, alone=[1, 2, 2])),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_named(name: str, right: Evidence) -> None:
    claim, mutate = MUTANTS[name]
    assert claim in claims_broken(mutate(right))


def test_every_claim_has_a_mutant() -> None:
    assert {claim for claim, _ in MUTANTS.values()} == {claim for claim, _ in CLAIMS}


def test_a_plan_that_the_reducer_does_not_follow_is_named(right: Evidence) -> None:
    assert right.got.plan is not None
    buckets = tuple(reversed(right.got.plan.buckets))
    wrong = replace(right, got=replace(right.got, plan=replace(right.got.plan, buckets=buckets)))
    assert "the reducer follows the plan" in claims_broken(wrong)


def test_a_plan_is_missed_only_where_something_that_is_sent_has_a_gradient(right: Evidence) -> None:
    steps = [replace(step, gradients=dict.fromkeys(step.gradients)) for step in right.eager.steps]
    unplanned = replace(right, got=replace(right.got, plan=None))
    untrained = replace(unplanned, eager=replace(right.eager, steps=steps))
    assert "the reducer follows the plan" in claims_broken(unplanned)
    assert "the reducer follows the plan" not in claims_broken(untrained)


def test_what_differs_between_ranks_in_eager_too_may_differ(right: Evidence) -> None:
    peer = right.eager_peers[1]
    states = ({**peer.states[0], NAME: b"other"}, *peer.states[1:])
    loose = replace(right, eager_peers=[right.eager_peers[0], replace(peer, states=states)])
    assert claims_broken(other_state(loose)) == set()


@pytest.mark.parametrize("name", ["hook_powersgd", "two_models"])
def test_an_option_that_explains_other_collectives_allows_them(name: str, right: Evidence) -> None:
    explained = replace(right, option=option(name))
    assert claims_broken(with_collectives([0, None, 1])(explained)) == set()


def test_a_collective_that_eager_sends_too_may_be_no_bucket(right: Evidence) -> None:
    first, *others = right.eager.iterations or ()
    used = Collective("allreduce", 4, "float32", None)
    eager = replace(first, collectives=(*first.collectives, used))
    both = replace(right, eager=replace(right.eager, iterations=(eager, *others)))
    assert claims_broken(with_collectives([0, None, 1])(both)) == set()


def test_ranks_may_exchange_different_amounts_where_the_collective_allows_it(right: Evidence) -> None:
    uneven = [Collective("alltoall_base", 4 * size, "float32", None) for size in (1, 2)]
    sent = [peer_of(rank, replace(right.got, collectives=(one,))) for rank, one in enumerate(uneven)]
    assert claims_broken(replace(right, peers=sent)) == set()


def test_a_rank_without_data_may_take_part_in_a_bucket_that_it_does_not_know(right: Evidence) -> None:
    shadows = [replace(one, bucket=None) for one in right.got.collectives]
    peer = peer_of(1, replace(right.got, collectives=tuple(shadows)))
    assert claims_broken(replace(right, peers=[right.peers[0], peer])) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extras": {"norm": torch.ones(1)}}, "the norm is torch.float32 (1,) on cpu, in eager DDP missing"),
        ({"extras": {"calls": 3}}, "the calls is 3, in eager DDP missing"),
        (
            {"loss": torch.tensor(1.0).double()},
            "the loss is torch.float64 () on cpu, in eager DDP torch.float32 () on cpu",
        ),
        (
            {"final": {"w": torch.ones(3)}},
            "final gradient of w is torch.float32 (3,) on cpu, in eager DDP missing",
        ),
    ],
)
def test_what_has_no_counterpart_of_its_form_is_a_finding(
    right: Evidence, changes: dict[str, Any], message: str
) -> None:
    extras = right.got.steps[1].extras | changes.pop("extras", {})
    got = changed_step(right.got, extras=extras, **changes)
    (finding,) = structure(replace(right, got=got), rank=1)
    assert (finding.level, finding.rank, finding.message) == ("L3", 1, f"step 1: {message}")
