"""Decide buckets and cuts: (GraphFacts, BucketConfig) -> Plan.

The body of a graph consists of *atoms*, the runs of nodes between two positions where a cut is possible.
All gradients that complete within one atom leave its backward together, so their order is free: smaller ones
come first, so that DDP's rule closes a bucket on the last of them wherever sizes allow. A bucket that closes
within an atom requires a cut right before that atom; the atom's other open gradients are then closed with it.
So each bucket is complete once the backward of a single segment has run, as early as in eager, and the next
bucket starts empty.

Planning is pure: it runs nothing, and depends only on its inputs.

Source of the bucket rule: `ddpopt.planning.bucket_rule`.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpopt.planning.bucket_rule import closing_reason
from ddpopt.planning.facts import GraphFacts, ParamUse, has_multiple_weights
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket, Cut, Plan, Policy, Segment, cut_reason

Key = tuple[str, str]
"""(dtype, device), which all gradients in a bucket share."""


def plan_graph(facts: GraphFacts, config: BucketConfig) -> Plan:
    """Plan one graph that is cut: buckets over the parameters that it reads, and cuts where they complete.

    Args:
        facts: what the graph reads, and where it can be cut.
        config: DDP's bucket limits, in bytes.

    Returns:
        A plan in which every bucket completes within one segment (policy ``"plan"``).
    """
    dense = (use.spec for use in facts.params if not use.spec.sparse)
    filler = _Filler(config.rebuilt_limits, Counter((spec.dtype, spec.device) for spec in dense))
    atoms = _atoms(facts)
    atom_of = {use.spec.name: atoms[_place(atoms, use.completes_at)] for use in facts.params}
    ready = sorted(facts.params, key=lambda use: (-use.completes_at, use.spec.nbytes))  # latest atom first
    for start, uses in itertools.groupby(ready, key=lambda use: atom_of[use.spec.name]):
        filler.fill(start, [*uses], cut_follows=start > atom_of[ready[-1].spec.name])
    return _assemble(facts, filler.finish(), "plan")


def plan_whole(facts: GraphFacts, buckets: Sequence[Bucket] = ()) -> Plan:
    """Plan one graph that stays whole, for buckets that were decided for all graphs together.

    Args:
        facts: what the graph reads.
        buckets: in reduction order; parameters that this graph does not read are left out.

    Returns:
        A plan of one segment (policy ``"plan"``).
    """
    read = _read(facts, [bucket.params for bucket in buckets])
    drafts = [_Draft(uses, 0, bucket.reason) for uses, bucket in zip(read, buckets, strict=True) if uses]
    return _assemble(facts, drafts, "plan")


def plan_for_buckets(facts: GraphFacts, buckets: Sequence[Sequence[str]], *, whole: bool = False) -> Plan:
    """Plan one graph for the reducer's own buckets: it is cut where they become complete.

    Args:
        facts: what the graph reads, and where it can be cut.
        buckets: the parameters of each of the reducer's buckets, in reduction order; those that this graph
            does not read are left out of the plan.
        whole: whether the graph stays whole.

    Returns:
        A plan in which a bucket may wait on several segments, because the order is fixed (policy ``"ddp"``).
    """
    atoms = _atoms(facts)
    drafts: list[_Draft] = []
    launch = 0 if whole else len(facts.nodes)
    for uses in filter(None, _read(facts, buckets)):
        last = min(uses, key=lambda use: use.completes_at)
        # the reducer launches complete buckets strictly in list order
        launch = min(launch, atoms[_place(atoms, last.completes_at)])
        drafts.append(_Draft(uses, launch, f"the reducer's own bucket; {last.spec.name} completes it"))
    return _assemble(facts, drafts, "ddp")


def _read(facts: GraphFacts, buckets: Sequence[Sequence[str]]) -> list[list[ParamUse]]:
    """The parameters of each bucket that a graph reads."""
    uses = {use.spec.name: use for use in facts.params}
    return [[uses[name] for name in bucket if name in uses] for bucket in buckets]


@dataclass
class _Draft:
    """A bucket being filled: its members so far, the atom that closes it, and why."""

    members: list[ParamUse] = field(default_factory=list)
    start: int = 0
    reason: str = ""
    nbytes: int = 0

    def add(self, use: ParamUse) -> None:
        self.members.append(use)
        self.nbytes += use.spec.nbytes  # counted here: a bucket may have any number of members


class _Filler:
    """DDP's bucket rule, run atom by atom.

    Each (dtype, device) has its own open bucket and its own position in the list of limits.
    """

    def __init__(self, limits: Sequence[int], expected: Mapping[Key, int]) -> None:
        self._limits = limits
        self._missing = dict(expected)
        self._used: Counter[Key] = Counter()
        self._open: dict[Key, _Draft] = {}
        self._closed: list[_Draft] = []

    def fill(self, start: int, uses: Sequence[ParamUse], *, cut_follows: bool) -> None:
        """Add the gradients that complete in one atom.

        Args:
            start: body position where the segment that completes the buckets closed here starts.
            uses: the atom's gradients, in the order of filling.
            cut_follows: whether the graph may be cut between this atom and the next one to fill.
        """
        before = len(self._closed)
        last_closed: dict[Key, _Draft] = {}
        for use in uses:
            key = use.spec.dtype, use.spec.device
            if use.spec.sparse:
                self._closed.append(_Draft([use], start, closing_reason([use.spec], 0)))
                continue
            draft = self._open.setdefault(key, _Draft())
            draft.add(use)
            self._missing[key] -= 1
            full = draft.nbytes >= self._limit(key)
            if full:
                last_closed[key] = draft
            if full or self._missing[key] == 0:  # nothing can fill it: it need not wait for backward to end
                self._close(key, start)
        if cut_follows and len(self._closed) > before:
            self._settle(start, last_closed)

    def finish(self) -> list[_Draft]:
        """Close the open buckets; return all buckets, in the order in which they were closed."""
        for key in [*self._open]:
            self._close(key, 0)
        return self._closed

    def _settle(self, start: int, last_closed: Mapping[Key, _Draft]) -> None:
        """Leave no bucket open across the cut before this atom."""
        for key in [*self._open]:
            if key in last_closed:  # the open gradients are left over from this same atom
                last_closed[key].members += self._open.pop(key).members
            else:
                self._close(key, start, "another bucket ends at this cut; none may wait on two segments")

    def _close(self, key: Key, start: int, why: str = "") -> None:
        draft = self._open.pop(key)
        draft.start = start
        draft.reason = why or closing_reason([use.spec for use in draft.members], self._limit(key))
        self._closed.append(draft)
        self._used[key] += 1

    def _limit(self, key: Key) -> int:
        return self._limits[min(self._used[key], len(self._limits) - 1)]


def _atoms(facts: GraphFacts) -> list[int]:
    """Body positions where an atom starts, ascending; the first is 0."""
    return [0, *(p for p, why in enumerate(facts.blocked) if why is None and p > 0)]


def _place(starts: Sequence[int], position: int) -> int:
    """The index of the piece that a body position falls into, given the pieces' ascending `starts`."""
    return bisect.bisect_right(starts, position) - 1


def _assemble(facts: GraphFacts, drafts: Sequence[_Draft], policy: Policy) -> Plan:
    """Number buckets and segments, and record the cuts."""
    last = min((use.completes_at for use in facts.params), default=0)
    reasons: dict[int, str] = {}
    for index, draft in enumerate(drafts):
        if draft.start > last:  # with no gradient left to wait for, a cut would be useless
            reasons.setdefault(draft.start, cut_reason(index, draft.reason))
    starts = [0, *sorted(reasons)]
    params: list[list[str]] = [[] for _ in starts]
    for use in facts.params:
        params[_place(starts, use.completes_at)].append(use.spec.name)
    completed: list[list[int]] = [[] for _ in starts]
    buckets: list[Bucket] = []
    for index, draft in enumerate(drafts):
        segment = _place(starts, draft.start)
        completed[segment].append(index)
        buckets.append(Bucket.of(index, [use.spec for use in draft.members], segment, draft.reason))
    pairs = itertools.pairwise([*starts, len(facts.nodes)])
    segments = tuple(
        Segment(index, 0, facts.nodes[start:end], tuple(params[index]), tuple(completed[index]))
        for index, (start, end) in enumerate(pairs)
    )
    cuts = tuple(Cut(0, facts.nodes[start], reasons[start]) for start in starts[1:])
    return Plan(tuple(buckets), segments, cuts, policy=policy)


def calls_where_buckets_end(facts: GraphFacts, plan: Plan) -> frozenset[str]:
    """Names of the nodes at which a bucket ends and the gradients of at least two weights complete."""
    position = {use.spec.name: use.completes_at for use in facts.params}
    sizes: dict[int, list[int]] = {}
    for use in facts.params:
        sizes.setdefault(use.completes_at, []).append(use.spec.nbytes)
    read = [[position[name] for name in bucket.params if name in position] for bucket in plan.buckets]
    ends = {min(positions) for positions in read if positions}
    return frozenset(facts.nodes[end] for end in ends if has_multiple_weights(sizes[end]))
