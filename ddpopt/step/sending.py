"""The operators that send one bucket: to all ranks, or to the owner of each parameter.

All scale each gradient as soon as it is ready. With ``"concat"`` gradients are concatenated into one buffer
(`Schedule` copies each early) for one all-reduce; with ``"coalesced"`` one operator sends all of them. To
owners, a reduce-scatter sends a buffer with one part for each rank.

Invariant: what replaces a mark has the value, the shape and the strides of the averaged gradient.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ddpopt.step.transport import Transport

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
prims: Any = torch.ops.prims


@dataclass(frozen=True)
class Sending:
    """Sends a bucket: a collective where its last gradient is ready, the wait where the first one is read.

    Attributes:
        graph: the graph of the step.
        label: the name of the bucket, with which the names of its nodes begin.
        marks: those of its gradients, which are replaced.
        reader: the first node that reads one of them.
        started: the collectives of the buckets before, which have to come first.
        group: the process group.
        transport: how gradients are scaled, and in which dtype they are sent.
    """

    graph: fx.Graph
    label: str
    marks: Sequence[fx.Node]
    reader: fx.Node
    started: Sequence[fx.Node]
    group: Any
    transport: Transport

    def in_one_buffer(self) -> fx.Node:
        """Send one buffer to all ranks; return the collective."""
        scaled = self._scaled()
        with self._after(scaled):
            flat = scaled[0] if len(scaled) == 1 else self._add("flat", aten.cat.default, scaled)
            start = self._add("all_reduce", c10d.all_reduce.default, flat, "sum", self._name)
        with self.graph.inserting_before(self.reader):
            received = self._add("wait", c10d.wait_tensor.default, start)
            self._replace(self.marks, self._pieces(received, self.marks))
        return start

    def in_one_operation(self) -> fx.Node:
        """Send gradients in one operation to all ranks; return the collective."""
        scaled = self._scaled()
        with self._after(scaled):
            start = self._add("all_reduce", c10d.all_reduce_coalesced.default, scaled, "sum", self._name)
            sent = [self._add("sent", operator.getitem, start, place) for place in range(len(scaled))]
        with self.graph.inserting_before(self.reader):
            self._replace(self.marks, [self._add("wait", c10d.wait_tensor.default, each) for each in sent])
        return start

    def to_owners(self, owners: Sequence[int], rank: int) -> fx.Node:
        """Send each gradient to the owner of its parameter; return the collective.

        Args:
            owners: of each mark.
            rank: this rank, whose gradients are replaced; the others stay, as nothing reads them.
        """
        scaled = self._scaled()
        ranks = range(self.group.size())
        pairs = [*zip(self.marks, scaled, owners, strict=True)]
        parts = [[part for _, part, owner in pairs if owner == each] for each in ranks]
        own = [mark for mark, _, owner in pairs if owner == rank]
        sizes = [sum(_numel(mark) for mark, _, owner in pairs if owner == each) for each in ranks]
        value = self.marks[0].meta["val"]
        options = {"dtype": self.transport.dtype or value.dtype, "device": value.device}
        with self._after(scaled):
            filled = []
            for part, size in zip(parts, sizes, strict=True):
                padding = self._add("padding", aten.zeros.default, [max(sizes) - size], **options)
                filled += [*part, padding]
            flat = self._add("flat", aten.cat.default, filled)
            start = self._add(
                "reduce_scatter", c10d.reduce_scatter_tensor.default, flat, "sum", len(ranks), self._name
            )
        with self.graph.inserting_before(self.reader):
            received = self._add("wait", c10d.wait_tensor.default, start)
            if own:
                used = self._add("used", aten.slice.Tensor, received, 0, 0, sizes[rank])
                self._replace(own, self._pieces(used, own))
        for mark in self.marks:
            if mark not in own:
                mark.replace_all_uses_with(mark.all_input_nodes[0])
                self.graph.erase_node(mark)
        return start

    @property
    def _name(self) -> str:
        return str(self.group.group_name)

    def _add(self, what: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.create_node("call_function", target, args, kwargs, name=f"{self.label}_{what}")

    def _after(self, scaled: Sequence[fx.Node]) -> Any:
        """The place where all is ready, and the buckets before have started."""
        return self.graph.inserting_before(max([*scaled, *self.started]).next)

    def _scaled(self) -> list[fx.Node]:
        """Each gradient in one dimension, in its order in memory, scaled where it is ready."""
        size = self.group.size()
        found = []
        for mark in self.marks:
            with self.graph.inserting_before(mark.next):
                permuted = self._add("permuted", aten.permute.default, mark.args[0], _order_in_memory(mark))
                part = self._add("part", aten.reshape.default, permuted, [-1])
                if self.transport.dtype is not None:
                    convert = prims.convert_element_type.default
                    part = self._add("compressed", convert, part, self.transport.dtype)
                if self.transport.divides:
                    found.append(self._add("scaled", aten.div.Tensor, part, size))
                else:
                    found.append(self._add("scaled", aten.mul.Tensor, part, 1.0 / size))
        return found

    def _pieces(self, received: fx.Node, marks: Sequence[fx.Node]) -> list[fx.Node]:
        """The parts of a buffer, one for each mark."""
        if len(marks) == 1:
            return [received]
        sizes = [_numel(mark) for mark in marks]
        split = self._add("pieces", aten.split_with_sizes.default, received, sizes)
        return [self._add("piece", operator.getitem, split, place) for place in range(len(marks))]

    def _replace(self, marks: Sequence[fx.Node], parts: Sequence[fx.Node]) -> None:
        """Replace marks by what was received."""
        for mark, part in zip(marks, parts, strict=True):
            value = mark.meta["val"]
            order = _order_in_memory(mark)
            if self.transport.dtype is not None:
                part = self._add("decompressed", prims.convert_element_type.default, part, value.dtype)
            permuted = self._add("permuted", aten.view.default, part, [value.shape[at] for at in order])
            strides_back = [order.index(at) for at in range(len(order))]
            mark.replace_all_uses_with(self._add("gradient", aten.permute.default, permuted, strides_back))
            self.graph.erase_node(mark)


def _numel(mark: fx.Node) -> int:
    return math.prod(mark.meta["val"].shape)


def _order_in_memory(mark: fx.Node) -> list[int]:
    """The dimensions of a gradient, from the one with the largest stride to that with the smallest."""
    value = mark.meta["val"]
    return sorted(range(value.dim()), key=value.stride().__getitem__, reverse=True)
