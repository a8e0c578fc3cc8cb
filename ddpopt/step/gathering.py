"""Send parameters from the ranks that have updated them to the others: a pass over a captured step.

Each bucket of the plan is one all-gather, in which a rank sends the parameters that it owns. All start after
the optimizer's step, and then each is waited for.

Invariant: after an optimizer's step all ranks have the parameters that their owners computed.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ddpopt.step.graphs import CapturedStep
from ddpopt.step.parallel import Ownership
from ddpopt.step.replicas import Replica
from ddpopt.step.settings import StepSettings
from ddpopt.step.sharding import OWNED, UPDATED

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional


def gather_parameters(step: CapturedStep, settings: StepSettings) -> None:
    """Send each parameter that an optimizer has updated from its owner to the other ranks."""
    parallel = settings.parallel
    shares = None if parallel is None else parallel.shares(step.replicas)
    if shares is None:
        return
    order = {node: place for place, node in enumerate(step.gm.graph.nodes)}
    marks = [node for node in order if node.target is UPDATED.default]
    for _, run in itertools.groupby(enumerate(marks), lambda pair: order[pair[1]] - pair[0]):
        _gather(step, shares, [mark for _, mark in run])
    for owned in step.gm.graph.find_nodes(op="call_function", target=OWNED.default):
        owned.replace_all_uses_with(owned.all_input_nodes[0])
        step.gm.graph.erase_node(owned)
    step.gm.recompile()


@dataclass(frozen=True)
class _Sent:
    """What is sent in one all-gather.

    Attributes:
        group: the process group.
        parts: of each rank, the nodes of the parameters that it owns.
    """

    group: Any
    parts: Sequence[list[fx.Node]]


def _gather(step: CapturedStep, shares: Ownership, marks: Sequence[fx.Node]) -> None:
    """Replace the marks of one optimizer's step by an all-gather for each bucket.

    Args:
        step: the captured step.
        shares: the owners.
        marks: the marks, one after the other.
    """
    places = _bucket_places(step)
    sent: dict[Any, _Sent] = {}
    for mark in marks:
        node: Any = mark.args[0]
        parameter: Any = mark.args[1]
        replica, bucket = places[parameter]
        group = replica.group
        empty = _Sent(group, [[] for _ in range(group.size())])
        value = node.meta["val"]
        key = id(replica), bucket, value.dtype, value.device
        sent.setdefault(key, empty).parts[shares.owners[parameter]].append(node)
    with step.gm.graph.inserting_before(marks[0]):
        started = [_start(step.gm.graph, each, shares.rank) for each in sent.values()]
        for each, gathered in zip(sent.values(), started, strict=True):
            _store(step.gm.graph, each, gathered, shares.rank)
    for mark in marks:
        step.gm.graph.erase_node(mark)


def _bucket_places(step: CapturedStep) -> dict[int, tuple[Replica, int]]:
    """The module of each parameter, by its ``id``, and the index of its bucket; -1 if it has none here."""
    found: dict[int, tuple[Replica, int]] = {}
    for replica, plan in zip(step.replicas, step.plans, strict=True):
        indices = {name: bucket.index for bucket in plan.buckets for name in bucket.params}
        for name, parameter in replica.module.named_parameters():
            found[id(parameter)] = replica, indices.get(name, -1)
    return found


def _start(graph: fx.Graph, sent: _Sent, rank: int) -> fx.Node:
    """Start an all-gather of this rank's parameters, filled up to the size of the largest part."""
    values = [node.meta["val"] for part in sent.parts for node in part]
    flat = [graph.call_function(aten.reshape.default, (node, [-1])) for node in sent.parts[rank]]
    missing = max(map(_elements, sent.parts)) - _elements(sent.parts[rank])
    options = {"dtype": values[0].dtype, "device": values[0].device}
    padding = graph.call_function(aten.zeros.default, ([missing],), options)
    own = graph.call_function(aten.cat.default, ([*flat, padding],))
    size = len(sent.parts)
    return graph.call_function(c10d.all_gather_into_tensor.default, (own, size, sent.group.group_name))


def _store(graph: fx.Graph, sent: _Sent, gathered: fx.Node, rank: int) -> None:
    """Wait for an all-gather, and copy what other ranks sent."""
    received = graph.call_function(c10d.wait_tensor.default, (gathered,))
    width = max(map(_elements, sent.parts))
    for owner, part in enumerate(sent.parts):
        first = owner * width
        for node in part:
            shape = [*node.meta["val"].shape]
            numel = math.prod(shape)
            if owner != rank:
                piece = graph.call_function(aten.narrow.default, (received, 0, first, numel))
                shaped = graph.call_function(aten.view.default, (piece, shape))
                graph.call_function(aten.copy_.default, (node, shaped))
            first += numel


def _elements(part: Sequence[fx.Node]) -> int:
    return sum(node.meta["val"].numel() for node in part)
