"""The claims on what a run sends: its buckets, its collectives, and what an engine promises of them.

Each is a small function that yields the places where it does not hold.
"""

from collections import Counter

from ddpopt.judge.rules.evidence import Break, Broken, RunEvidence, unlike_first
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.whole_step import WHOLE
from ddpopt.observation.events import Collective
from ddpopt.observation.launches import words_of


def same_buckets_on_ranks(evidence: RunEvidence) -> Broken:
    """Ranks that disagree on buckets would add up unrelated gradients."""
    for rank, index, theirs, ours in unlike_first(evidence.peers, lambda peer: peer.buckets):
        yield Break(f"backward {index}: rank {rank} has buckets {theirs}, rank 0 {ours}")


def reduced_once(evidence: RunEvidence) -> Broken:
    """Each bucket in one collective."""
    if not evidence.option.sends_as_usual:
        return
    for index, iteration in enumerate(evidence.got.iterations or ()):
        carried = [c.bucket for c in iteration.collectives if c.bucket is not None]
        expected = [bucket.index for bucket in iteration.buckets]
        if carried != expected:
            yield Break(
                f"backward {index}: buckets {carried} were reduced, expected {expected}: each once, in order"
            )


def no_others(evidence: RunEvidence) -> Broken:
    """Collectives that carry no bucket: the map of used parameters, and those of layers and hooks."""
    more = Counter(_bucketless(evidence.got)) - Counter(_bucketless(evidence.eager))
    if more and evidence.option.sends_as_usual and evidence.got.iterations is not None:
        words = ", ".join(f"{count} x {collective}" for collective, count in more.items())
        yield Break(f"sent {words} beyond what eager DDP sends, none of them a bucket")


def _bucketless(record: Record) -> list[str]:
    """Collectives without a bucket, except those of the reducer itself.

    The reducer sends the order and sizes of rebuilt buckets, and the map of used parameters.
    """
    layouts = [[len(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
    numbers = {number for counts in layouts for number in (sum(counts) + 1, len(counts))}
    rebuilt = [Collective("broadcast", 4 * number, "int32", None, "from rank 0") for number in numbers]
    rebuilt += [Collective("allreduce", 4 * sum(counts), "int32", None) for counts in layouts]
    rebuilding = {words_of(each) for each in rebuilt}
    own = [words_of(collective) for collective in record.collectives if collective.bucket is None]
    others = [f"{words_of(collective)} in another group" for collective in record.elsewhere]
    return [*(words for words in own if words not in rebuilding), *others]


def same_order(evidence: RunEvidence) -> Broken:
    """Collectives that ranks enter in different orders never end, or mix up their data."""
    if not evidence.option.sends_as_usual:
        return
    pairs = unlike_first(evidence.peers, lambda peer: (*peer.collectives, "nothing"))
    for rank, index, theirs, ours in pairs:
        yield Break(f"collective {index}: rank {rank} has {theirs}, rank 0 {ours}")


def synchronized(evidence: RunEvidence) -> Broken:
    """Gradients were reduced exactly where they should be: in one backward of each step."""
    if evidence.got.iterations is None or not evidence.option.sends_as_usual:
        return
    got = len(evidence.got.iterations)
    expected = len(evidence.got.steps)
    if got != expected:
        yield Break(f"{got} backwards were reduced in {expected} steps, expected one in each")


def planned(evidence: RunEvidence) -> Broken:
    """The reducer's buckets are the plan's; there are none if no gradient of a bucket is ever computed."""
    got = evidence.got
    if not got.planned or not got.iterations or not evidence.compiled or not got.graphs:
        return  # that nothing was compiled is a claim of its own
    if got.plan is None:
        if _trains(evidence):
            yield Break("ddpopt's plan is not in effect: DDP kept its own buckets")
        return
    planned = [bucket.params for bucket in got.plan.buckets]
    # under join() a step sends DDP's own buckets, which the reducer rebuilds after the first
    is_step = any(graph.startswith(WHOLE) for graph in got.graphs)
    rebuilds = is_step and not evidence.option.sends_as_usual
    for index, iteration in enumerate(got.iterations):
        if rebuilds and iteration is not got.iterations[-1]:
            continue
        seen = [bucket.params for bucket in iteration.buckets]
        if [frozenset(params) for params in seen] != [frozenset(params) for params in planned]:
            yield Break(f"backward {index}: the reducer has buckets {seen}, the plan {planned}")


def _trains(evidence: RunEvidence) -> bool:
    """Whether eager DDP computes any gradient that is sent."""
    buckets = (bucket for iteration in evidence.got.iterations or () for bucket in iteration.buckets)
    names = {name for bucket in buckets for name in bucket.params}
    return any(step.gradients.get(name) is not None for step in evidence.eager.steps for name in names)


def in_own_groups(evidence: RunEvidence) -> Broken:
    """What is sent in the default group reaches ranks that the engine was not given."""
    for words, count in Counter(evidence.got.foreign).items():
        yield Break(f"sent {count} x {words} in the default process group, but was given another one")


def without_gradients(evidence: RunEvidence) -> Broken:
    """An evaluation may run on one rank alone, so it sends only what DDP does: its buffers."""
    if evidence.mode.is_sharded or not evidence.option.sends_as_usual:
        return
    for _, got, eager in evidence.got.beside(evidence.eager):
        kinds = {words.partition(" ")[0] for words in eager.sent}
        more = [words for words in got.sent if words.partition(" ")[0] not in kinds]
        if more:
            yield Break(f"sent {_listed(tuple(more))}, which eager DDP does not send", None, eager.moment)


def promised(evidence: RunEvidence) -> Broken:
    """The engine sends as many collectives of each kind as it says."""
    promise = evidence.got.promised
    if promise is None or not evidence.option.sends_as_usual:
        return
    for step, sent in enumerate(evidence.got.sent):
        counts = Counter(words.partition(" ")[0] for words in sent)
        if counts != Counter(promise):
            yield Break(f"sent {dict(counts)}, the engine promises {dict(promise)}", None, f"step {step}")


def as_uncompiled(evidence: RunEvidence) -> Broken:
    """Compiling neither adds, removes nor reorders collectives, where the engine promises that."""
    if evidence.uncompiled is None:
        return
    if len(evidence.uncompiled) != len(evidence.got.sent):
        yield Break("without compiling the run fails, so there is nothing to compare with")
    for step, (got, eager) in enumerate(zip(evidence.got.sent, evidence.uncompiled, strict=False)):
        if got != eager:
            yield Break(f"sent {_listed(got)}; without compiling {_listed(eager)}", None, f"step {step}")


def _listed(sent: tuple[str, ...]) -> str:
    return ", ".join(sent) or "nothing"
