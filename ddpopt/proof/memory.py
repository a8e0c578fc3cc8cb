"""Invariants of memory: which tensors are written, in which order, and which segments get detached values.

Storages are identified by the example values from tracing: views of one tensor share a storage.
"""

from collections.abc import Hashable, Iterator, Set

import torch
from torch._ops import HigherOrderOperator

from ddpopt.graph.effects import constructed_inputs, is_detached_view, is_known, name_of, redescribes
from ddpopt.graph.nodes import MISSING, SYMBOLIC, overlaps_itself, requires_grad, storages_of, tensors_in
from ddpopt.proof.evidence import Evidence, given_back
from ddpopt.proof.steps import Crossing, Original, ProgramStep, at
from ddpopt.proof.terms import Copy, Item, Made, Term, leaves, show


def writes_follow_reads_in_one_segment(evidence: Evidence) -> Iterator[str]:
    """Memory that is read, or has another name, before a write stays in one segment up to that write."""
    original = evidence.original
    names: dict[Hashable, Term] = {}
    first: dict[Hashable, ProgramStep] = {}
    reads: dict[Hashable, None] = {}
    written = any(step.written for step in evidence.stitched.steps)
    for step in evidence.stitched.steps if written else ():
        made, read = _made_and_read(original, step)
        sure = (leaf for node in constructed_inputs(step.node) for leaf in leaves(step.reads[node]))
        certain = {family: leaf for leaf in sure for family in _families(original, leaf)}
        for family in made | read:
            first.setdefault(family, step)
            if family not in read:
                names.setdefault(family, original.terms[step.name])
            elif family not in certain or names.setdefault(family, certain[family]) != certain[family]:
                reads[family] = None
        families = (family for leaf in step.written for family in _families(original, leaf))
        others = (first[family] for family in families if family in reads)
        for name, segment in {other.name: other.segment for other in others}.items():
            if segment != step.segment:
                yield f"{at(step)}: writes to memory that {name} makes or uses in segment {segment}"


def writers_know_one_name(evidence: Evidence) -> Iterator[str]:
    """A segment gets memory that it writes to by one name, except for names that the original gets itself."""
    # compiled code takes a view of what it writes to that comes in separately for another tensor
    original = evidence.original
    stitched = evidence.stitched
    writers: dict[tuple[int, Hashable], str] = {}
    for step in stitched.steps:
        for family in (f for value in step.written for f in _families(original, value)):
            writers.setdefault((step.segment, family), step.name)
    inputs = [Made(node.name) for node in original.program.inputs]
    given: dict[tuple[int, Hashable], Crossing] = {}
    for crossing in stitched.crossings:
        for place in ((crossing.segment, family) for family in _families(original, crossing.term)):
            first = given.setdefault(place, crossing)
            if place in writers and first is not crossing and {first.term, crossing.term} - {*inputs}:
                other = first.node.name
                yield f"{crossing}: is one tensor with input {other}, and {writers[place]} writes to it"


def detached_values_get_no_gradient(evidence: Evidence) -> Iterator[str]:
    """A segment gets a value detached, at its own call, only if it sends no gradient to it."""
    copied = [(crossing, crossing.copy) for crossing in evidence.stitched.crossings if crossing.copy]
    sending = _read_with_gradient(evidence) if copied else {}
    for crossing, copy in copied:
        if copy.before != crossing.segment:
            yield f"{crossing}: is a copy that was already made before segment {copy.before}"
        readers = [sending.get((crossing.segment, leaf)) for leaf in leaves(crossing.term)]
        yield from (f"{crossing}: is detached, but {name} sends gradient to it" for name in readers if name)


def views_without_gradient_stay(evidence: Evidence) -> Iterator[str]:
    """A view that passes no gradient gains none by leaving its segment, across a cut or as an output."""
    no_grad_views = _no_grad_views(evidence.original)
    if evidence.stitched is evidence.original.program:
        return
    for crossing in evidence.stitched.crossings:
        if crossing.copy is None and any(_maker(leaf) in no_grad_views for leaf in leaves(crossing.term)):
            yield f"{crossing}: is a view that was taken without gradient"
    for leaf in leaves(evidence.stitched.result):
        if _maker(leaf) in no_grad_views:
            yield f"output: {show(leaf)} is a view that was taken without gradient"
        elif isinstance(leaf, Copy):
            trained = requires_grad(evidence.original.example(leaf.of))
            handed_out = "detach().requires_grad_" if trained else "detach"
            if leaf.method != handed_out or _maker(leaf.of) not in no_grad_views:
                yield f"output: {show(leaf)} is a copy"


def gradients_of_their_own_stay(evidence: Evidence) -> Iterator[str]:
    """A value that shares another value's memory, but has its own gradient or hook, stays in its segment."""
    original = evidence.original
    stitched = evidence.stitched
    apart = _apart(original)
    parts = _written_parts(original)
    for crossing in stitched.crossings if apart or parts else ():
        own = any(_maker(leaf) in apart for leaf in leaves(crossing.term))
        if own or not parts.isdisjoint(_families(original, crossing.term)):
            yield f"{crossing}: shares another value's memory, but has its own gradient"
    for step in stitched.repeats if apart else ():
        if _maker(original.terms[step.name]) in apart:
            yield f"{at(step)}: takes a value again that has its own gradient"
    first: dict[Hashable, ProgramStep] = {}
    for step in stitched.steps if apart else ():
        made, read = _made_and_read(original, step)
        for family in made | read:
            first.setdefault(family, step)
        if name_of(step.callee) == "register_hook":
            earlier = {first[family].name: first[family].segment for family in read}
            for name, segment in earlier.items():
                if segment < step.segment:
                    yield f"{at(step)}: hooks a value that {name} makes or reads in segment {segment}"


def values_that_cross_get_their_gradient(evidence: Evidence) -> Iterator[str]:
    """A value that crosses a cut gets a gradient, if it requires grad, and no two of its elements are one."""
    original = evidence.original
    for crossing in (c for c in evidence.stitched.crossings if c.copy is None):
        for leaf in leaves(crossing.term):
            maker = _maker(leaf)
            example = original.example(leaf)
            step = original.steps.get(maker.name) if isinstance(maker, Made) else None
            if step is None:
                continue
            # without grad mode only an argument that is returned unchanged requires grad
            trained = step.state.grad_mode and requires_grad(example)
            if overlaps_itself(example):
                yield f"{crossing}: overlaps itself"
            elif trained and step.name not in evidence.passing:
                yield f"{crossing}: requires grad, but gets no gradient"


def values_cross_as_they_are_described(evidence: Evidence) -> Iterator[str]:
    """No value crosses a cut before an in-place reshape or detach, which its example value already shows."""
    first: dict[Term, Crossing] = {}
    opening = min(evidence.stitched.ends, default=0)  # inputs of the first segment cross no cut
    for crossing in (c for c in evidence.stitched.crossings if c.segment > opening):
        for leaf in leaves(crossing.term):
            first.setdefault(leaf, crossing)
    for step in evidence.stitched.steps:
        for leaf in step.written if redescribes(step.node) else ():
            if leaf in first and first[leaf].segment <= step.segment and isinstance(leaf, (Made, Item)):
                yield f"{first[leaf]}: is described as it is after {step.name}, which changes it in place"


def steps_taken_twice(evidence: Evidence) -> Iterator[ProgramStep]:
    """The steps that a segment repeats although they are neither views nor symbols.

    A view that is reshaped or detached in place must not be repeated either: that would undo the change.
    """
    if not evidence.stitched.repeats:
        return
    original = evidence.original
    watched = _written_families(evidence.original)
    steps = (step for step in original.program.steps if redescribes(step.node))
    redescribed = {leaf for step in steps for leaf in step.written}
    for step in evidence.stitched.repeats:
        taken = original.terms[step.name], *step.given
        if not redescribed.isdisjoint(taken) or not _may_repeat(original, step, watched):
            yield step


# --- helpers -------------------------------------------------------------------------------------


def _families(original: Original, term: Term) -> Iterator[Hashable]:
    """The identities of the storages behind a term; the term itself if it has no example value."""
    for leaf in leaves(term):
        example = original.example(leaf)
        if example is MISSING and isinstance(leaf, (Made, Item)):
            yield leaf
        elif isinstance(example, torch.nn.Module):
            yield id(example)
        for tensor in tensors_in(example):
            keys = storages_of(tensor)
            yield ("storage", *keys) if keys else id(tensor)


def _written_families(original: Original) -> set[Hashable]:
    """The storages that the steps write to."""
    written = (leaf for step in original.program.steps for leaf in step.written)
    return {family for leaf in written for family in _families(original, leaf)}


def _no_grad_views(original: Original) -> set[Term]:
    """Views of tensors that require grad, taken under ``no_grad``, and views of such views."""
    found: set[Term] = set()
    for step in original.program.steps:
        if step.state.grad_mode and not found:
            continue
        value = original.terms[step.name]
        back = given_back(original, step)
        new = (tensor for tensor in tensors_in(original.example(value)) if id(tensor) not in back)
        gives_no_gradient = not step.state.grad_mode and any(map(requires_grad, new))
        of_such_a_view = not found.isdisjoint(map(_maker, step.given))
        if (gives_no_gradient or of_such_a_view) and _is_view(original, step):
            found.add(_maker(value))
    return found


def _apart(original: Original) -> set[Term]:
    """Results of bodies, unknown functions and detach in the memory of their arguments, and their views."""
    found: set[Term] = set()
    for step in original.program.steps:
        value = original.terms[step.name]
        known = is_known(step.node) and not is_detached_view(step.node)
        own = isinstance(step.callee, HigherOrderOperator) or not known
        if not own and found.isdisjoint(map(_maker, step.given)):
            continue
        made, read = _made_and_read(original, step)
        repeated = len(made) < len([*_families(original, value)])
        if (repeated or not made.isdisjoint(read)) and requires_grad(original.example(value)):
            found.add(_maker(value))
    return found


def _written_parts(original: Original) -> set[Hashable]:
    """Memory of the parts that ``unsafe_split`` and similar operators make, if it is written to."""
    unsafe = (s for s in original.program.steps if name_of(s.callee).lstrip("_").startswith("unsafe_"))
    made = {family for step in unsafe for family in _made_and_read(original, step)[0]}
    return made & _written_families(original) if made else made


def _maker(term: Term) -> Term:
    """The value of the node that an item belongs to."""
    while isinstance(term, Item):
        term = term.base
    return term if isinstance(term, Made) else None


def _made_and_read(original: Original, step: ProgramStep) -> tuple[set[Hashable], set[Hashable]]:
    """The storages of a step's result, and those of its arguments."""
    made = set(_families(original, original.terms[step.name]))
    return made, {family for term in step.given for family in _families(original, term)}


def _is_view(original: Original, step: ProgramStep) -> bool:
    """Whether a step only returns memory of its arguments, and writes to nothing."""
    made, read = _made_and_read(original, step)
    return bool(made) and made <= read and not step.written


def _may_repeat(original: Original, step: ProgramStep, watched: Set[Hashable]) -> bool:
    """Whether a step may be repeated: a view of its arguments, or a symbol, that no write can change."""
    if step.written or step.node.op == "call_module" or isinstance(step.callee, HigherOrderOperator):
        return False
    made, read = _made_and_read(original, step)
    if made:
        return made <= read and (read - made).isdisjoint(watched)
    symbolic = isinstance(original.example(original.terms[step.name]), SYMBOLIC)
    return symbolic and read.isdisjoint(watched)


def _read_with_gradient(evidence: Evidence) -> dict[tuple[int, Term], str]:
    """For each segment and value: a step that sends gradient to the value, or that the segment returns it."""
    found: dict[tuple[int, Term], str] = {}
    for step in (*evidence.stitched.steps, *evidence.stitched.repeats):
        if step.name not in evidence.passing:
            continue
        back = None if step.state.grad_mode else given_back(evidence.original, step)
        for leaf in step.given:
            passes = back is None or any(id(t) in back for t in tensors_in(evidence.original.example(leaf)))
            if isinstance(leaf, (Made, Item)) and passes:
                found.setdefault((step.segment, leaf), step.name)
    for segment, result in evidence.stitched.returns.items():
        for leaf in leaves(result):
            if isinstance(leaf, (Made, Item)):
                found.setdefault((segment, leaf), "its return")
    return found
