"""The global state in which the nodes of a graph run: open autocast spans, and grad mode.

Dynamo records changes to it as nodes. A graph begins outside of autocast, with grad mode on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ddpopt.graph.nodes import body_nodes

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
AUTOCAST = ENTER_AUTOCAST, EXIT_AUTOCAST
GRAD_MODE = torch._C._set_grad_enabled


@dataclass(frozen=True)
class State:
    """The global state that graph nodes switch: open autocast spans, and grad mode."""

    autocast: tuple[fx.Node, ...] = ()
    grad_enabled: bool = True

    def after(self, node: fx.Node) -> "State":
        """The state after `node`."""
        if node.target is ENTER_AUTOCAST:
            return State((*self.autocast, node), self.grad_enabled)
        if node.target is EXIT_AUTOCAST:
            return State(tuple(n for n in self.autocast if n is not node.args[0]), self.grad_enabled)
        if node.target is GRAD_MODE:
            return State(self.autocast, bool(node.args[0]))
        return self


def states(graph: fx.Graph) -> Iterator[tuple[fx.Node, State]]:
    """Each body node with the state in which it runs."""
    state = State()
    for node in body_nodes(graph):
        yield node, state
        state = state.after(node)


def begins_without_grad(graph: fx.Graph) -> bool:
    """Whether `graph` is called under ``no_grad`` and turns grad mode on: Dynamo records only changes."""
    switches = (bool(node.args[0]) for node in graph.nodes if node.target is GRAD_MODE)
    return next(switches, False)
