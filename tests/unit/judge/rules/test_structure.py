"""ddpopt.judge.rules.structure: each claim has a run that breaks it, and a right run breaks none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.evidence import Peer, RunEvidence, peer_of
from ddpopt.judge.rules.structure import CLAIMS, structure
from ddpopt.judge.training.options import option
from ddpopt.judge.training.record import Record
from ddpopt.observation.events import Collective
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks

Change = Callable[[RunEvidence], RunEvidence]
NAME = "layers.1.weight"


@pytest.fixture(scope="module")
def right(alone: Ranks) -> Iterator[RunEvidence]:
    """A run of inline, and what eager DDP did."""
    bench = Bench(Subject(CASES[0], option("default"), 3, alone.device), alone)
    eager, got = bench.run(mode("eager"), None), bench.run(mode("ddpopt-inline"), "eager")
    assert eager is not None
    assert got is not None
    yield RunEvidence(
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


def claims_broken(evidence: RunEvidence) -> set[str]:
    return {finding.claim for finding in structure(evidence, rank=0)}


def test_a_right_run_breaks_no_claim(right: RunEvidence) -> None:
    assert structure(right, rank=0) == []


def changed_step(record: Record, **changes: Any) -> Record:
    """The same run with something else in its second step."""
    first, second, *others = record.steps
    return replace(record, steps=[first, replace(second, **changes), *others])


def with_got(**changes: Any) -> Change:
    return lambda evidence: replace(evidence, got=replace(evidence.got, **changes))


def with_step(**changes: Any) -> Change:
    return lambda evidence: replace(evidence, got=changed_step(evidence.got, **changes))


def with_more(field: str, name: str, value: object) -> Change:
    def changed(evidence: RunEvidence) -> RunEvidence:
        known = getattr(evidence.got.steps[1], field)
        return with_step(**{field: {**known, name: value}})(evidence)

    return changed


def with_gradient(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    def changed(evidence: RunEvidence) -> RunEvidence:
        gradient = evidence.got.steps[1].gradients[NAME]
        assert gradient is not None
        return with_more("gradients", NAME, change(gradient))(evidence)

    return changed


def with_collectives(order: list[int | None]) -> Change:
    def changed(evidence: RunEvidence) -> RunEvidence:
        first, *others = evidence.got.iterations or ()
        collectives = tuple(Collective("allreduce", 4, "float32", bucket) for bucket in order)
        return with_got(iterations=(replace(first, collectives=collectives), *others))(evidence)

    return changed


def with_second_peer(**changes: Any) -> Change:
    return lambda e: replace(e, peers=[e.peers[0], replace(e.peers[1], **changes)])


def other_states(peer: Peer) -> tuple[dict[str, bytes], ...]:
    return ({**peer.states[0], NAME: b"other"}, *peer.states[1:])


def other_state(evidence: RunEvidence) -> RunEvidence:
    return with_second_peer(states=other_states(evidence.peers[1]))(evidence)


def with_second_sending(change: Callable[[list[Collective]], list[Collective]]) -> Change:
    def changed(evidence: RunEvidence) -> RunEvidence:
        sent = tuple(change(list(evidence.got.collectives)))
        peer = peer_of(1, replace(evidence.got, collectives=sent))
        return with_second_peer(collectives=peer.collectives)(evidence)

    return changed


def other_count(evidence: RunEvidence) -> RunEvidence:
    def counting(record: Record, count: int) -> Record:
        return changed_step(record, state={**record.steps[1].state, "count": torch.tensor(count)})

    return replace(evidence, got=counting(evidence.got, 4), eager=counting(evidence.eager, 3))


def turned(plan: Plan | None) -> Plan:
    assert plan is not None
    return replace(plan, buckets=plan.buckets[::-1])


MUTANTS: dict[str, dict[str, Change]] = {
    "as many steps as in eager DDP": {"a step too few": lambda e: with_got(steps=e.got.steps[:2])(e)},
    "a gradient wherever eager DDP has one": {"a gradient is missing": with_gradient(lambda _: None)},
    "gradients with eager DDP's shape, dtype, strides and device": {
        "another shape": with_gradient(lambda gradient: gradient.flatten()),
        "other strides": with_gradient(lambda gradient: gradient.t()),
    },
    "parameters and buffers with eager DDP's form, and equal integers": {
        "a parameter of another form": with_more("state", NAME, torch.zeros(1)),
        "another count": other_count,
    },
    "the random generator in the same state as after eager's step": {
        "random numbers drawn": lambda e: with_step(random=e.got.steps[1].random.flip(0))(e),
        "another evaluation": lambda e: with_got(
            evaluation=replace(e.got.moments[3], random=torch.zeros(1, dtype=torch.uint8))
        )(e),
    },
    "collectives only in process groups that the engine was given or made": {
        "a collective for everybody": with_got(foreign=("allreduce of 4 bytes of float32",)),
    },
    "no collectives without gradients except those that eager DDP sends": {
        "an evaluation that reduces": lambda e: with_got(
            evaluation=replace(e.got.moments[3], sent=("allreduce of 4 bytes of float32",))
        )(e),
    },
    "no more memory kept by each step than in eager DDP": {"a leak": with_got(growth=4)},
    "everything that a script can see has eager DDP's form, and hooks run as often and as early": {
        "an output without gradient": with_more("extras", "form of output", "torch.float32")
    },
    "tensors share memory where eager DDP's do and nowhere else, and none is written after its step": {
        "two gradients in one memory": with_step(sharing=frozenset({("gradient of a", "gradient of b")})),
        "outputs that no longer share memory": lambda e: replace(
            e, eager=changed_step(e.eager, sharing=frozenset({("output[0]", "output[1]")}))
        ),
        "a gradient that the next step writes to": with_step(written=("gradient of a",)),
    },
    "parameters and buffers equal on all ranks where they are in eager DDP": {"a rank drifts": other_state},
    "the same buckets on every rank": {"another bucket on a rank": with_second_peer(buckets=(((NAME,),),))},
    "every bucket reduced exactly once, in order": {
        "a bucket twice": with_collectives([0, 0, 1]),
        "buckets out of order": with_collectives([1, 0]),
    },
    "as many synchronized backwards as requested, and none under no_sync": {
        "each backward twice": lambda e: with_got(iterations=(e.got.iterations or ()) * 2)(e)
    },
    "the reducer follows the plan": {
        "no plan": with_got(plan=None),
        "a plan in another order": lambda e: with_got(plan=turned(e.got.plan))(e),
    },
    "something was compiled": {
        "nothing compiled": with_got(graphs=()),
        "no backward captured": lambda e: with_got(iterations=None)(replace(e, mode=mode("python_reducer"))),
    },
    "the same graphs on every rank, step by step": {
        "a rank compiles more": with_second_peer(graphs=(("0/0", "0/1"), (), ())),
        "a rank compiles as much, but later": with_second_peer(graphs=((), ("0/0",), ())),
    },
    "no collectives except buckets and those that eager DDP sends": {
        "a collective that is no bucket": with_got(elsewhere=(Collective("allreduce", 4, "float32", None),))
    },
    "the same collectives on every rank, in the same order": {
        "a rank sends less": with_second_sending(lambda sent: sent[:-1]),
        "a rank sends another size": with_second_sending(
            lambda sent: [replace(sent[0], nbytes=sent[0].nbytes + 4), *sent[1:]]
        ),
    },
    "the collectives that the engine promises": {
        "one too few": with_got(sent=[("allreduce of 4 bytes of float32",)], promised={"allreduce": 2})
    },
    "the same collectives as uncompiled, in the same order": {
        "another order": lambda e: replace(with_got(sent=[("a", "b")])(e), uncompiled=[("b", "a")])
    },
    "as many graphs as for the model alone": {"a recompile": lambda e: replace(e, alone=[1, 2, 2])},
}
"""By the claim that it breaks."""


@pytest.mark.parametrize(("claim", "name"), [(claim, name) for claim in MUTANTS for name in MUTANTS[claim]])
def test_each_broken_claim_is_named(claim: str, name: str, right: RunEvidence) -> None:
    assert claim in claims_broken(MUTANTS[claim][name](right))


def test_every_claim_has_a_mutant() -> None:
    assert MUTANTS.keys() == {claim for claim, _ in CLAIMS}


def test_a_plan_is_missed_only_where_something_that_is_sent_has_a_gradient(right: RunEvidence) -> None:
    steps = [replace(step, gradients=dict.fromkeys(step.gradients)) for step in right.eager.steps]
    untrained = replace(right, eager=replace(right.eager, steps=steps))
    assert "the reducer follows the plan" not in claims_broken(with_got(plan=None)(untrained))
    nothing = with_got(plan=None, graphs=(), graphs_after=[0, 0, 0])(right)
    assert "the reducer follows the plan" not in claims_broken(nothing)
    assert "something was compiled" in claims_broken(nothing)


def test_what_differs_between_ranks_in_eager_too_may_differ(right: RunEvidence) -> None:
    first, second = right.eager_peers
    loose = replace(right, eager_peers=[first, replace(second, states=other_states(second))])
    assert claims_broken(other_state(loose)) == set()


def test_a_collective_that_an_option_explains_or_eager_sends_too_may_be_no_bucket(right: RunEvidence) -> None:
    more = with_collectives([0, None, 1])
    assert claims_broken(more(replace(right, option=option("join")))) == set()
    first, *others = right.eager.iterations or ()
    eager = replace(first, collectives=(*first.collectives, Collective("allreduce", 4, "float32", None)))
    both = replace(right, eager=replace(right.eager, iterations=(eager, *others)))
    assert claims_broken(more(both)) == set()


def test_ranks_may_exchange_different_amounts_where_the_collective_allows_it(right: RunEvidence) -> None:
    uneven = [Collective("alltoall_base", 4 * size, "float32", None) for size in (1, 2)]
    sent = [peer_of(rank, replace(right.got, collectives=(one,))) for rank, one in enumerate(uneven)]
    assert claims_broken(replace(right, peers=sent)) == set()


def test_a_finding_says_of_which_rank_and_step_it_is_and_what_eager_ddp_has(right: RunEvidence) -> None:
    (finding,) = structure(with_step(loss=torch.tensor(1.0).double())(right), rank=1)
    message = "step 1: the loss is torch.float64 () on cpu, in eager DDP torch.float32 () on cpu"
    assert (finding.level, finding.rank, finding.message) == ("L3", 1, message)
