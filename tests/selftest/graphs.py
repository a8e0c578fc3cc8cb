"""Faults in the partition: the stitched module is another program than the graph it was cut from."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from ddpopt.dynamo import backend
from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.selftest.sites import Inject, NotInjected, Site, first

Change = Callable[[fx.GraphModule], None]
"""Edits a stitched module in place."""
WRITES = ("mul_",)


def cutting(change: Change, *, certified: bool = True) -> Inject:
    """Edit what partition made, and perhaps have nobody prove it.

    The fault has run once the certificate was asked of the edited module; uncertified, once that module ran.
    """

    @contextlib.contextmanager
    def inject(site: Site) -> Iterator[None]:
        edited: list[fx.GraphModule] = []

        def changed(gm: fx.GraphModule, plan: Plan, *more: Any) -> fx.GraphModule:
            stitched = partition(gm, plan, *more)
            if stitched is not gm:
                change(stitched)
                stitched.recompile()
                edited.append(stitched)
                if not certified:
                    _mark_when_run(stitched, site)
            return stitched

        def proved(gm: fx.GraphModule, stitched: fx.GraphModule, *more: Any) -> None:
            if certified:
                if stitched in edited:
                    site.mark()
                certify(gm, stitched, *more)

        with patch.object(backend, "partition", changed), patch.object(backend, "certify", proved):
            yield

    return inject


def _mark_when_run(stitched: fx.GraphModule, site: Site) -> None:
    forward = stitched.forward

    def marking(*inputs: Any) -> Any:
        site.mark()
        return forward(*inputs)

    stitched.forward = marking  # of this module alone


def as_it_is(stitched: fx.GraphModule) -> None:
    """Change nothing: no fault, but the way that faults are put in."""
    del stitched


def _calls(stitched: fx.GraphModule) -> list[fx.Node]:
    calls = stitched.graph.find_nodes(op="call_module")
    calls.sort()
    if len(calls) < 2:
        raise NotInjected(f"expected two segments, got {len(calls)}; put the fault into another case")
    return list(calls)


def _crossing(stitched: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """A floating-point value that the second segment reads of the first, and the call that reads it."""
    reader = _calls(stitched)[1]
    return first(filter(_is_crossing, reader.all_input_nodes), "a value that crosses the first cut"), reader


def _is_crossing(source: fx.Node) -> bool:
    value = source.meta.get("example_value")
    return source.op != "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point()


def _through(stitched: fx.GraphModule, function: Callable[..., Any]) -> None:
    source, reader = _crossing(stitched)
    with stitched.graph.inserting_before(reader):
        changed = stitched.graph.call_function(function, (source,))
    changed.meta.update(source.meta)
    reader.replace_input_with(source, changed)


def skipped_segment(stitched: fx.GraphModule) -> None:
    """Give the second segment the input of the first, as if that had not run."""
    source, reader = _crossing(stitched)
    reader.replace_input_with(source, _given(_calls(stitched)[0]))


def _given(call: fx.Node) -> fx.Node:
    """What a segment reads beside parameters."""
    given = (
        node
        for node in call.all_input_nodes
        if "weight" not in node.name and "bias" not in node.name and _is_tensor(node)
    )
    return first(given, f"an input of {call.target} beside parameters")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def swapped_parameters(stitched: fx.GraphModule) -> None:
    """Have two segments use each other's weights."""
    former, latter = _calls(stitched)[:2]
    one, two = _weight(former), _weight(latter)
    former.replace_input_with(one, two)
    latter.replace_input_with(two, one)


def _weight(call: fx.Node) -> fx.Node:
    weights = (
        node
        for node in call.all_input_nodes
        if node.op in ("placeholder", "get_attr")
        and "weight" in node.name
        and _is_tensor(node)
        and node.meta["example_value"].dim() == 2
    )
    return first(weights, f"a weight that {call.target} reads")


def lost_contribution(stitched: fx.GraphModule) -> None:
    """Have the last segment that reads a tied weight send it no gradient."""
    calls = _calls(stitched)
    read_twice = (
        node for node in reversed(calls[-1].all_input_nodes) if len([c for c in calls if c in node.users]) > 1
    )
    shared = first(read_twice, "a weight that two segments read")
    with stitched.graph.inserting_before(calls[-1]):
        cut = stitched.graph.call_function(torch.Tensor.detach, (shared,))
    cut.meta.update(shared.meta)
    calls[-1].replace_input_with(shared, cut)


def detached_crossing(stitched: fx.GraphModule) -> None:
    """Have no gradient flow back through the first cut."""
    _through(stitched, torch.Tensor.detach)


def rounded_crossing(stitched: fx.GraphModule) -> None:
    """Have a value cross the first cut in half precision."""
    _through(stitched, _rounded)


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(value.dtype)


def _writing(stitched: fx.GraphModule) -> tuple[fx.Node, fx.GraphModule, fx.Node]:
    """A call, its segment that changes an activation in place, and the node that does."""
    return first(_writes(stitched), "a segment that changes an activation in place")


def _writes(stitched: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule, fx.Node]]:
    for call in _calls(stitched):
        segment: fx.GraphModule = getattr(stitched, str(call.target))
        for node in segment.graph.nodes:
            if node.target in WRITES:
                yield call, segment, node


def lost_mutation(stitched: fx.GraphModule) -> None:
    """Leave out an operation in place."""
    _, segment, node = _writing(stitched)
    node.replace_all_uses_with(node.all_input_nodes[0])
    segment.graph.erase_node(node)
    segment.recompile()


def late_mutation(stitched: fx.GraphModule) -> None:
    """Run an operation in place only when all else of its segment has run."""
    _, segment, node = _writing(stitched)
    node.replace_all_uses_with(node.all_input_nodes[0])
    segment.graph.output_node().prepend(node)
    segment.recompile()


def moved_mutation(stitched: fx.GraphModule) -> None:
    """Run an operation in place behind the next cut, after what has read its result in its own segment."""
    call, segment, node = _writing(stitched)
    view = first(node.all_input_nodes, "a view that is written to")
    base = first(view.all_input_nodes, "a tensor that is written to through a view")
    later = first((c for c in _calls(stitched) if c > call), "a segment behind the operation in place")
    _write_behind(getattr(stitched, str(later.target)), base, view, node)
    node.replace_all_uses_with(view)
    segment.graph.erase_node(node)
    segment.graph.erase_node(view)
    output = segment.graph.output_node()
    exported: Any = output.args[0]
    output.args = ((*exported, base),)
    segment.recompile()
    with stitched.graph.inserting_before(later):
        crossing = stitched.graph.call_function(operator.getitem, (call, len(exported)))
    crossing.meta["example_value"] = base.meta["example_value"]
    later.args = (*later.args, crossing)


def _write_behind(segment: fx.GraphModule, base: fx.Node, view: fx.Node, node: fx.Node) -> None:
    """Have a segment take a tensor and write to it before it does anything else."""
    inputs = segment.graph.find_nodes(op="placeholder")
    with segment.graph.inserting_after(inputs[-1]):
        given = segment.graph.placeholder(base.name)
    given.meta = {"example_value": base.meta["example_value"]}
    given._dynamo_source = None
    copies = {base: given}
    with segment.graph.inserting_after(given):
        copies[view] = segment.graph.node_copy(view, copies.__getitem__)
    with segment.graph.inserting_after(copies[view]):
        segment.graph.node_copy(node, copies.__getitem__)
    segment.recompile()


def repeated_mutation(stitched: fx.GraphModule) -> None:
    """Run an operation in place twice."""
    _, segment, node = _writing(stitched)
    with segment.graph.inserting_after(node):
        again = segment.graph.node_copy(node)
    again.meta.update(node.meta)
    segment.recompile()


def swapped_segments(stitched: fx.GraphModule) -> None:
    """Run the second segment first: on the first one's input, and the first one on what comes of it."""
    former, latter = _calls(stitched)[:2]
    crossing, _ = _crossing(stitched)
    given = _given(former)
    result = first(latter.users, "a result of the second segment")
    latter.replace_input_with(crossing, given)
    result.replace_all_uses_with(crossing)
    former.prepend(latter)
    former.prepend(result)
    former.replace_input_with(given, result)
