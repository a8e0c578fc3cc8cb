"""Collectives of a captured step: each bucket of the plan becomes one all-reduce, started at once.

A bucket starts right after its last gradient and is waited for before the first reader of any of them. With
fusion ``"concat"`` its gradients are copied into one buffer, which is scaled once, as DDP does; with
``"coalesced"`` each is scaled, and one operator sends all of them.

Invariant: no gradient is left alone or sent twice; a bucket has one process group, dtype and device.
"""

import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ddpopt.ddp.impose import imposed_plan
from ddpopt.planning.bucket_rule import ready_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket, Plan, Segment
from ddpopt.step.graphs import Captured
from ddpopt.step.replicas import AVERAGE, Averaged, Replica

Fusion = Literal["concat", "coalesced"]
_running: "weakref.WeakKeyDictionary[Any, Plan]" = weakref.WeakKeyDictionary()
aten: Any = torch.ops.aten
functional: Any = torch.ops._c10d_functional


def running_plan(ddp: Any) -> Plan | None:
    """The plan of the step that last trained a DDP module; None if none has."""
    return _running.get(ddp)


def note_running(replicas: Sequence[Replica], plans: Sequence[Plan]) -> None:
    """Note that a step trains its DDP modules now."""
    _running.update((each.ddp, plan) for each, plan in zip(replicas, plans, strict=True))


def plan_step(captured: Captured) -> tuple[Plan, ...]:
    """Plan the buckets of each DDP module: by DDP's rule, in the order in which gradients become ready.

    A plan that was imposed on a module's reducer decides its buckets here too.

    Args:
        captured: the step.

    Returns:
        One plan for each module, of one segment: the whole graph.
    """
    nodes = tuple(node.name for node in captured.gm.graph.nodes if node.op not in ("placeholder", "output"))
    return tuple(
        _plan(replica, [each for each in captured.slots if each.replica is replica], nodes)
        for replica in captured.replicas
    )


def _plan(replica: Replica, ready: Sequence[Averaged], nodes: tuple[str, ...]) -> Plan:
    specs = [each.spec for each in ready]
    given = imposed_plan(replica.ddp)
    if given is None:
        found = [
            ([specs[place] for place in members], reason)
            for members, reason in ready_buckets(specs, BucketConfig.from_ddp(replica.ddp))
        ]
    else:
        by_name = {spec.name: spec for spec in specs}
        found = [
            ([by_name[name] for name in each.params if name in by_name], each.reason)
            for each in given.buckets
        ]
    found = [(members, reason) for members, reason in found if members]
    buckets = tuple(Bucket.of(index, members, 0, reason) for index, (members, reason) in enumerate(found))
    names = tuple(spec.name for spec in specs)
    segment = Segment(0, 0, nodes, names, tuple(range(len(buckets))))
    known = [name for name, each in replica.ddp.module.named_parameters() if each.requires_grad]
    return Plan(buckets, (segment,), (), tuple(name for name in known if name not in names))


def insert_collectives(captured: Captured, plans: Sequence[Plan], fusion: Fusion) -> None:
    """Replace each ``ddpopt::average`` by a part of the all-reduce of its bucket.

    Args:
        captured: the step, whose graph is changed.
        plans: the plan of each of its DDP modules.
        fusion: how gradients are sent together.
    """
    graph = captured.gm.graph
    marked: dict[tuple[int, str], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=AVERAGE):
        each = captured.slots[node.args[1]]
        marked[captured.replicas.index(each.replica), each.spec.name] = node
    order = {node: place for place, node in enumerate(graph.nodes)}
    for number, plan in enumerate(plans):
        for bucket in plan.buckets:
            nodes = sorted((marked[number, name] for name in bucket.params), key=order.__getitem__)
            _send(
                graph,
                nodes,
                _Ranks(captured.replicas[number].group),
                fusion,
                order,
                _label(number, len(plans), bucket),
            )
    captured.gm.graph.lint()
    captured.gm.recompile()


def _label(module: int, modules: int, bucket: Bucket) -> str:
    return f"bucket_{bucket.index}" if modules == 1 else f"module_{module}_bucket_{bucket.index}"


class _Ranks:
    """A process group, as functional collectives name it."""

    def __init__(self, group: Any) -> None:
        self.name = str(group.group_name)
        self.scale = 1.0 / group.size()


def _send(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    group: _Ranks,
    fusion: Fusion,
    order: Mapping[fx.Node, int],
    label: str,
) -> None:
    readers = [user for node in nodes for user in node.users if user not in nodes]
    reader = min(readers, key=order.__getitem__) if readers else graph.output_node()
    builder = _Builder(graph, label)
    cursor = nodes[-1].next
    gradients = [node.args[0] for node in nodes]
    layouts = [_Layout.of(node.meta["val"]) for node in nodes]
    with graph.inserting_before(cursor):
        if fusion == "concat":
            flat = [layout.flattened(builder, each) for layout, each in zip(layouts, gradients, strict=True)]
            whole = flat[0] if len(flat) == 1 else builder("flat", aten.cat.default, flat)
            scaled = builder("scaled", aten.mul.Tensor, whole, group.scale)
            sent = [builder("all_reduce", functional.all_reduce.default, scaled, "sum", group.name)]
        else:
            parts = [builder("scaled", aten.mul.Tensor, each, group.scale) for each in gradients]
            all_sent = builder(
                "all_reduce", functional.all_reduce_coalesced.default, parts, "sum", group.name
            )
            sent = [builder("sent", operator.getitem, all_sent, place) for place in range(len(parts))]
    with graph.inserting_before(reader):
        waited = [builder("wait", functional.wait_tensor.default, each) for each in sent]
        if fusion == "concat":
            sizes = [layout.numel for layout in layouts]
            if len(sizes) > 1:
                pieces = builder("pieces", aten.split_with_sizes.default, waited[0], sizes)
                waited = [builder("piece", operator.getitem, pieces, place) for place in range(len(sizes))]
            waited = [layout.restored(builder, each) for layout, each in zip(layouts, waited, strict=True)]
    for node, result in zip(nodes, waited, strict=True):
        node.replace_all_uses_with(result)
        graph.erase_node(node)


class _Builder:
    """Adds nodes whose names say which bucket they belong to, with their values."""

    def __init__(self, graph: fx.Graph, label: str) -> None:
        self._graph = graph
        self._label = label

    def __call__(self, what: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self._graph.create_node("call_function", target, args, name=f"{self._label}_{what}")


class _Layout:
    """How a gradient lies in memory, to copy it into a flat buffer and back without a change of strides."""

    def __init__(self, shape: Sequence[int], order: Sequence[int]) -> None:
        self.shape = [*shape]
        self.order = [*order]
        self.numel = math.prod(shape)

    @classmethod
    def of(cls, gradient: Tensor) -> "_Layout":
        strides = gradient.stride()
        return cls(gradient.shape, sorted(range(gradient.dim()), key=lambda at: -strides[at]))

    @property
    def _sorted(self) -> bool:
        return self.order == sorted(self.order)

    def flattened(self, build: _Builder, gradient: Any) -> fx.Node:
        if not self._sorted:
            gradient = build("permuted", aten.permute.default, gradient, self.order)
        return build("part", aten.reshape.default, gradient, [self.numel])

    def restored(self, build: _Builder, piece: fx.Node) -> fx.Node:
        if self._sorted:
            return build("gradient", aten.view.default, piece, self.shape)
        inner = build("permuted", aten.view.default, piece, [self.shape[at] for at in self.order])
        back = [self.order.index(at) for at in range(len(self.order))]
        return build("gradient", aten.permute.default, inner, back)
