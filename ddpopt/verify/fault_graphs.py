"""Faults in the partition: the stitched module is another program than the graph it was cut from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from ddpopt import backend
from ddpopt.partition import partition
from ddpopt.plan import Plan
from ddpopt.verify.fault_sites import Inject

Change = Callable[[fx.GraphModule], None]
"""Edits a stitched module in place."""
WRITES = ("mul_",)


def cutting(change: Change, *, certified: bool = True) -> Inject:
    """Edit what partition made, and perhaps have nobody prove it."""

    @contextlib.contextmanager
    def inject(rank: int) -> Iterator[None]:
        del rank

        def changed(gm: fx.GraphModule, plan: Plan, *more: Any) -> fx.GraphModule:
            stitched = partition(gm, plan, *more)
            if stitched is not gm:
                change(stitched)
                stitched.recompile()
            return stitched

        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(backend, "partition", changed))
            if not certified:
                stack.enter_context(patch.object(backend, "certify", lambda *_: None))
            yield

    return inject


def _calls(stitched: fx.GraphModule) -> list[fx.Node]:
    calls = stitched.graph.find_nodes(op="call_module")
    calls.sort()
    return list(calls)


def _crossing(stitched: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """A floating-point value that the second segment reads of the first, and the call that reads it."""
    reader = _calls(stitched)[1]
    for source in reader.all_input_nodes:
        value = source.meta.get("example_value")
        if source.op != "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point():
            return source, reader
    raise RuntimeError("no value crosses the first cut")


def _through(stitched: fx.GraphModule, function: Callable[..., Any]) -> None:
    source, reader = _crossing(stitched)
    with stitched.graph.inserting_before(reader):
        changed = stitched.graph.call_function(function, (source,))
    changed.meta.update(source.meta)
    reader.replace_input_with(source, changed)


def skipped_segment(stitched: fx.GraphModule) -> None:
    """Give the second segment the input of the first, as if that had not run."""
    source, reader = _crossing(stitched)
    first = next(
        n for n in _calls(stitched)[0].all_input_nodes if "weight" not in n.name and "bias" not in n.name
    )
    reader.replace_input_with(source, first)


def swapped_parameters(stitched: fx.GraphModule) -> None:
    """Have two segments use each other's weights."""
    first, second = _calls(stitched)[:2]
    one, two = _weight(first), _weight(second)
    first.replace_input_with(one, two)
    second.replace_input_with(two, one)


def _weight(call: fx.Node) -> fx.Node:
    return next(
        node
        for node in call.all_input_nodes
        if node.op in ("placeholder", "get_attr")
        and node.meta["example_value"].dim() == 2
        and "weight" in node.name
    )


def lost_contribution(stitched: fx.GraphModule) -> None:
    """Have the last segment that reads a tied weight send it no gradient."""
    calls = _calls(stitched)
    shared = next(
        node for node in reversed(calls[-1].all_input_nodes) if len([c for c in calls if c in node.users]) > 1
    )
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


def _writing(stitched: fx.GraphModule) -> tuple[fx.GraphModule, fx.Node]:
    """A segment that changes an activation in place, and the node that does."""
    for call in _calls(stitched):
        segment: fx.GraphModule = getattr(stitched, str(call.target))
        for node in segment.graph.nodes:
            if node.target in WRITES:
                return segment, node
    raise RuntimeError("no segment changes an activation in place")


def lost_mutation(stitched: fx.GraphModule) -> None:
    """Leave out an operation in place."""
    segment, node = _writing(stitched)
    node.replace_all_uses_with(node.all_input_nodes[0])
    segment.graph.erase_node(node)
    segment.recompile()


def late_mutation(stitched: fx.GraphModule) -> None:
    """Run an operation in place only when all else of its segment has run."""
    segment, node = _writing(stitched)
    node.replace_all_uses_with(node.all_input_nodes[0])
    output = next(iter(segment.graph.find_nodes(op="output")))
    output.prepend(node)
    segment.recompile()


def repeated_mutation(stitched: fx.GraphModule) -> None:
    """Run an operation in place twice."""
    segment, node = _writing(stitched)
    with segment.graph.inserting_after(node):
        again = segment.graph.node_copy(node)
    again.meta.update(node.meta)
    segment.recompile()


def swapped_segments(stitched: fx.GraphModule) -> None:
    """Have the calls of the first two segments run each other's code."""
    first, second = _calls(stitched)[:2]
    first.target, second.target = second.target, first.target
