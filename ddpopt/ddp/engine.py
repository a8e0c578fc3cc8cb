"""Information about the running backward: what the autograd engine will do.

A node of the graph sees only its descendants. Whether another part of the graph adds to the gradient of a
parameter, for example a loss that uses a weight directly, can be found only from the roots. torch keeps the
roots in the frame that called the engine; Python can access them nowhere else.

Invariant: None means "not known". Nothing here guesses.

Uses private names of torch: ``torch.autograd.graph._engine_run_backward`` (its frame),
``torch._C._current_graph_task_id``, ``torch._C._current_autograd_node``,
``torch._C._will_engine_execute_node``, ``torch._C._distributed_rpc._is_current_rpc_agent_set`` and
``torch._C._distributed_autograd._current_context``.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

NO_TASK = -1
"""The result of `task_id` outside of any backward."""

_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__


@dataclass(frozen=True)
class Backward:
    """The running backward.

    Attributes:
        task: number of the engine's graph task, unique to each backward of a process.
        creates_graph: whether it was called with ``create_graph=True``.
        senders: the nodes that send a gradient to each leaf, as ``id`` of the nodes, by ``id`` of the leaf's
            node. An ``id`` is valid only while another object keeps the node alive.
    """

    task: int
    creates_graph: bool
    senders: Mapping[int, Set[int]]


def task_id() -> int:
    """Number of the engine's graph task that is running on this thread; `NO_TASK` if there is none."""
    return int(torch._C._current_graph_task_id())


def running_node() -> Any:
    """The autograd node that the backward on this thread is running; None outside of any backward."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the running backward will run a node of the autograd graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient autograd.grad() returns to its caller: its node is not run
        return False


def has_distributed_context() -> bool:
    """Whether this thread is inside a ``torch.distributed.autograd.context()``, whose backwards are RPCs."""
    if not dist.rpc.is_available() or not torch._C._distributed_rpc._is_current_rpc_agent_set():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:  # there is none
        return False
    return True


def running_backward() -> Backward | None:
    """Inspect the backward that is running on this thread.

    Returns:
        The known facts, the same for all calls in one backward. None if its roots cannot be found: it was
        started from C++, or by other means than ``backward()`` and ``torch.autograd.grad``.
    """
    task = task_id()
    if task == NO_TASK:
        return None
    for latest in _latest[:]:  # a copy: other threads may be running backwards
        if latest.task == task:
            return latest
    for frame in _engine_calls():
        # (outputs, (gradients, retain_graph, create_graph, …)), as torch.autograd passes them
        outputs = frame.f_locals["t_outputs"]
        options = frame.f_locals["args"]
        roots = [get_gradient_edge(o).node if isinstance(o, torch.Tensor) else o.node for o in outputs]
        if len(options) > 2 and all(map(_takes_part, roots)):
            found = Backward(task, bool(options[2]), _senders_to_leaves(roots))
            _latest[:] = [found]
            return found
    return None


_latest: list[Backward] = []
"""The last result: each compiled graph of a backward needs it, and finding it walks the whole graph."""


def _takes_part(root: Any) -> bool:
    """Whether the running backward started from this node, perhaps among others."""
    # the engine does not count a single root among the nodes that it will run
    return any(will_run(node) for node in (root, *(node for node, _ in root.next_functions if node)))


def _engine_calls() -> Iterator[FrameType]:
    """The calls of the engine that may be the running one, most likely first.

    CPU nodes run on the thread that called the engine, under the innermost of its calls. Accelerator nodes
    run on one of the engine's own threads, while the caller waits.
    """
    mine = _engine_call(sys._getframe())
    if mine is not None:
        return iter([mine])
    return filter(None, map(_engine_call, sys._current_frames().values()))


def _engine_call(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE_CALL:
        frame = frame.f_back
    return frame


def _senders_to_leaves(roots: list[Any]) -> Mapping[int, Set[int]]:
    """The nodes with an edge to each node that has no outgoing edges; a root has itself."""
    seen = dict.fromkeys(roots)  # keeps the nodes alive, so that each one keeps its id
    pending = [*seen]
    senders: defaultdict[int, set[int]] = defaultdict(set)
    while pending:
        node = pending.pop()
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        if not node.next_functions and node in roots:
            senders[id(node)].add(id(node))
        for successor in successors:
            if not successor.next_functions:
                senders[id(successor)].add(id(node))
            if successor not in seen:
                seen[successor] = None
                pending.append(successor)
    return senders
