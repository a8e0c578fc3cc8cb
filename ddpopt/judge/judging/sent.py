"""Claims of L3 on what a run sent and compiled: buckets, collectives in order, graphs.

Invariant: a collective that carries no bucket is one that eager DDP sends too, or an option explains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddpopt.judge.judging.evidence import Break, Broken, Evidence, Sent, unlike, words_of
from ddpopt.judge.judging.record import Record
from ddpopt.observation.observe import Collective, Iteration


def reduced_once(evidence: Evidence) -> Broken:
    """Each bucket was sent once, in order."""
    for index, iteration in enumerate(evidence.got.iterations or ()):
        carried = [c.bucket for c in iteration.collectives if c.bucket is not None]
        expected = [bucket.index for bucket in iteration.buckets]
        if carried != expected and not evidence.option.missing:
            yield Break(
                f"backward {index}: buckets {carried} were reduced, expected {expected}: each once, in order",
                _param_of(iteration, carried, expected),
            )


def _param_of(iteration: Iteration, carried: Sequence[int], expected: Sequence[int]) -> str | None:
    lost = [index for index in expected if carried.count(index) != 1]
    return iteration.buckets[lost[0]].params[0] if lost else None


def no_others(evidence: Evidence) -> Broken:
    """Collectives that carry no bucket: the map of used parameters, what layers and hooks send."""
    if evidence.option.missing or evidence.option.others:
        return
    more = Counter(_bucketless(evidence.got)) - Counter(_bucketless(evidence.eager))
    if more:
        words = ", ".join(f"{count} x {collective}" for collective, count in more.items())
        yield Break(f"sent {words} more than eager DDP does, and none is a bucket")


def _bucketless(record: Record) -> list[str]:
    """What carried no bucket; but for what a reducer sends for itself.

    That is the order and the sizes of rebuilt buckets, and which parameters were used.
    """
    layouts = [[len(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
    numbers = {number for counts in layouts for number in (sum(counts) + 1, len(counts))}
    rebuilding = {words_of(Collective("broadcast", 4 * number, "int32", None)) for number in numbers}
    rebuilding |= {words_of(Collective("allreduce", 4 * sum(counts), "int32", None)) for counts in layouts}
    own = [words_of(collective) for collective in record.collectives if collective.bucket is None]
    others = [f"{words_of(collective)} in another group" for collective in record.elsewhere]
    return [*(words for words in own if words not in rebuilding), *others]


def same_order(evidence: Evidence) -> Broken:
    """Collectives that ranks enter in another order never end, or mix up their data."""
    if evidence.option.compresses:
        return
    for rank, index, theirs, ours in unlike(evidence.peers, lambda peer: peer.collectives, _meet):
        yield Break(f"collective {index}: rank {rank} has {_named(theirs)}, rank 0 {_named(ours)}")


def _meet(left: Sent | None, right: Sent | None) -> bool:
    """Whether two ranks do the same; one that has no data left takes part in what it knows no bucket of."""
    if left is None or right is None:
        return False
    return left[0] == right[0] and (left[1] == right[1] or None in (left[1], right[1]))


def _named(sent: Sent | None) -> str:
    if sent is None:
        return "nothing"
    return sent[0] if sent[1] is None else f"{sent[0]}, bucket {sent[1]}"


def synchronised(evidence: Evidence) -> Broken:
    """Backwards were reduced where they should be, and nowhere else."""
    if evidence.option.syncs is None or evidence.got.iterations is None:
        return
    expected = evidence.option.syncs * len(evidence.got.steps)
    got = len(evidence.got.iterations)
    if got != expected:
        yield Break(f"{got} backwards were reduced in {len(evidence.got.steps)} steps, expected {expected}")


def _trains(evidence: Evidence) -> bool:
    """Whether eager DDP has a gradient for anything that is sent."""
    buckets = (bucket for iteration in evidence.got.iterations or () for bucket in iteration.buckets)
    names = {name for bucket in buckets for name in bucket.params}
    return any(step.gradients.get(name) is not None for step in evidence.eager.steps for name in names)


def planned(evidence: Evidence) -> Broken:
    """The reducer's buckets are the plan's; there is none where no gradient of a bucket is ever computed."""
    got = evidence.got
    if not got.planned or not got.iterations or not evidence.compiled:
        return
    if got.plan is None:
        if _trains(evidence):
            yield Break("ddpopt's plan is not in force: DDP went on with buckets of its own")
        return
    planned = [bucket.params for bucket in got.plan.buckets]
    for index, iteration in enumerate(got.iterations):
        seen = [bucket.params for bucket in iteration.buckets]
        if [frozenset(params) for params in seen] != [frozenset(params) for params in planned]:
            yield Break(f"backward {index}: the reducer has buckets {seen}, the plan {planned}")


def compiled(evidence: Evidence) -> Broken:
    """A mode that does nothing is no mode."""
    if not evidence.compiled:
        return
    if not evidence.got.graphs:
        yield Break("nothing was compiled: Dynamo made no graph")
    if evidence.mode.captures_backward and evidence.got.captures == 0:
        yield Break("compiled autograd captured no backward")


def same_graphs(evidence: Evidence) -> Broken:
    """A rank that compiles alone keeps its peers waiting."""
    if evidence.ranks_differ or not evidence.compiled:
        return
    for rank, step, *graphs in unlike(evidence.peers, lambda peer: peer.graphs):
        theirs, ours = (", ".join(ids or ()) or "nothing" for ids in graphs)
        yield Break(f"rank {rank} compiled {theirs}, rank 0 {ours}", None, step)


def as_alone(evidence: Evidence) -> Broken:
    """Being data-parallel costs no graph."""
    if evidence.alone is None or not evidence.got.graphs or evidence.option.more_graphs:
        return
    for step, (got, alone) in enumerate(zip(evidence.got.graphs_after, evidence.alone, strict=False)):
        if got != alone:
            yield Break(f"{got} graphs were compiled by then, of the model alone {alone}", None, step)
            return


def same_buckets(evidence: Evidence) -> Broken:
    """Ranks that disagree on buckets add up what does not belong together."""
    for rank, index, theirs, ours in unlike(evidence.peers, lambda peer: peer.buckets):
        yield Break(f"backward {index}: rank {rank} has buckets {theirs}, rank 0 {ours}")
