"""L3, the structure: everything that must hold in a run before its numbers mean anything.

A table of claims, each one sentence and one small function, about this rank's records and every rank's
summary, which holds no tensors. All claims are checked, and all findings are kept. Invariant: nothing here
judges how close two numbers are; None where the other side has a tensor is a finding.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.judging.record import FINAL, Record, RecordedStep, in_sight, is_rounded, plain, seen
from ddpopt.judge.modes import Mode
from ddpopt.judge.trainer import Option
from ddpopt.judge.verdict import Finding
from ddpopt.judge.visible import GRADIENT_OF, form_of, is_of_last_step
from ddpopt.judge.whole_step import WHOLE
from ddpopt.observation.observe import Collective

MISSING, UNTRAINED = "missing", "that of no trained parameter"
ONE_SIDED = ("send", "recv")
"""Between two ranks; the other ranks have none."""
UNEVEN = ("alltoall", "all_to_all", "gather", "scatter", "barrier")
"""Each rank may send a different number of bytes."""
Told = TypeVar("Told")


@dataclass(frozen=True)
class Peer:
    """The summary of a run that one rank sends to the others.

    Attributes:
        rank: rank in the training group.
        states: for each step, a digest of every parameter and buffer after the step.
        graphs: Dynamo's compile ids, step by step.
        buckets: names of the parameters of each bucket, at each synchronized backward.
        collectives: the collectives on the DDP module's process group, in order, reduced to what must be
            equal on all ranks.
    """

    rank: int
    states: tuple[dict[str, bytes], ...]
    graphs: tuple[tuple[str, ...], ...]
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    collectives: tuple[str, ...] = ()


def peer_of(rank: int, record: Record) -> Peer:
    """Summarize a run for the other ranks."""
    return Peer(
        rank=rank,
        states=tuple({name: _digest(t) for name, t in step.state.items()} for step in record.steps),
        graphs=tuple(
            record.graphs[before:after]
            for before, after in zip([0, *record.graphs_after], record.graphs_after, strict=False)
        ),
        buckets=tuple(tuple(bucket.params for bucket in one.buckets) for one in record.iterations or ()),
        collectives=tuple(_sent(c) for c in record.collectives if not c.op.startswith(ONE_SIDED)),
    )


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).digest()


def _sent(collective: Collective) -> str:
    words = collective.op if collective.op.startswith(UNEVEN) else _words_of(collective)
    return words if collective.bucket is None else f"{words}, bucket {collective.bucket}"


def _words_of(collective: Collective) -> str:
    return f"{collective.op} of {collective.nbytes} bytes of {collective.dtype}"


@dataclass(frozen=True)
class RunEvidence:
    """The evidence for the claims.

    Attributes:
        mode: the mode under test.
        option: the option.
        compiled: whether anything should have been compiled.
        got: this rank's run in the mode.
        eager: this rank's run in eager DDP.
        peers: every rank's run in the mode, by rank in the group.
        eager_peers: the same for eager.
        alone: the number of graphs that Dynamo has compiled for the model alone after each step; None if
            unknown.
        ranks_differ: whether ranks may run different graphs.
    """

    mode: Mode
    option: Option
    compiled: bool
    got: Record
    eager: Record
    peers: Sequence[Peer]
    eager_peers: Sequence[Peer]
    alone: Sequence[int] | None
    ranks_differ: bool


class Break(NamedTuple):
    """A place where a claim does not hold: what was seen, for which parameter, in which step."""

    message: str
    parameter: str | None = None
    step: int | None = None


Broken = Iterator[Break]


def structure(evidence: RunEvidence, rank: int) -> list[Finding]:
    """Check every claim.

    Args:
        evidence: the evidence of the run.
        rank: rank of this process, for the findings.

    Returns:
        A finding for every violation.
    """
    return [
        Finding("L3", claim, _with_step(one), rank=rank, step=one.step, parameter=one.parameter)
        for claim, holds in CLAIMS
        for one in holds(evidence)
    ]


def _with_step(one: Break) -> str:
    return one.message if one.step is None else f"step {one.step}: {one.message}"


# ------------------------------------------------------------------------------------- what each rank has


def _steps(evidence: RunEvidence) -> Broken:
    got, expected = len(evidence.got.steps), len(evidence.eager.steps)
    if got != expected:
        yield Break(f"took {got} steps, eager DDP took {expected}")


def _gradients(evidence: RunEvidence, *, missing: bool) -> Broken:
    """Gradients that exist on one side only, or that differ in form."""
    strides = evidence.mode.gives == "module"
    for step, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(got.gradients, eager.gradients, strides=strides, absent=UNTRAINED):
            if missing == (not {MISSING, UNTRAINED}.isdisjoint((has, wants))):
                yield Break(f"the gradient of {name} is {has}, in eager DDP {wants}", name, step)


def _others(evidence: RunEvidence) -> Broken:
    """Parameters and buffers: their form, and the values of integers, which do not round."""
    for step, (got, eager) in _moments(evidence):
        unlike = {name: (has, wants) for name, has, wants in _unlike(got.state, eager.state)}
        for name, (has, wants) in unlike.items():
            yield Break(f"{name} is {has}, in eager DDP {wants}", name, step)
        for name, integers in eager.state.items() if evidence.mode.gives != "nothing" else ():
            # only DDP broadcasts buffers
            if name not in unlike and not is_rounded(integers) and not torch.equal(got.state[name], integers):
                yield Break(f"{name} holds different integers than in eager DDP", name, step)


def _random(evidence: RunEvidence) -> Broken:
    for step, (got, eager) in _moments(evidence):
        if not torch.equal(got.random, eager.random):
            yield Break("the random generator is in a different state than after eager's step", None, step)


def _seen(evidence: RunEvidence) -> Broken:
    """Other things a script can see: the form of each tensor; types, None and counts exactly."""
    for step, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(seen(got), seen(eager)):
            if in_sight(name, eager):
                message = f"{name} is {has}, in eager DDP {wants}"
                yield Break(message, plain(name) if name.startswith(FINAL) else None, step)


def _unlike(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], *, strides: bool = False, absent: object = None
) -> Iterator[tuple[str, str, str]]:
    """Yield each name whose values differ in form between two sides, with both forms as text."""
    for name in sorted(mine.keys() | theirs.keys()):
        has, wants = (_words(side.get(name, absent), strides) for side in (mine, theirs))
        if has != wants:
            yield name, has, wants


def _words(value: Any, strides: bool) -> str:
    if value is None:
        return MISSING
    return form_of(value, strides) if isinstance(value, Tensor) else str(value)


def _memory(evidence: RunEvidence) -> Broken:
    """Writing to one gradient must change no other gradient, nor anything else that a script holds.

    Memory that eager DDP shares with its previous step is allowed in any step: gradients that are bucket
    views share it in every step except the one in which DDP rebuilds its buckets.
    """
    moments = [eager for _, (_, eager) in _moments(evidence)]
    lasting = {pair for eager in moments for pair in eager.sharing or () if any(map(is_of_last_step, pair))}
    rewritten = {name for eager in moments for name in eager.written}
    for step, (got, eager) in _moments(evidence):
        if got.sharing is None or eager.sharing is None:
            continue
        for one, other in sorted(got.sharing - eager.sharing - lasting):
            if not in_sight(one, eager) or not in_sight(other, eager):
                continue
            yield Break(f"{one} and {other} share memory; in eager DDP they do not", None, step)
        for one, other in sorted(eager.sharing - got.sharing):
            if not any(GRADIENT_OF in name or is_of_last_step(name) for name in (one, other)):
                yield Break(f"{one} and {other} share no memory; in eager DDP they do", None, step)
        for name in sorted(set(got.written) - rewritten):
            yield Break(f"writes to the {name} of the previous step; in eager DDP it does not", None, step)


def _moments(evidence: RunEvidence) -> Iterator[tuple[int, tuple[RecordedStep, RecordedStep]]]:
    return enumerate(zip(evidence.got.moments, evidence.eager.moments, strict=False))


def _agreement(evidence: RunEvidence) -> Broken:
    allowed = _unequal(evidence.eager_peers)
    for (step, name), rank in _unequal(evidence.peers).items():
        is_broadcast = evidence.mode.gives != "nothing" or name in evidence.eager.steps[0].gradients
        if is_broadcast and (step, name) not in allowed:
            message = f"{name} differs between ranks 0 and {rank} after the step; it does not under eager DDP"
            yield Break(message, name, step)


def _unequal(peers: Sequence[Peer]) -> dict[tuple[int, str], int]:
    """What differs from the first rank after a step, and the first rank where it does."""
    return {
        (step, name): peer.rank
        for peer in reversed(peers)
        for step, (state, first) in enumerate(zip(peer.states, peers[0].states, strict=False))
        for name, digest in first.items()
        if state.get(name) != digest
    }


# --------------------------------------------------------------------------------- what was sent and compiled


def _unlike_first(
    peers: Sequence[Peer], what: Callable[[Peer], Sequence[Told]]
) -> Iterator[tuple[int, int, Told, Told]]:
    """Yield where each rank's summary first differs from rank 0's: rank, index, both values."""
    for peer in peers[1:]:
        for index, (theirs, ours) in enumerate(zip(what(peer), what(peers[0]), strict=False)):
            if theirs != ours:
                yield peer.rank, index, theirs, ours
                break


def _same_buckets(evidence: RunEvidence) -> Broken:
    """Ranks that disagree on buckets would add up unrelated gradients."""
    for rank, index, theirs, ours in _unlike_first(evidence.peers, lambda peer: peer.buckets):
        yield Break(f"backward {index}: rank {rank} has buckets {theirs}, rank 0 {ours}")


def _reduced_once(evidence: RunEvidence) -> Broken:
    if not evidence.option.sends_as_usual:
        return
    for index, iteration in enumerate(evidence.got.iterations or ()):
        carried = [c.bucket for c in iteration.collectives if c.bucket is not None]
        expected = [bucket.index for bucket in iteration.buckets]
        if carried != expected:
            yield Break(
                f"backward {index}: buckets {carried} were reduced, expected {expected}: each once, in order"
            )


def _no_others(evidence: RunEvidence) -> Broken:
    """Collectives that carry no bucket: the map of used parameters, and those of layers and hooks."""
    more = Counter(_bucketless(evidence.got)) - Counter(_bucketless(evidence.eager))
    if more and evidence.option.sends_as_usual:
        words = ", ".join(f"{count} x {collective}" for collective, count in more.items())
        yield Break(f"sent {words} beyond what eager DDP sends, none of them a bucket")


def _bucketless(record: Record) -> list[str]:
    """Collectives without a bucket, except those of the reducer itself.

    The reducer sends the order and sizes of rebuilt buckets, and the map of used parameters.
    """
    layouts = [[len(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
    numbers = {number for counts in layouts for number in (sum(counts) + 1, len(counts))}
    rebuilding = {_words_of(Collective("broadcast", 4 * number, "int32", None)) for number in numbers}
    rebuilding |= {_words_of(Collective("allreduce", 4 * sum(counts), "int32", None)) for counts in layouts}
    own = [_words_of(collective) for collective in record.collectives if collective.bucket is None]
    others = [f"{_words_of(collective)} in another group" for collective in record.elsewhere]
    return [*(words for words in own if words not in rebuilding), *others]


def _same_order(evidence: RunEvidence) -> Broken:
    """Collectives that ranks enter in different orders never end, or mix up their data."""
    if not evidence.option.sends_as_usual:
        return
    for rank, index, theirs, ours in _unlike_first(
        evidence.peers, lambda peer: (*peer.collectives, "nothing")
    ):
        yield Break(f"collective {index}: rank {rank} has {theirs}, rank 0 {ours}")


def _synchronized(evidence: RunEvidence) -> Broken:
    """Gradients were reduced exactly where they should be: in one backward of each step."""
    if evidence.got.iterations is None or not evidence.option.sends_as_usual:
        return
    got, expected = len(evidence.got.iterations), len(evidence.got.steps)
    if got != expected:
        yield Break(f"{got} backwards were reduced in {expected} steps, expected one in each")


def _planned(evidence: RunEvidence) -> Broken:
    """The reducer's buckets are the plan's; there are none if no gradient of a bucket is ever computed."""
    got = evidence.got
    if not got.planned or not got.iterations or not evidence.compiled:
        return
    if got.plan is None:
        if _trains(evidence):
            yield Break("ddpopt's plan is not in effect: DDP kept its own buckets")
        return
    planned = [bucket.params for bucket in got.plan.buckets]
    for index, iteration in enumerate(got.iterations):
        seen = [bucket.params for bucket in iteration.buckets]
        if [frozenset(params) for params in seen] != [frozenset(params) for params in planned]:
            yield Break(f"backward {index}: the reducer has buckets {seen}, the plan {planned}")


def _trains(evidence: RunEvidence) -> bool:
    """Whether eager DDP computes any gradient that is sent."""
    buckets = (bucket for iteration in evidence.got.iterations or () for bucket in iteration.buckets)
    names = {name for bucket in buckets for name in bucket.params}
    return any(step.gradients.get(name) is not None for step in evidence.eager.steps for name in names)


def _compiled(evidence: RunEvidence) -> Broken:
    """A mode that compiles must have compiled something."""
    if not evidence.compiled:
        return
    if not evidence.got.graphs:
        yield Break("nothing was compiled: Dynamo made no graph")
    if evidence.mode.captures_backward and evidence.got.captures == 0:
        yield Break("compiled autograd captured no backward")


def _same_graphs(evidence: RunEvidence) -> Broken:
    """A rank that compiles while its peers do not keeps them waiting."""
    if evidence.ranks_differ or not evidence.compiled:
        return
    for rank, step, *graphs in _unlike_first(evidence.peers, lambda peer: peer.graphs):
        theirs, ours = (", ".join(ids) or "nothing" for ids in graphs)
        yield Break(f"rank {rank} compiled {theirs}, rank 0 {ours}", None, step)


def _as_alone(evidence: RunEvidence) -> Broken:
    """Data parallelism adds no graph; that of a whole step depends on more than the model."""
    if evidence.alone is None or not evidence.got.graphs or evidence.option.more_graphs:
        return
    if any(each.startswith(WHOLE) for each in evidence.got.graphs):
        return
    for step, (got, alone) in enumerate(zip(evidence.got.graphs_after, evidence.alone, strict=False)):
        if got != alone:
            yield Break(f"{got} graphs were compiled by then, for the model alone {alone}", None, step)
            return


CLAIMS: tuple[tuple[str, Callable[[RunEvidence], Broken]], ...] = (
    ("as many steps as in eager DDP", _steps),
    ("a gradient wherever eager DDP has one", partial(_gradients, missing=True)),
    ("gradients with eager DDP's shape, dtype, strides and device", partial(_gradients, missing=False)),
    ("parameters and buffers with eager DDP's form, and equal integers", _others),
    ("the random generator in the same state as after eager's step", _random),
    ("everything that a script can see has eager DDP's form, and hooks run as often and as early", _seen),
    (
        "tensors share memory where eager DDP's do and nowhere else, and none is written after its step",
        _memory,
    ),
    ("parameters and buffers equal on all ranks where they are in eager DDP", _agreement),
    ("the same buckets on every rank", _same_buckets),
    ("every bucket reduced exactly once, in order", _reduced_once),
    ("no collectives except buckets and those that eager DDP sends", _no_others),
    ("the same collectives on every rank, in the same order", _same_order),
    ("as many synchronized backwards as requested, and none under no_sync", _synchronized),
    ("the reducer follows the plan", _planned),
    ("something was compiled", _compiled),
    ("the same graphs on every rank, step by step", _same_graphs),
    ("as many graphs as for the model alone", _as_alone),
)
