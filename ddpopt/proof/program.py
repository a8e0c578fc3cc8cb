"""Invariants of the program: the stitched module computes what the original computes.

Each one is stated in one sentence, and yields a sentence for each violation, with segment and node.

Invariant: each check visits every step once, so that a graph of 50,000 nodes is checked in seconds.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from ddpopt.graph.nodes import MISSING, SYMBOLIC, example_value
from ddpopt.proof.evidence import Evidence
from ddpopt.proof.memory import steps_taken_twice
from ddpopt.proof.steps import ProgramState, ProgramStep, at
from ddpopt.proof.terms import Group, Made, Term, differences, show, without_copies


def inputs_are_kept(evidence: Evidence) -> Iterator[str]:
    """The stitched module takes the original's inputs, in their order, with their defaults."""
    expected = [(node.name, *node.args) for node in evidence.original.program.inputs]
    found = [(node.name, *node.args) for node in evidence.stitched.inputs]
    if expected != found:
        yield f"expected {_listed(expected)}, found {_listed(found)}"


def nodes_run_once(evidence: Evidence) -> Iterator[str]:
    """Each node of the original's body is in one segment; only views and symbols may be repeated."""
    homes = {step.name: step.segment for step in evidence.stitched.steps}
    for name in evidence.original.steps:
        if name not in homes:
            yield f"node {name} is in no segment"
    for step in steps_taken_twice(evidence):
        yield f"node {step.name} is in segment {homes[step.name]} and again in segment {step.segment}"


def nothing_is_added(evidence: Evidence) -> Iterator[str]:
    """Nothing runs except the original's nodes and the nodes that a cut needs."""
    yield from evidence.stitched.strays


def order_is_kept(evidence: Evidence) -> Iterator[str]:
    """The segments, one after the other, run the original's nodes in the original's order."""
    place = {name: index for index, name in enumerate(evidence.original.steps)}
    for before, step in itertools.pairwise(evidence.stitched.steps):
        if place[step.name] < place[before.name]:
            yield f"{at(step)}: runs after {before.name}, which the original runs later"


def values_are_defined(evidence: Evidence) -> Iterator[str]:
    """Each value is defined before it is read, and each segment gets as many inputs as it takes."""
    yield from evidence.stitched.undefined


def outputs_are_equal(evidence: Evidence) -> Iterator[str]:
    """The stitched module returns the original's values, or detached copies, in the original's structure."""
    expected = evidence.original.program.result
    found = without_copies(evidence.stitched.result)
    yield from differences(expected, found, "output", evidence.original.example)


def steps_are_equal(evidence: Evidence) -> Iterator[str]:
    """Each node calls what it calls in the original, on the same values and literals."""
    for step in (*evidence.stitched.steps, *evidence.stitched.repeats):
        expected = evidence.original.steps[step.name]
        if not _same_callee(expected, step):
            yield f"{at(step)}: expected {_called(expected)}, found {_called(step)}"
        pairs = (
            ("args", Group(tuple, expected.args), Group(tuple, step.args)),
            ("kwargs", _by_key(expected.kwargs), _by_key(step.kwargs)),
        )
        for path, before, after in pairs:
            for clause in differences(before, after, path, evidence.original.example):
                yield f"{at(step)}: {clause}"


def metadata_is_kept(evidence: Evidence) -> Iterator[str]:
    """Nodes and inputs keep their metadata from tracing: stack traces, policies, example values, sources."""
    nodes = evidence.original.nodes
    for step in (*evidence.stitched.steps, *evidence.stitched.repeats):
        yield from _lost_metadata(nodes[step.name], step.node, at(step))
    for node in evidence.stitched.inputs:
        if node.name in nodes:
            yield from _lost_metadata(nodes[node.name], node, f"input {node.name}")
            yield from _lost_source(nodes[node.name], node, f"input {node.name}")
    for crossing in evidence.stitched.crossings:
        if isinstance(crossing.term, Made):
            yield from _lost_source(nodes[crossing.term.name], crossing.node, str(crossing))
        example = evidence.original.example(crossing.term)
        if example is not MISSING and example_value(crossing.node) is not example:
            yield f"{crossing}: its example value is not that of {show(crossing.term)}"


def states_are_equal(evidence: Evidence) -> Iterator[str]:
    """Each node runs under the same autocast spans and grad mode as in the original."""
    for step in evidence.stitched.steps:
        expected = evidence.original.steps[step.name].state
        if step.state != expected:
            yield f"{at(step)}: expected {expected}, found {step.state}"
    for step in evidence.stitched.repeats:
        if isinstance(evidence.original.example(evidence.original.terms[step.name]), SYMBOLIC):
            continue  # a number has no gradient
        if step.state.grad_mode != evidence.original.steps[step.name].state.grad_mode:
            yield f"{at(step)}: taken again with grad mode {'on' if step.state.grad_mode else 'off'}"


def segments_are_balanced(evidence: Evidence) -> Iterator[str]:
    """Each segment restores autocast and grad mode; the last one leaves them as the original does."""
    ends = evidence.stitched.ends
    (final,) = evidence.original.program.ends.values()
    for segment, found in ends.items():
        expected = final if segment == max(ends) else ProgramState()
        if found != expected:
            yield f"segment {segment}: expected {expected} after it, found {found}"


def symbols_are_bound(evidence: Evidence) -> Iterator[str]:
    """Each symbol in the shape of a segment's input is itself an input, or a dimension of one."""
    inputs: dict[int, list[tuple[str, object]]] = {}
    for crossing in evidence.stitched.crossings:
        inputs.setdefault(crossing.segment, []).append((crossing.node.name, example_value(crossing.node)))
    for segment, pairs in inputs.items():
        bound = {symbol for _, value in pairs for symbol, binds in _symbols(value) if binds}
        for name, value in pairs:
            for symbol in dict.fromkeys(symbol for symbol, _ in _symbols(value) if symbol not in bound):
                yield f"segment {segment}, input {name}: no input binds the symbol {symbol}"


# --- helpers -------------------------------------------------------------------------------------


def _listed(inputs: Sequence[tuple[object, ...]]) -> str:
    return ", ".join(" = ".join(map(str, row)) for row in inputs) or "none"


def _by_key(kwargs: Mapping[str, Term]) -> Group:
    keys = sorted(kwargs)
    return Group(dict, tuple(kwargs[key] for key in keys), tuple(keys))


def _same_callee(expected: ProgramStep, found: ProgramStep) -> bool:
    callee = expected.callee
    other = found.callee
    same_kind = expected.node.op == found.node.op and type(callee) is type(other)
    # a module is itself only, whatever its class calls equal
    return same_kind and (callee is other or (not isinstance(callee, torch.nn.Module) and callee == other))


def _called(step: ProgramStep) -> str:
    return f"{step.node.op} of {getattr(step.callee, '__name__', step.node.target)}"


def _lost_metadata(expected: fx.Node, found: fx.Node, where: str) -> Iterator[str]:
    for key, value in expected.meta.items():
        if key not in found.meta:
            yield f"{where}: meta[{key!r}] is lost"
        elif not _same_meta(value, found.meta[key]):
            yield f"{where}: meta[{key!r}] is another"


def _same_meta(expected: object, found: object) -> bool:
    """Whether plain data is equal, or other objects are identical (tensors have no plain equality)."""
    if expected is found:
        return True
    if type(expected) is not type(found):
        return False
    if isinstance(expected, (str, int, float, bytes)):
        return expected == found
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_same_meta(v, found[k]) for k, v in expected.items())
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(_same_meta, expected, found))
    return False


def _lost_source(expected: fx.Node, found: fx.Node, where: str) -> Iterator[str]:
    """Check an input's source, which Dynamo leaves as an attribute of its node for AOTAutograd."""
    source = getattr(expected, "_dynamo_source", None)
    if getattr(found, "_dynamo_source", None) is not source:
        yield f"{where}: its source is not that of {expected.name}"


def _symbols(value: object) -> Iterator[tuple[object, bool]]:
    """The symbols in a value, and for each whether the value binds it."""
    if isinstance(value, torch.Tensor):
        yield from ((symbol, bound) for size in value.shape for symbol, bound in _symbols(size))
        if value.layout is torch.strided:
            rest = (*value.stride(), value.storage_offset())
            yield from ((symbol, False) for size in rest for symbol, _ in _symbols(size))
    elif isinstance(value, SYMBOLIC):
        expression = getattr(value.node, "expr", None)  # the node of a nested int has none
        symbols = sorted(getattr(expression, "free_symbols", ()), key=str)
        yield from ((symbol, symbol == expression) for symbol in symbols)
