"""The order of a step's operations: what a collective needs comes first, and what waits for it comes last.

Collectives keep their order, which is the same on all ranks. Before each one comes only what it or an
earlier one needs, so that it starts early. What remains is sorted by the last collective that it waits for:
parameters whose gradients have arrived are updated while later buckets are still sent.

Invariant: the program is the same. Operations that draw random numbers, and those that share memory with one
that writes, keep their order.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import ExternKernel

from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import body_nodes, read_storages, storages

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
STARTS = (
    c10d.all_reduce.default,
    c10d.all_reduce_coalesced.default,
    c10d.broadcast.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_gather_into_tensor.default,
)
WAIT = c10d.wait_tensor.default
SCALES = (aten.mul.Tensor, aten.div.Tensor)
"""How a gradient is scaled before it is sent."""
Before = Mapping[fx.Node, Mapping[fx.Node, None]]
"""For each node, those that must come before it."""


class Schedule(CustomGraphPass):
    """Orders a graph; a pass of Inductor, which is part of the key of its cache."""

    def __call__(self, graph: fx.Graph) -> None:
        """Order a graph by need."""
        nodes = body_nodes(graph)
        for node in _by_need(nodes, _dependencies(nodes)):
            graph.output_node().prepend(node)
        _fill(graph)

    def uuid(self) -> Any:
        """A hash of the code that the order depends on."""
        return get_hash_for_files((__file__, inspect.getfile(written_storages), inspect.getfile(body_nodes)))


class Sections(InductorChoices):
    """Inductor's choices for a step: nothing is fused across a collective, its wait, or another write.

    A fused operation would come where the last of its inputs is ready, and the collective after it. And what
    an operator such as ``bernoulli_`` writes, Inductor would read before it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._apart = functools.cache(_apart)  # of the scheduler of each graph in this compilation

    def can_fuse(  # type: ignore[override]  # torch calls its static method on the object
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Whether two nodes may be fused."""
        begin = min(node1.min_order, node2.min_order)
        end = max(node1.max_order, node2.max_order)
        between = any(begin < place < end for place in self._apart(scheduler))
        return not between and super().can_fuse(scheduler, node1, node2, shared_data_score)


def _apart(scheduler: Any) -> list[int]:
    """The places of operators that write to memory, and are no code of Inductor; collectives and waits do."""
    nodes = (each for each in scheduler.name_to_node.values() if isinstance(each.node, ExternKernel))
    return [each.min_order for each in nodes if any(out.get_mutations() for out in each.get_outputs())]


def _fill(graph: fx.Graph) -> None:
    """Copy each gradient into its bucket as soon as it is scaled; a ``cat`` would keep all until the last."""
    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = cat.args[0]
        flat = cat.meta["val"]
        at = 0
        scaled = all(p.target in SCALES and p.meta["val"].dtype == flat.dtype for p in parts)
        if scaled and flat.dim() == 1 and all(user.target is STARTS[0] for user in cat.users):
            with graph.inserting_before(min(parts).next):
                bucket = graph.call_function(aten.new_empty.default, (min(parts), [flat.numel()]))
            for part in parts:
                end = at + part.meta["val"].numel()
                with graph.inserting_before(max(part, bucket).next):
                    place = graph.call_function(aten.slice.Tensor, (bucket, 0, at, end))
                    graph.call_function(aten.copy_.default, (place, part))
                at = end
            cat.replace_all_uses_with(bucket)
            graph.erase_node(cat)


def _by_need(nodes: list[fx.Node], before: Before) -> list[fx.Node]:
    starts = [node for node in nodes if node.target in STARTS]
    number = {each: place for place, start in enumerate(starts) for each in (start, *start.users)}
    ranks: dict[fx.Node, int] = {}
    for node in nodes:
        own = number.get(node.all_input_nodes[0], -1) if node.target is WAIT else -1
        ranks[node] = max([own, *(ranks[each] for each in before[node])])
    place_of = {node: place for place, node in enumerate(nodes)}
    placed = dict[fx.Node, None]()
    for start in starts:
        needed = _needed(start, before, placed)
        placed.update(dict.fromkeys(sorted(needed, key=place_of.__getitem__)))
    return [*placed, *sorted((node for node in nodes if node not in placed), key=ranks.__getitem__)]


def _needed(start: fx.Node, before: Before, placed: Mapping[fx.Node, None]) -> dict[fx.Node, None]:
    """A node and everything that must come before it, if it is not placed yet."""
    needed = dict[fx.Node, None]()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node not in placed and node not in needed:
            needed[node] = None
            waiting.extend(before[node])
    return needed


def _dependencies(nodes: list[fx.Node]) -> Before:
    """What must come before each node: its inputs; for memory, random numbers and collectives, what did."""
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    readers: dict[Any, list[fx.Node]] = {}
    writer: dict[Any, fx.Node] = {}
    for node in nodes:
        written: list[Any] = [*written_storages(node)]
        # random numbers and collectives, the user's own too, stay in order as if these were memory
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            written.append("random")
        if "c10d" in str(node.target) and node.target is not WAIT:
            written.append("sent")
        used = dict.fromkeys([*read_storages(node), *storages(node), *written])
        earlier = {source: None for source in node.all_input_nodes if source in before}
        earlier.update((writer[key], None) for key in used if key in writer)
        earlier.update((reader, None) for key in written for reader in readers.get(key, ()))
        earlier.pop(node, None)
        before[node] = earlier
        for key in used:
            readers.setdefault(key, []).append(node)
        for key in written:
            writer[key] = node
            readers[key] = [node]
    return before
