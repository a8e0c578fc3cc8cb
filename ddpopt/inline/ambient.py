"""Autocast as it is around a backward, for what is called from inside the compiled part of it.

AOTAutograd runs a compiled backward without autocast. In eager DDP a communication hook sees autocast as the
code around the backward has set it. So this is noted before the compiled backward begins, and a hand-over
that may call such a hook is made under it.

Invariant: what the compiled code runs under is back after each hand-over.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

DEVICES = ("cpu", "cuda")
DEPTH = 3
"""How many autograd nodes may be between an output and its compiled backward: views, mostly."""


class Ambient:
    """Autocast around the last backward of one forward."""

    def __init__(self) -> None:
        self._autocast: dict[str, tuple[bool, torch.dtype]] = {}

    def note_before(self, nodes: Iterable[Any]) -> None:
        """Note it whenever one of these autograd nodes is about to run."""
        for node in nodes:
            node.register_prehook(self._note)

    def _note(self, _: object) -> None:
        self._autocast = _autocast()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """In this block, autocast is as it was noted; as it is, if nothing was noted."""
        now = _autocast()
        with contextlib.ExitStack() as stack:
            for device, (enabled, dtype) in self._autocast.items():
                if now[device] != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            yield


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    return {each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in DEVICES}


def nodes_before(outputs: Any, kind: type) -> list[Any]:
    """The autograd nodes of outputs that have an edge to a node of some kind.

    Args:
        outputs: of a compiled graph; nodes of views are looked through.
        kind: the kind of node.
    """
    found: dict[int, Any] = {}
    tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    pending = [(tensor.grad_fn, DEPTH) for tensor in tensors if tensor.grad_fn is not None]
    while pending:
        node, depth = pending.pop()
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        if any(isinstance(successor, kind) for successor in successors):
            found[id(node)] = node
        elif depth > 1:
            pending += [(successor, depth - 1) for successor in successors]
    return [*found.values()]
