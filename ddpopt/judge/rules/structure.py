"""L3, the structure: everything that must hold in a run before its numbers mean anything.

A table of claims, each one sentence and one small function, about this rank's records and every rank's
summary, which holds no tensors. All claims are checked, and all findings are kept. Invariant: nothing here
judges how close two numbers are; None where the other side has a tensor is a finding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpopt.judge.rules import collectives
from ddpopt.judge.rules.evidence import Break, Broken, Peer, RunEvidence, unlike_first
from ddpopt.judge.training.record import FINAL, RecordedStep, in_sight, is_rounded, plain, seen
from ddpopt.judge.training.values import form_of
from ddpopt.judge.training.visible import GRADIENT_OF, MOVED, REMADE, is_of_last_step
from ddpopt.judge.training.whole_step import WHOLE
from ddpopt.judge.verdict import Finding

MISSING = "missing"
UNTRAINED = "that of no trained parameter"


def structure(evidence: RunEvidence, rank: int) -> list[Finding]:
    """Check every claim.

    Args:
        evidence: the evidence of the run.
        rank: rank of this process, for the findings.

    Returns:
        A finding for every violation.
    """
    return [
        Finding("L3", claim, _with_moment(one), rank=rank, step=one.step, parameter=one.parameter)
        for claim, holds in CLAIMS
        for one in holds(evidence)
    ]


def _with_moment(one: Break) -> str:
    if one.moment is None:
        return one.message
    extra = "" if one.step is not None else "extra step: "
    return f"{extra}{one.moment}: {one.message}"


# ------------------------------------------------------------------------------------- what each rank has


def _steps(evidence: RunEvidence) -> Broken:
    got = len(evidence.got.steps)
    expected = len(evidence.eager.steps)
    if got != expected:
        yield Break(f"took {got} steps, eager DDP took {expected}")


def _gradients(evidence: RunEvidence, *, missing: bool) -> Broken:
    """Gradients that exist on one side only, or that differ in form."""
    strides = evidence.mode.gives == "module"
    for moment, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(got.gradients, eager.gradients, strides=strides, absent=UNTRAINED):
            if missing == (not {MISSING, UNTRAINED}.isdisjoint((has, wants))):
                yield Break(f"the gradient of {name} is {has}, in eager DDP {wants}", name, moment)


def _others(evidence: RunEvidence) -> Broken:
    """Parameters and buffers: their form, and the values of integers, which do not round."""
    for moment, (got, eager) in _moments(evidence):
        # an engine may keep buffers of its own on the model
        state = {name: tensor for name, tensor in got.state.items() if name in eager.state}
        unlike = {name: (has, wants) for name, has, wants in _unlike(state, eager.state)}
        for name, (has, wants) in unlike.items():
            yield Break(f"{name} is {has}, in eager DDP {wants}", name, moment)
        has_buffers = evidence.mode.broadcasts_buffers or evidence.rank == 0  # only DDP broadcasts them
        for name, integers in eager.state.items() if has_buffers else ():
            if name not in unlike and not is_rounded(integers) and not torch.equal(got.state[name], integers):
                yield Break(f"{name} holds different integers than in eager DDP", name, moment)


def _random(evidence: RunEvidence) -> Broken:
    for moment, (got, eager) in _moments(evidence):
        if not torch.equal(got.random, eager.random):
            yield Break("the random generator is in a different state than after eager's step", None, moment)


def _seen(evidence: RunEvidence) -> Broken:
    """Other things a script can see: the form of each tensor; types, None and counts exactly."""
    # of a process: where an option resumes, new processes take the second step
    first_steps = ("step 0", "step 1") if evidence.option.resumes else ("step 0",)
    for moment, (got, eager) in _moments(evidence):
        for name, has, wants in _unlike(seen(got), seen(eager)):
            if name.endswith(MOVED) and evidence.mode.moves_parameters:
                continue
            if name.endswith(REMADE) and evidence.mode.moves_parameters and moment in first_steps:
                continue  # FSDP adds its hooks when it first sees the inputs
            if in_sight(name, eager):
                message = f"{name} is {has}, in eager DDP {wants}"
                yield Break(message, plain(name) if name.startswith(FINAL) else None, moment)


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
    for moment, (got, eager) in _moments(evidence):
        if got.sharing is None or eager.sharing is None:
            continue
        for one, other in sorted(got.sharing - eager.sharing - lasting):
            if not in_sight(one, eager) or not in_sight(other, eager):
                continue
            yield Break(f"{one} and {other} share memory; in eager DDP they do not", None, moment)
        for one, other in sorted(eager.sharing - got.sharing):
            if not any(GRADIENT_OF in name or is_of_last_step(name) for name in (one, other)):
                yield Break(f"{one} and {other} share no memory; in eager DDP they do", None, moment)
        for name in sorted(set(got.written) - rewritten):
            yield Break(f"writes to the {name} of the previous step; in eager DDP it does not", None, moment)


def _moments(evidence: RunEvidence) -> Iterator[tuple[str, tuple[RecordedStep, RecordedStep]]]:
    return ((eager.moment, (got, eager)) for _, got, eager in evidence.got.beside(evidence.eager))


def _growth(evidence: RunEvidence) -> Broken:
    """A step that keeps tensors ends a long training."""
    got = evidence.got.growth
    eager = evidence.eager.growth
    if got is not None and eager is not None and got > eager:
        yield Break(f"each further step keeps {got} bytes of tensors, in eager DDP {eager}")


def _agreement(evidence: RunEvidence) -> Broken:
    allowed = _unequal(evidence.eager_peers)
    eager = evidence.eager.steps[0]
    for (step, name), rank in _unequal(evidence.peers).items():
        is_broadcast = evidence.mode.broadcasts_buffers or name in eager.gradients
        if is_broadcast and name in eager.state and (step, name) not in allowed:  # not an engine's own buffer
            message = f"{name} differs between ranks 0 and {rank} after the step; it does not under eager DDP"
            yield Break(message, name, f"step {step}")


def _unequal(peers: Sequence[Peer]) -> dict[tuple[int, str], int]:
    """What differs from the first rank after a step, and the first rank where it does."""
    ranks: dict[tuple[int, str], int] = {}
    for peer in peers:
        for step, (state, first) in enumerate(zip(peer.states, peers[0].states, strict=False)):
            for name, digest in first.items():
                if state.get(name) != digest:
                    ranks.setdefault((step, name), peer.rank)
    return ranks


# -------------------------------------------------------------------------------------- what was compiled


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
    for rank, step, *graphs in unlike_first(evidence.peers, lambda peer: peer.graphs):
        theirs, ours = (", ".join(ids) or "nothing" for ids in graphs)
        yield Break(f"rank {rank} compiled {theirs}, rank 0 {ours}", None, f"step {step}")


def _as_alone(evidence: RunEvidence) -> Broken:
    """Data parallelism adds no graph; that of a whole step depends on more than the model."""
    if evidence.alone is None or not evidence.got.graphs or evidence.option.more_graphs:
        return
    if any(each.startswith(WHOLE) for each in evidence.got.graphs):
        return
    for step, (got, alone) in enumerate(zip(evidence.got.graphs_after, evidence.alone, strict=False)):
        if got != alone:
            message = f"{got} graphs were compiled by then, for the model alone {alone}"
            yield Break(message, None, f"step {step}")
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
    ("no more memory kept by each step than in eager DDP", _growth),
    ("parameters and buffers equal on all ranks where they are in eager DDP", _agreement),
    ("the same buckets on every rank", collectives.same_buckets_on_ranks),
    ("every bucket reduced exactly once, in order", collectives.reduced_once),
    ("no collectives except buckets and those that eager DDP sends", collectives.no_others),
    ("the same collectives on every rank, in the same order", collectives.same_order),
    ("as many synchronized backwards as requested, and none under no_sync", collectives.synchronized),
    ("the reducer follows the plan", collectives.planned),
    ("the collectives that the engine promises", collectives.promised),
    ("collectives only in process groups that the engine was given or made", collectives.in_own_groups),
    ("no collectives without gradients except those that eager DDP sends", collectives.without_gradients),
    ("the same collectives as uncompiled, in the same order", collectives.as_uncompiled),
    ("something was compiled", _compiled),
    ("the same graphs on every rank, step by step", _same_graphs),
    ("as many graphs as for the model alone", _as_alone),
)
