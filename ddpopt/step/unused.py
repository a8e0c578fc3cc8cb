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

from ddpopt.step.replicas import SYNCHRONIZED, Replica

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
    names = {id(parameter): name for name, parameter in replica.module.named_parameters()}
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


def candidates(replicas: Iterable[Replica]) -> list[tuple[Any, str]]:
    """The parameters of those modules that look in each backward for what is used, with their module."""
    return [
        (replica.owner, name)
        for replica in replicas
        if replica.looks_for_unused
        for name, parameter in replica.module.named_parameters()
        if parameter.requires_grad
    ]


def encoded(looked_for: Sequence[tuple[Any, str]], used: Mapping[Any, Names]) -> Tensor:
    """A number for each parameter, of which the maximum over ranks says whether any rank uses it.

    Args:
        looked_for: what `candidates` returned.
        used: the names of the parameters that this rank uses, by module.
    """
    return torch.tensor([int(name in used[ddp]) for ddp, name in looked_for], dtype=torch.int32)


def decoded(looked_for: Sequence[tuple[Any, str]], numbers: Tensor) -> dict[Any, Names]:
    """The names of the parameters that at least one rank uses, by module."""
    found: dict[Any, set[str]] = {ddp: set() for ddp, _ in looked_for}
    for (ddp, name), number in zip(looked_for, numbers.tolist(), strict=True):
        if number:
            found[ddp].add(name)
    return {ddp: frozenset(names) for ddp, names in found.items()}
