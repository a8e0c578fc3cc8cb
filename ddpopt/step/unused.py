"""Parameters that this rank does not use in a step, and that another rank does.

A module with ``find_unused_parameters`` asks the other ranks for them in each backward. A step asks before
it runs. If its graph was captured for another answer, the step is captured once more: a parameter that only
other ranks use then gets zeros as its gradient, and is averaged and updated like the others.

Invariant: no collective of a step is sent before all ranks agree on which parameters are averaged.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ddpopt.step.replicas import SYNCHRONIZED, Replica, looks_for_unused

torch.library.define("ddpopt::filled", "(Tensor parameter) -> Tensor")
torch.library.impl("ddpopt::filled", "default", torch.zeros_like)
FILLED: Any = torch.ops.ddpopt.filled
"""The gradient of a parameter that only other ranks use: zeros."""
Names = frozenset[str]


class UsedElsewhereError(Exception):
    """The ranks use other parameters than the graph of a step was captured for.

    Attributes:
        used: for each DDP module, the names of those that at least one rank uses.
    """

    def __init__(self, used: Mapping[Any, Names]) -> None:
        super().__init__("captured for other parameters")
        self.used = used


class Filled:
    """The parameters that get zeros in the backward that Dynamo traces.

    Args:
        replicas: the DDP modules that Dynamo has met, by ``id``.
    """

    def __init__(self, replicas: Mapping[int, Replica]) -> None:
        self._replicas = replicas
        self._complete: set[fx.Node] = set()
        self._missing: set[fx.Node] = set()

    def forget(self) -> None:
        """Begin another step."""
        self._complete.clear()
        self._missing.clear()

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._missing

    def begin(self, loss: fx.Node, leaves: Sequence[fx.Node]) -> None:
        """Note that a backward begins.

        Args:
            loss: what it begins from, a node of Dynamo's graph.
            leaves: the tensors that may get a gradient.
        """
        self._missing.clear()
        forwards = loss.graph.find_nodes(op="call_function", target=SYNCHRONIZED)
        last = {node.args[0]: node for node in forwards}  # of each module
        reached = reached_from([_value(loss)])
        for module, forward in last.items():
            replica = self._replicas[module]
            if replica.used_somewhere is None or forward in self._complete:
                continue
            own = _named(replica, leaves)
            if not any(id(_value(leaf)) in reached for leaf in own):
                continue
            self._complete.add(forward)
            outputs: Any = forward.args[1]
            used = reached_from(map(_value, outputs))
            self._missing |= {
                leaf
                for leaf, name in own.items()
                if name in replica.used_somewhere and id(_value(leaf)) not in used
            }


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _named(replica: Replica, leaves: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """The names of those leaves that are parameters of a module."""
    names = {id(parameter): name for name, parameter in replica.ddp.module.named_parameters()}
    read = {leaf: id(leaf.meta["grapharg"].example) for leaf in leaves if "grapharg" in leaf.meta}
    return {leaf: names[key] for leaf, key in read.items() if key in names}


def reached_from(outputs: Iterable[Tensor]) -> set[int]:
    """``id`` of the leaves that tensors depend on."""
    found = [*outputs]
    leaves = {id(each) for each in found if each.grad_fn is None}
    nodes: list[Any] = [each.grad_fn for each in found if each.grad_fn is not None]
    seen = {*nodes}
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return leaves


def candidates(ddp: Any) -> list[str]:
    """The parameters of a module that it looks for in each backward; none if it does not."""
    if not looks_for_unused(ddp):
        return []
    return [name for name, each in ddp.module.named_parameters() if each.requires_grad]


def encoded(ddps: Sequence[Any], used: Sequence[Names]) -> Tensor:
    """The use of parameters as numbers, of which the maximum over ranks says what any rank uses.

    Args:
        ddps: the DDP modules.
        used: the names of the parameters that this rank uses in each.
    """
    bits = [int(name in own) for ddp, own in zip(ddps, used, strict=True) for name in candidates(ddp)]
    return torch.tensor(bits, dtype=torch.int32)


def decoded(ddps: Sequence[Any], bits: Tensor) -> dict[Any, Names]:
    """The names of the parameters that at least one rank uses, for each module that looks for them."""
    flags = iter(bits.tolist())
    looking = [(ddp, names) for ddp in ddps if (names := candidates(ddp))]
    return {ddp: frozenset([name for name in names if next(flags)]) for ddp, names in looking}


def is_captured_for(used: Mapping[Any, Names], ddps: Sequence[Any], averaged: Sequence[Names]) -> bool:
    """Whether a graph averages what any rank uses, where modules look for that.

    Args:
        used: the names of what any rank uses, of such modules.
        ddps: the modules of the graph.
        averaged: the names of what it averages, for each of them.
    """
    of_module = dict(zip(ddps, averaged, strict=True))
    return all(names == of_module[ddp] for ddp, names in used.items())
