"""Collectives of a captured step: each bucket of the plan becomes one, started at once.

A bucket starts right after its last gradient and is waited for before the first reader of any of them.

Invariant: each averaged gradient is sent once; a bucket has one process group, dtype and device.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ddpopt.ddp.agreement import group_name
from ddpopt.errors import UsageError
from ddpopt.graph.nodes import by_storage, storages
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan, Segment
from ddpopt.step.graphs import CapturedStep
from ddpopt.step.parallel import Ownership
from ddpopt.step.replicas import AVERAGE, Replica
from ddpopt.step.sending import Sending
from ddpopt.step.settings import WHAT, Fusion
from ddpopt.step.sharding import OWNED

aten: Any = torch.ops.aten


def digests(captured: CapturedStep, shares: Ownership | None) -> dict[str, int]:
    """For each process group, a number that is equal for graphs that average the same on it; never 0.

    Args:
        captured: the step, with its collectives.
        shares: the owners of its parameters, which have to be equal, too.
    """
    owners = {} if shares is None else shares.owners
    sent: dict[str, list[Any]] = {}
    for replica, plan in zip(captured.replicas, captured.plans, strict=True):
        buckets = [(bucket.params, bucket.nbytes) for bucket in plan.buckets]
        averaged = {each.spec.name for each in captured.slots if each.replica is replica}
        owned = [owners[id(each)] for each in replica.module.parameters() if id(each) in owners]
        how = sorted(averaged), replica.transport
        parts = buckets, how, [*replica.form], owned, captured.state.face(captured.added)
        sent.setdefault(replica.group.group_name, []).append(parts)
    for node in captured.gm.graph.nodes:
        if str(node.target).startswith("_c10d_functional") and node.args[-1] in sent:
            shape = tuple(getattr(node.meta.get("val"), "shape", ()))
            sent[node.args[-1]].append((str(node.target), shape))
    hashes = {group: hashlib.sha256(repr(each).encode()).digest() for group, each in sent.items()}
    return {group: int.from_bytes(each[:7], "big") + 1 for group, each in hashes.items()}


def plan_step(captured: CapturedStep) -> tuple[Plan, ...]:
    """Plan the buckets of each module: by DDP's rule, in the order in which gradients become ready.

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
    members = replica.buckets(ready) if ready else []
    buckets = tuple(Bucket.of(index, specs, 0, reason) for index, (specs, reason) in enumerate(members))
    sent = {name: None for bucket in buckets for name in bucket.params}
    segment = Segment(0, 0, nodes, tuple(sent), tuple(range(len(buckets))))
    trained = [name for name, each in replica.module.named_parameters() if each.requires_grad]
    unread = tuple(name for name in trained if name not in sent)
    return Plan(buckets, (segment,), (), unread, group=group_name(replica.group))


def insert_collectives(
    captured: CapturedStep, plans: Sequence[Plan], fusion: Fusion, shares: Ownership | None = None
) -> None:
    """Replace each ``ddpopt::average`` by a part of the collective of its bucket.

    Args:
        captured: the step, whose graph is changed.
        plans: the plan of each of its modules.
        fusion: how gradients are sent together.
        shares: the owners of parameters; a bucket that only they read is sent to them alone.
    """
    graph = captured.gm.graph
    marked: dict[tuple[int, str], fx.Node] = {}
    owners: dict[fx.Node, int] = {}
    holding = by_storage(graph.nodes)
    for node in graph.find_nodes(op="call_function", target=AVERAGE):
        averaged = captured.slots[node.args[1]]
        marked[captured.replicas.index(averaged.replica), averaged.spec.name] = node
        if shares is not None and _only_owner_reads(node, holding):
            owners[node] = shares.owners[averaged.sent[0]]
    _mark_unused(graph, captured.replicas, plans, marked)
    for number, plan in enumerate(plans):
        prefix = "" if len(plans) == 1 else f"module_{number}_"
        replica = captured.replicas[number]
        transport = replica.transport
        assert transport is not None  # the module was checked
        started: list[fx.Node] = []  # all ranks send buckets in the same order
        for bucket in plan.buckets:
            nodes = [marked[number, name] for name in bucket.params]
            readers = [user for node in nodes for user in node.users if user not in nodes]
            reader = min(readers, default=graph.output_node())
            if any(reader < each for each in (*nodes, *started)):
                raise UsageError(f"{WHAT}: {bucket.params[0]!r} is used before all backwards; run them first")
            label = f"{prefix}bucket_{bucket.index}"
            sending = Sending(graph, label, nodes, reader, started, replica.group, transport)
            if shares is not None and all(node in owners for node in nodes):
                start = sending.to_owners([owners[node] for node in nodes], shares.rank)
            elif fusion == "concat" or replica.is_joining:  # ranks that have joined send one buffer
                start = sending.in_one_buffer()
            else:
                start = sending.in_one_operation()
            started.append(start)
    captured.gm.recompile()


def _only_owner_reads(mark: fx.Node, holding: Mapping[int, Sequence[fx.Node]]) -> bool:
    """Whether only an optimizer of the parameter's owner reads a gradient, on all ranks.

    Args:
        mark: of the averaged gradient, which may be stored in the memory of an earlier one.
        holding: the nodes of each storage.
    """
    stored = [user for user in mark.users if user.target is aten.copy_.default]
    keys = {key for node in (mark, *stored) for key in storages(node)}
    held = [node for key in keys for node in holding.get(key, ())]
    readers = {each for node in (mark, *held) for each in (node, *node.users) if mark < each} - {*stored}
    is_left = any(node.op == "placeholder" for node in held)
    return not is_left and all(each.target is OWNED.default for each in readers)


def _mark_unused(
    graph: fx.Graph,
    replicas: Sequence[Replica],
    plans: Sequence[Plan],
    marked: dict[tuple[int, str], fx.Node],
) -> None:
    """Add zeros for the parameters that no rank uses, which DDP sends too; nothing reads their average."""
    for number, (replica, plan) in enumerate(zip(replicas, plans, strict=True)):
        missing = [name for bucket in plan.buckets for name in bucket.params if (number, name) not in marked]
        parameters = dict(replica.module.named_parameters())
        first = min((node for (own, _), node in marked.items() if own == number), default=None)
        for name in missing:
            assert first is not None  # or there would be no plan
            parameter = parameters[name]
            options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
            with graph.inserting_before(first):
                zeros = graph.call_function(aten.zeros.default, ([*parameter.shape],), options)
                node = graph.call_function(AVERAGE, (zeros, None))
            node.meta["val"] = torch.empty_like(parameter, device="meta")
            marked[number, name] = node
