"""Collectives of a captured step: each bucket of the plan becomes one all-reduce, started at once.

A bucket starts right after its last gradient and is waited for before the first reader of any of them. With
fusion ``"concat"`` its gradients are scaled and concatenated into one buffer (`Schedule` copies each early);
with ``"coalesced"`` each is scaled, and one operator sends all of them.

Invariant: each averaged gradient is sent once; a bucket has one process group, dtype and device.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt.ddp.agreement import group_name
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import limits_of, specs_from_ddp
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec, initial_buckets, ready_buckets
from ddpopt.planning.plan import Bucket, Plan, Segment
from ddpopt.step.graphs import CapturedStep
from ddpopt.step.joining import is_joining, reducers_buckets
from ddpopt.step.replicas import AVERAGE, Replica, looks_for_unused
from ddpopt.step.settings import WHAT, Fusion
from ddpopt.step.transport import Transport, transport_of

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
prims: Any = torch.ops.prims

FIRST = "as in DDP's first iteration, which keeps these buckets where it looks for unused parameters"
JOINED = "as in DDP's reducer, whose buckets ranks that have joined send too"
"""Why a bucket ends where it does, if not by the ready order."""


def digests(captured: CapturedStep) -> dict[str, int]:
    """For each process group, a number that is equal for graphs that average the same on it; never 0."""
    sent: dict[str, list[Any]] = {}
    for replica, plan in zip(captured.replicas, captured.plans, strict=True):
        buckets = [(bucket.params, bucket.nbytes) for bucket in plan.buckets]
        averaged = {each.spec.name for each in captured.slots if each.replica is replica}
        how = sorted(averaged), transport_of(replica.ddp)
        sent.setdefault(replica.ddp.process_group.group_name, []).append((buckets, how))
    for node in captured.gm.graph.nodes:
        if str(node.target).startswith("_c10d_functional") and node.args[-1] in sent:
            shape = tuple(getattr(node.meta.get("val"), "shape", ()))
            sent[node.args[-1]].append((str(node.target), shape))
    hashes = {group: hashlib.sha256(repr(each).encode()).digest() for group, each in sent.items()}
    return {group: int.from_bytes(each[:7], "big") + 1 for group, each in hashes.items()}


def plan_step(captured: CapturedStep) -> tuple[Plan, ...]:
    """Plan the buckets of each DDP module: by DDP's rule, in the order in which gradients become ready.

    A plan that was imposed on a module's reducer decides its buckets here too.

    Args:
        captured: the step.

    Returns:
        One plan for each module, of one segment: the whole graph.
    """
    nodes = tuple(node.name for node in captured.gm.graph.nodes if node.op not in ("placeholder", "output"))
    return tuple(
        _plan(replica, [each.spec for each in captured.slots if each.replica is replica], nodes)
        for replica in captured.replicas
    )


def _plan(replica: Replica, ready: Sequence[ParamSpec], nodes: tuple[str, ...]) -> Plan:
    members = _members(replica.ddp, ready) if ready else []
    buckets = tuple(Bucket.of(index, specs, 0, reason) for index, (specs, reason) in enumerate(members))
    sent = {name: None for bucket in buckets for name in bucket.params}
    segment = Segment(0, 0, nodes, tuple(sent), tuple(range(len(buckets))))
    trained = [name for name, each in replica.ddp.module.named_parameters() if each.requires_grad]
    unread = tuple(name for name in trained if name not in sent)
    return Plan(buckets, (segment,), (), unread, group=group_name(replica.ddp.process_group))


def _members(ddp: Any, ready: Sequence[ParamSpec]) -> list[tuple[list[ParamSpec], str]]:
    """The parameters of each bucket, and why it ends there; `ready` are those that are averaged."""
    if is_joining(ddp):
        return [(specs, JOINED) for specs in reducers_buckets(ddp)]
    looks = looks_for_unused(ddp)
    sent = specs_from_ddp(ddp) if looks else ready  # DDP then sends zeros for the others
    imposed = imposed_plan(ddp)
    if imposed is not None:
        by_name = {spec.name: spec for spec in sent}
        found = [
            ([by_name[name] for name in bucket.params if name in by_name], bucket.reason)
            for bucket in imposed.buckets
        ]
        return [(specs, reason) for specs, reason in found if specs]
    limits = limits_of(ddp)
    if looks:  # each rank has another ready order, so DDP keeps its first buckets
        placed = [(places, FIRST) for places in initial_buckets(sent, limits)]
    else:
        placed = ready_buckets(sent, limits)
    return [([sent[place] for place in places], reason) for places, reason in placed]


def insert_collectives(captured: CapturedStep, plans: Sequence[Plan], fusion: Fusion) -> None:
    """Replace each ``ddpopt::average`` by a part of the all-reduce of its bucket.

    Args:
        captured: the step, whose graph is changed.
        plans: the plan of each of its DDP modules.
        fusion: how gradients are sent together.
    """
    graph = captured.gm.graph
    marked: dict[tuple[int, str], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=AVERAGE):
        averaged = captured.slots[node.args[1]]
        marked[captured.replicas.index(averaged.replica), averaged.spec.name] = node
    _mark_unused(graph, captured.replicas, plans, marked)
    for number, plan in enumerate(plans):
        prefix = "" if len(plans) == 1 else f"module_{number}_"
        ddp: Any = captured.replicas[number].ddp
        transport = transport_of(ddp)
        assert transport is not None  # the module was checked
        started: list[fx.Node] = []  # all ranks send buckets in the same order
        for bucket in plan.buckets:
            nodes = [marked[number, name] for name in bucket.params]
            readers = [user for node in nodes for user in node.users if user not in nodes]
            reader = min(readers, default=graph.output_node())
            if any(reader < each for each in (*nodes, *started)):
                raise UsageError(f"{WHAT}: {bucket.params[0]!r} is used before all backwards; run them first")
            label = f"{prefix}bucket_{bucket.index}"
            way = "concat" if is_joining(ddp) else fusion  # ranks that have joined send one buffer
            group = ddp.process_group
            started.append(_send(graph, label, nodes, reader, started, way, group, transport))
    captured.gm.recompile()


def _mark_unused(
    graph: fx.Graph,
    replicas: Sequence[Replica],
    plans: Sequence[Plan],
    marked: dict[tuple[int, str], fx.Node],
) -> None:
    """Add zeros for the parameters that no rank uses, which DDP sends too; nothing reads their average."""
    for number, (replica, plan) in enumerate(zip(replicas, plans, strict=True)):
        missing = [name for bucket in plan.buckets for name in bucket.params if (number, name) not in marked]
        parameters = dict(replica.ddp.module.named_parameters())
        first = min((node for (own, _), node in marked.items() if own == number), default=None)
        for name in missing:
            assert first is not None  # or there would be no plan
            parameter = parameters[name]
            options = {"dtype": parameter.dtype, "device": parameter.device}
            with graph.inserting_before(first):
                zeros = graph.call_function(aten.zeros.default, ([*parameter.shape],), options)
                node = graph.call_function(AVERAGE, (zeros, None))
            node.meta["val"] = torch.empty_like(parameter, device="meta")
            marked[number, name] = node


def _send(
    graph: fx.Graph,
    label: str,
    nodes: Sequence[fx.Node],
    reader: fx.Node,
    started: Sequence[fx.Node],
    fusion: Fusion,
    group: Any,
    transport: Transport,
) -> fx.Node:
    """Put a collective where its last gradient is ready, and the wait where the first one is read.

    Args:
        graph: the graph of the step.
        label: the name of the bucket, with which the names of its nodes begin.
        nodes: the marks of its gradients.
        reader: the first node that reads one of them.
        started: the collectives of the buckets before, which have to come first.
        fusion: how they are sent together.
        group: the process group.
        transport: how they are scaled, and in which dtype they are sent.

    Returns:
        The collective.
    """

    def add(what: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        return graph.create_node("call_function", target, args, name=f"{label}_{what}")

    def converted(what: str, part: fx.Node, dtype: torch.dtype) -> fx.Node:
        if transport.dtype is None:
            return part
        return add(what, prims.convert_element_type.default, part, dtype)

    name = str(group.group_name)
    scale = (aten.div.Tensor, group.size()) if transport.divides else (aten.mul.Tensor, 1.0 / group.size())
    in_one_buffer = fusion == "concat"
    values = [node.meta["val"] for node in nodes]
    orders = [_order_in_memory(value) for value in values]
    scaled = []
    for node, value, order in zip(nodes, values, orders, strict=True):
        with graph.inserting_before(node.next):
            permuted = add("permuted", aten.permute.default, node.args[0], order)
            part = add("part", aten.reshape.default, permuted, [-1])
            part = converted("compressed", part, transport.dtype or value.dtype)
            scaled.append(add("scaled", scale[0], part, scale[1]))
    with graph.inserting_before(max([*scaled, *started]).next):
        if in_one_buffer:
            flat = scaled[0] if len(scaled) == 1 else add("flat", aten.cat.default, scaled)
            start = add("all_reduce", c10d.all_reduce.default, flat, "sum", name)
            sent = [start]
        else:
            start = add("all_reduce", c10d.all_reduce_coalesced.default, scaled, "sum", name)
            sent = [add("sent", operator.getitem, start, place) for place in range(len(nodes))]
    with graph.inserting_before(reader):
        parts = [add("wait", c10d.wait_tensor.default, each) for each in sent]
        if in_one_buffer and len(nodes) > 1:
            sizes = [value.numel() for value in values]
            split = add("pieces", aten.split_with_sizes.default, parts[0], sizes)
            parts = [add("piece", operator.getitem, split, place) for place in range(len(nodes))]
        for node, value, order, part in zip(nodes, values, orders, parts, strict=True):
            part = converted("decompressed", part, value.dtype)
            permuted = add("permuted", aten.view.default, part, [value.shape[at] for at in order])
            strides_back = [order.index(at) for at in range(len(order))]
            node.replace_all_uses_with(add("gradient", aten.permute.default, permuted, strides_back))
            graph.erase_node(node)
    return start


def _order_in_memory(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, from the one with the largest stride to that with the smallest."""
    return sorted(range(value.dim()), key=value.stride().__getitem__, reverse=True)
