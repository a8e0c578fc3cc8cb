"""The evidence: both programs, the plan, and each parameter's reader, gathered once for all invariants.

Invariant: only the data classes of `ddpopt.planning.plan` are used, so that a bug in planning or cutting is
detected here instead of repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from ddpopt.graph.effects import detaches
from ddpopt.graph.nodes import requires_grad, storages_of, tensors_in
from ddpopt.planning.plan import Plan
from ddpopt.proof.recompose import read_original, recompose
from ddpopt.proof.steps import GraphSteps, Original, ProgramStep
from ddpopt.proof.terms import Held, Item, Made, Term, leaves


@dataclass(frozen=True)
class Evidence:
    """Everything that the invariants check.

    Attributes:
        plan: the plan that must be kept.
        original: the graph that was cut.
        stitched: the program that the stitched module computes.
        passing: the steps whose backward runs, by name.
        readers: for each parameter that gets a gradient, its earliest differentiable reader.
    """

    plan: Plan
    original: Original
    stitched: GraphSteps
    passing: Mapping[str, None]
    readers: Mapping[str, str]


class Invariant(NamedTuple):
    """One row of the certificate: a name, and a check that yields a sentence for each violation."""

    name: str
    check: Callable[[Evidence], Iterator[str]]


def gather(
    original: fx.GraphModule, stitched: fx.GraphModule, plan: Plan, names: Mapping[str, str]
) -> Evidence:
    """Read both graphs.

    Args:
        original: the graph that was cut.
        stitched: the module to check; `original` itself counts as one segment.
        plan: the plan that must be kept.
        names: the parameter that a node of `original` brings in, as for `ddpopt.proof.certificate.certify`.

    Returns:
        The evidence, in time linear in the nodes of both graphs.
    """
    homes = {segment.index: frozenset(segment.nodes) for segment in plan.segments}
    source = read_original(original)
    program = source.program if stitched is original else recompose(stitched, source, homes)
    passing = steps_passing_gradient(source)
    readers = earliest_readers(source, passing, names)
    return Evidence(plan, source, program, passing, readers)


def steps_passing_gradient(original: Original) -> dict[str, None]:
    """The steps whose backward runs, by name.

    Their result requires grad, in grad mode or as an argument that is returned unchanged, and it reaches an
    output through other such steps, or through a write that such a step, an output or the caller sees. Writes
    without grad pass no gradient. A value that is detached in place later counts as requiring grad before.
    """
    passing: dict[str, None] = {}
    handing_on: dict[str, None] = {}
    program = original.program
    outliving = [*(Made(node.name) for node in program.inputs), program.result]
    outliving.extend(term for term in original.terms.values() if isinstance(term, Held))
    seen = set(_storages(original, outliving))
    detached: set[Term] = set()
    for step in reversed(program.steps):
        term = original.terms[step.name]
        if detaches(step.node):
            detached.update(step.written)
            continue
        if not _is_trained(original, term, detached):
            continue
        users = step.node.users
        reaches = any(u.op == "output" or u.name in passing or u.name in handing_on for u in users)
        if not (step.state.grad_mode or given_back(original, step)):
            if reaches and term != Made(step.name):  # it returns a value that it writes to
                handing_on[step.name] = None
            continue
        if reaches or _writes_what_is_seen(original, step, seen, detached):
            passing[step.name] = None
            seen.update(_storages(original, step.given))
    return passing


def earliest_readers(
    original: Original, passing: Mapping[str, None], names: Mapping[str, str]
) -> dict[str, str]:
    """For each parameter, the first node in forward order whose backward contributes to its gradient.

    Args:
        original: the graph that reads the parameters.
        passing: its steps whose backward runs.
        names: the parameter that a node brings in, as for `ddpopt.proof.certificate.certify`.

    Returns:
        Node names by parameter name, without parameters that get no gradient.
    """
    sources: dict[Term, list[str]] = {}
    for label, param in names.items():
        sources.setdefault(original.terms.get(label.partition(".")[0]), []).append(param)
    readers: dict[str, str] = {}
    for step in original.program.steps:
        if step.name not in passing:
            continue
        for node in (*step.node.all_input_nodes, step.node):
            for param in sources.get(original.terms[node.name], ()):
                readers.setdefault(param, step.name)
    return readers


def given_back(original: Original, step: ProgramStep) -> dict[int, torch.Tensor]:
    """By identity, the tensors that a step takes and returns unchanged; none if it writes to any tensor."""
    known = {id(tensor) for leaf in step.given for tensor in tensors_in(original.example(leaf))}
    own = tensors_in(original.example(original.terms[step.name]))
    back = {id(tensor): tensor for tensor in own if id(tensor) in known}
    return {} if back and step.written else back


def _is_trained(original: Original, term: Term, detached: Set[Term]) -> bool:
    """Whether a value requires grad, at least until it is detached in place."""
    return requires_grad(original.example(term)) or term in detached


def _writes_what_is_seen(original: Original, step: ProgramStep, seen: Set[int], detached: Set[Term]) -> bool:
    """Whether a step writes to a value that requires grad and has a storage in `seen`, or no storage."""
    values = (value for value in step.written if isinstance(value, (Made, Item, Held)))
    owned = (set(_storages(original, [v])) for v in values if _is_trained(original, v, detached))
    return any(not own or not own.isdisjoint(seen) for own in owned)


def _storages(original: Original, terms: Iterable[Term]) -> Iterator[int]:
    """The storages behind terms; a sparse tensor, or a batch inside ``vmap``, has none."""
    for leaf in (leaf for term in terms for leaf in leaves(term)):
        yield from storages_of(original.example(leaf))
