"""L3, the structure: all that must hold of a run before its numbers mean anything.

A table of claims, each one sentence and one small function. All are asked, and all findings are kept.
Invariant: nothing here looks at how close two numbers are; None against a tensor is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpopt.judge.judging import sent
from ddpopt.judge.judging.evidence import Break, Broken, Claim, Evidence, Peer
from ddpopt.judge.judging.numbers import FINAL, is_rounded, plain, seen
from ddpopt.judge.judging.record import Step, in_sight
from ddpopt.judge.verdict import Finding
from ddpopt.judge.visible import GRADIENT_OF, UNMOVED, form_of, is_of_last_step

MISSING, UNTRAINED = "missing", "that of no parameter that is trained"


def structure(evidence: Evidence, rank: int) -> list[Finding]:
    """Ask every claim.

    Args:
        evidence: what is known of the run.
        rank: of this process, for the findings.

    Returns:
        All that does not hold.
    """
    return [
        Finding("L3", claim, one.in_words, rank=rank, step=one.step, parameter=one.parameter)
        for claim, holds in CLAIMS
        for one in holds(evidence)
    ]


def _steps(evidence: Evidence) -> Broken:
    got, expected = len(evidence.got.steps), len(evidence.eager.steps)
    if got != expected:
        yield Break(f"took {got} steps, eager DDP took {expected}")


def _gradients(evidence: Evidence, *, missing: bool) -> Broken:
    """Gradients that are on one side only, or those of another form."""
    strides = evidence.mode.gives == "module"
    for step, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(got.gradients, eager.gradients, strides=strides, absent=UNTRAINED):
            if missing == (not {MISSING, UNTRAINED}.isdisjoint((has, wants))):
                yield Break(f"the gradient of {name} is {has}, in eager DDP {wants}", name, step)


def _others(evidence: Evidence) -> Broken:
    """Parameters and buffers: their form, and integers, which know no rounding."""
    for step, (got, eager) in _moments(evidence):
        unlike = {name: (has, wants) for name, has, wants in _unlike(got.state, eager.state)}
        for name, (has, wants) in unlike.items():
            yield Break(f"{name} is {has}, in eager DDP {wants}", name, step)
        for name, integers in eager.state.items() if evidence.mode.gives != "nothing" else ():
            # only DDP broadcasts buffers
            if name not in unlike and not is_rounded(integers) and not torch.equal(got.state[name], integers):
                yield Break(f"{name} holds other integers than in eager DDP", name, step)


def _random(evidence: Evidence) -> Broken:
    for step, (got, eager) in _moments(evidence):
        if not torch.equal(got.random, eager.random):
            yield Break("the random generator is in another state than after eager's step", None, step)


def _seen(evidence: Evidence) -> Broken:
    """What else a script can see: the form of each tensor; types, None and counts as they are."""
    for step, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(seen(got), seen(eager)):
            if wants != UNMOVED and in_sight(name, eager):
                message = f"{name} is {has}, in eager DDP {wants}"
                yield Break(message, plain(name) if name.startswith(FINAL) else None, step)


def _unlike(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], *, strides: bool = False, absent: object = None
) -> Iterator[tuple[str, str, str]]:
    """Yield each name under which two sides have something of another form, and those forms in words."""
    for name in sorted(mine.keys() | theirs.keys()):
        has, wants = (_words(side.get(name, absent), strides) for side in (mine, theirs))
        if has != wants:
            yield name, has, wants


def _words(value: Any, strides: bool) -> str:
    if value is None:
        return MISSING
    return form_of(value, strides) if isinstance(value, Tensor) else str(value)


def _memory(evidence: Evidence) -> Broken:
    """Writing to one gradient must change no other, nor anything else that a script holds.

    What eager DDP shares with its last step counts in any step: gradients that are views of buckets do,
    except in the step in which DDP rebuilds its buckets.
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
            yield Break(f"writes to the {name} of the step before; in eager DDP it does not", None, step)


def _moments(evidence: Evidence) -> Iterator[tuple[int, tuple[Step, Step]]]:
    return enumerate(zip(evidence.got.moments, evidence.eager.moments, strict=False))


def _agreement(evidence: Evidence) -> Broken:
    allowed = _unequal(evidence.eager_peers)
    for (step, name), rank in _unequal(evidence.peers).items():
        is_broadcast = evidence.mode.gives != "nothing" or name in evidence.eager.steps[0].gradients
        if is_broadcast and (step, name) not in allowed:
            message = f"{name} differs between ranks 0 and {rank} after the step; it does not under eager DDP"
            yield Break(message, name, step)


def _unequal(peers: Sequence[Peer]) -> dict[tuple[int, str], int]:
    """What differs from the first rank's after a step, and on which rank first."""
    return {
        (step, name): peer.rank
        for peer in reversed(peers)
        for step, (state, first) in enumerate(zip(peer.states, peers[0].states, strict=False))
        for name, digest in first.items()
        if state.get(name) != digest
    }


CLAIMS: tuple[tuple[str, Claim], ...] = (
    ("as many steps as in eager DDP", _steps),
    ("a gradient wherever eager DDP has one", partial(_gradients, missing=True)),
    ("gradients of eager DDP's shape, dtype, strides and device", partial(_gradients, missing=False)),
    ("parameters and buffers of eager DDP's form, integers equal", _others),
    ("the random generator as after eager's step", _random),
    ("all that a script can see is of eager DDP's form, hooks run as often, and as early", _seen),
    (
        "tensors share memory where eager DDP's do and nowhere else, and none is written after its step",
        _memory,
    ),
    ("parameters and buffers equal on all ranks where they are in eager DDP", _agreement),
    ("the same buckets on every rank", sent.same_buckets),
    ("every bucket reduced exactly once, in order", sent.reduced_once),
    ("no collective but buckets and what eager DDP sends", sent.no_others),
    ("the same collectives on every rank, in the same order", sent.same_order),
    ("as many synchronised backwards as asked for, none under no_sync", sent.synchronised),
    ("the reducer follows the plan", sent.planned),
    ("something was compiled", sent.compiled),
    ("the same graphs on every rank, step by step", sent.same_graphs),
    ("as many graphs as of the model alone", sent.as_alone),
)
