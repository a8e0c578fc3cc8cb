"""L3, the structure: all that must hold of a run before its numbers mean anything.

A table of claims, each one sentence and one small function. All are asked, and all findings are kept.
Invariant: nothing here looks at how close two numbers are; None against a tensor is a finding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpopt.observe import Iteration
from ddpopt.verify.compare import raw_bytes
from ddpopt.verify.modes import Mode
from ddpopt.verify.options import Option
from ddpopt.verify.training import Record
from ddpopt.verify.verdict import Finding

Digests = tuple[dict[str, bytes], ...]
"""For each step, a digest of every parameter and buffer after it."""


@dataclass(frozen=True)
class Peer:
    """What one rank tells the others of its run.

    Attributes:
        rank: in the group that trains together.
        states: digests after each step.
        graphs: Dynamo's compile ids.
        buckets: names of the parameters of each bucket, at each synchronised backward.
    """

    rank: int
    states: Digests
    graphs: tuple[str, ...]
    buckets: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Attributes:
        mode: the mode under test.
        option: the option.
        compiled: whether anything was to be compiled.
        got: this rank's run in the mode.
        eager: this rank's run in eager DDP.
        peers: every rank's run in the mode, by rank in the group.
        eager_peers: the same for eager.
        alone: the graphs that Dynamo makes of the model alone, after each step; None if that is not known.
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


Claim = Callable[[Evidence], Iterator[tuple[str, str | None, int | None]]]
"""Yields a message, a parameter and a step for each finding."""


def peer_of(rank: int, record: Record) -> Peer:
    """Sum up a run for the other ranks."""
    return Peer(
        rank=rank,
        states=tuple({name: _digest(t) for name, t in step.state.items()} for step in record.steps),
        graphs=record.graphs,
        buckets=tuple(tuple(bucket.params for bucket in one.buckets) for one in record.iterations or ()),
    )


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).digest()


def structure(evidence: Evidence, rank: int) -> list[Finding]:
    """Ask every claim.

    Args:
        evidence: what is known of the run.
        rank: of this process, for the findings.

    Returns:
        All that does not hold.
    """
    return [
        Finding("L3", claim, message, rank=rank, step=step, parameter=parameter)
        for claim, holds in CLAIMS
        for message, parameter, step in holds(evidence)
    ]


def _steps(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    got, expected = len(evidence.got.steps), len(evidence.eager.steps)
    if got != expected:
        yield f"took {got} steps, eager DDP took {expected}", None, None


def _presence(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    for step, (got, eager) in enumerate(zip(evidence.got.steps, evidence.eager.steps, strict=False)):
        for name in sorted(got.gradients.keys() ^ eager.gradients.keys()):
            where = "the mode" if name in got.gradients else "eager DDP"
            yield f"only {where} trains {name}", name, step
        for name, expected in eager.gradients.items():
            present = got.gradients.get(name)
            if (present is None) != (expected is None):
                words = "is missing, eager DDP has one" if present is None else "is there, eager DDP has none"
                yield f"step {step}: the gradient of {name} {words}", name, step


def _form(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    with_strides = evidence.mode.gives == "module"
    for step, (got, eager) in enumerate(zip(evidence.got.steps, evidence.eager.steps, strict=False)):
        for name, expected in eager.gradients.items():
            tensor = got.gradients.get(name)
            if tensor is None or expected is None:
                continue
            has, wants = _form_of(tensor, with_strides), _form_of(expected, with_strides)
            if has != wants:
                yield f"step {step}: the gradient of {name} is {has}, in eager DDP {wants}", name, step


def _form_of(tensor: Tensor, with_strides: bool) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    strides = ""
    if with_strides and tensor.layout is torch.strided:
        # the stride of a dimension that has a single element means nothing
        used = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = f", strides {tuple(used)}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides} on {tensor.device}{layout}"


def _others(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    """What is no gradient: its form, and integers, which know no rounding."""
    for step, (got, eager) in enumerate(zip(evidence.got.steps, evidence.eager.steps, strict=False)):
        pairs: list[tuple[str, Tensor | None, Tensor]] = [("the loss", got.loss, eager.loss)]
        pairs += [(name, got.state.get(name), tensor) for name, tensor in eager.state.items()]
        for name, has, wants in pairs:
            if has is None or _form_of(has, False) != _form_of(wants, False):
                form = "missing" if has is None else _form_of(has, False)
                yield f"step {step}: {name} is {form}, in eager DDP {_form_of(wants, False)}", name, step
            elif _counts_exactly(evidence, wants) and not torch.equal(has, wants):
                yield f"step {step}: {name} holds other integers than in eager DDP", name, step


def _counts_exactly(evidence: Evidence, tensor: Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and evidence.mode.gives != "nothing"  # only DDP broadcasts buffers


def _random(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    for step, (got, eager) in enumerate(zip(evidence.got.steps, evidence.eager.steps, strict=False)):
        if not torch.equal(got.random, eager.random):
            yield f"step {step}: the random generator is in another state than after eager's step", None, step


def _counts(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    for step, (got, eager) in enumerate(zip(evidence.got.steps, evidence.eager.steps, strict=False)):
        for name in sorted(got.extras.keys() | eager.extras.keys()):
            has, wants = got.extras.get(name), eager.extras.get(name)
            if not isinstance(has, Tensor) and not isinstance(wants, Tensor) and has != wants:
                yield f"step {step}: {name}: {has!r}, in eager DDP {wants!r}", None, step


def _agreement(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    got, eager = _unequal(evidence.peers), _unequal(evidence.eager_peers)
    for step, names in enumerate(got):
        allowed = eager[step] if step < len(eager) else {}
        for name, ranks in names.items():
            if name in allowed:
                continue
            if evidence.mode.gives == "nothing" and not _trained(evidence, name):
                continue  # only DDP broadcasts buffers
            yield (
                f"step {step}: {name} differs between ranks 0 and {ranks[0]} after the step; "
                "it does not under eager DDP",
                name,
                step,
            )


def _trained(evidence: Evidence, name: str) -> bool:
    return bool(evidence.eager.steps) and name in evidence.eager.steps[0].gradients


def _unequal(peers: Sequence[Peer]) -> list[dict[str, list[int]]]:
    """For each step that all ranks took, what differs from the first rank's, and on which ranks."""
    steps = min((len(peer.states) for peer in peers), default=0)
    found: list[dict[str, list[int]]] = []
    for step in range(steps):
        first = peers[0].states[step]
        differing: dict[str, list[int]] = {}
        for peer in peers[1:]:
            for name, digest in first.items():
                if peer.states[step].get(name) != digest:
                    differing.setdefault(name, []).append(peer.rank)
        found.append(differing)
    return found


def _reduced_once(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    for index, iteration in enumerate(evidence.got.iterations or ()):
        carried = [c.bucket for c in iteration.collectives if c.bucket is not None]
        expected = [bucket.index for bucket in iteration.buckets]
        if carried != expected and not evidence.option.missing:
            yield (
                f"backward {index}: buckets {carried} were reduced, expected {expected}: each once, in order",
                _param_of(iteration, carried, expected),
                None,
            )


def _param_of(iteration: Iteration, carried: Sequence[int], expected: Sequence[int]) -> str | None:
    lost = [index for index in expected if carried.count(index) != 1]
    return iteration.buckets[lost[0]].params[0] if lost else None


def _synchronised(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    if evidence.option.syncs is None or evidence.got.iterations is None:
        return
    expected = evidence.option.syncs * len(evidence.got.steps)
    got = len(evidence.got.iterations)
    if got != expected:
        yield (
            f"{got} backwards were reduced in {len(evidence.got.steps)} steps, expected {expected}",
            None,
            None,
        )


def _planned(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    got = evidence.got
    if not got.planned or not got.iterations or not evidence.compiled:
        return
    if got.plan is None:
        yield "ddpopt's plan is not in force: DDP went on with buckets of its own", None, None
        return
    planned = [bucket.params for bucket in got.plan.buckets]
    for index, iteration in enumerate(got.iterations):
        seen = [bucket.params for bucket in iteration.buckets]
        if [frozenset(params) for params in seen] != [frozenset(params) for params in planned]:
            yield f"backward {index}: the reducer has buckets {seen}, the plan {planned}", None, None


def _compiled(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    if not evidence.compiled:
        return
    if not evidence.got.graphs:
        yield "nothing was compiled: Dynamo made no graph", None, None
    if evidence.mode.captures_backward and evidence.got.captures == 0:
        yield "compiled autograd captured no backward", None, None


def _same_graphs(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    if evidence.ranks_differ or not evidence.compiled:
        return
    first = evidence.peers[0].graphs
    for peer in evidence.peers[1:]:
        if len(peer.graphs) != len(first):
            yield (
                f"rank {peer.rank} compiled graphs {', '.join(peer.graphs) or 'none'}, "
                f"rank 0 {', '.join(first) or 'none'}",
                None,
                None,
            )


def _as_alone(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    if evidence.alone is None or not evidence.compiled or not evidence.mode.observable:
        return
    if evidence.option.more_graphs:
        return
    for step, (got, alone) in enumerate(zip(evidence.got.graphs_after, evidence.alone, strict=False)):
        if got != alone and evidence.got.graphs:
            yield (
                f"step {step}: {got} graphs were compiled by then, of the model alone {alone}",
                None,
                step,
            )
            return


def _same_buckets(evidence: Evidence) -> Iterator[tuple[str, str | None, int | None]]:
    first = evidence.peers[0].buckets
    for peer in evidence.peers[1:]:
        for index, (theirs, ours) in enumerate(zip(peer.buckets, first, strict=False)):
            if theirs != ours:
                yield f"backward {index}: rank {peer.rank} has buckets {theirs}, rank 0 {ours}", None, None
                break


CLAIMS: tuple[tuple[str, Claim], ...] = (
    ("as many steps as in eager DDP", _steps),
    ("a gradient wherever eager DDP has one", _presence),
    ("gradients of eager DDP's shape, dtype, strides and device", _form),
    ("loss, parameters and buffers of eager DDP's form, integers equal", _others),
    ("the random generator as after eager's step", _random),
    ("hooks run as often as in eager DDP", _counts),
    ("parameters and buffers equal on all ranks where they are in eager DDP", _agreement),
    ("the same buckets on every rank", _same_buckets),
    ("every bucket reduced exactly once, in order", _reduced_once),
    ("as many synchronised backwards as asked for, none under no_sync", _synchronised),
    ("the reducer follows the plan", _planned),
    ("something was compiled", _compiled),
    ("as many graphs on every rank", _same_graphs),
    ("as many graphs as of the model alone", _as_alone),
)
