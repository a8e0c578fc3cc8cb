"""What the autograd engine is about to do in the backward that is running now.

From inside a node of the graph one sees only what lies below it. Whether some other part of the graph adds to
the gradient of a parameter, for example a loss that uses a weight directly, is known only from the roots
down. torch keeps the roots in the frame that called the engine, and nowhere else that Python can see.

Invariant: None means "not known". Nothing here guesses.

Touches private names of torch 2.11 to 2.13: ``torch.autograd.graph._engine_run_backward`` (its frame),
``torch._C._current_graph_task_id``, ``torch._C._current_autograd_node`` and
``torch._C._will_engine_execute_node``.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

NO_TASK = -1
"""What `task_id` returns outside of any backward."""

_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__


@dataclass(frozen=True)
class Backward:
    """The backward that is running.

    Attributes:
        task: number of the engine's graph task; no two backwards of a process have the same.
        creates_graph: whether it was asked for with ``create_graph=True``.
        leaf_edges: how many edges of its graph end in each leaf, by ``id`` of the leaf's node. A leaf that
            another object keeps alive keeps its ``id``.
    """

    task: int
    creates_graph: bool
    leaf_edges: Mapping[int, int]


def task_id() -> int:
    """Number of the engine's graph task that runs on this thread; `NO_TASK` if there is none."""
    return int(torch._C._current_graph_task_id())


def running_node() -> Any:
    """The node of the autograd graph that the backward on this thread is in; None outside of any."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the running backward runs a node of the autograd graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient autograd.grad() gives to its caller: its node is not run
        return False


def running_backward() -> Backward | None:
    """Look at the backward that is running on this thread.

    Returns:
        What is known of it, the same to all who ask in one backward. None where its roots cannot be found:
        it was started from C++, or by other means than ``backward()`` and ``torch.autograd.grad``.
    """
    task = task_id()
    if task == NO_TASK:
        return None
    for latest in _latest[:]:  # a copy: other threads may run their own backwards
        if latest.task == task:
            return latest
    for frame in _engine_calls():
        # (outputs, (gradients, retain_graph, create_graph, …)), as torch.autograd passes them
        outputs, options = frame.f_locals["t_outputs"], frame.f_locals["args"]
        roots = [get_gradient_edge(o).node if isinstance(o, torch.Tensor) else o.node for o in outputs]
        if len(options) > 2 and all(map(_takes_part, roots)):
            found = Backward(task, bool(options[2]), _edges_into_leaves(roots))
            _latest[:] = [found]
            return found
    return None


_latest: list[Backward] = []
"""What was last found: each compiled graph of a backward asks, and the answer takes a walk over all of it."""


def _takes_part(root: Any) -> bool:
    """Whether the running backward started from this node, perhaps among others."""
    # the engine does not count a single root among the nodes that it will run
    return any(will_run(node) for node in (root, *(node for node, _ in root.next_functions if node)))


def _engine_calls() -> Iterator[FrameType]:
    """The calls of the engine that may be the running one, likeliest first.

    Nodes on the CPU run on the thread that called the engine, under the innermost of its calls. Those of
    an accelerator run on a thread of the engine's own, while the caller waits.
    """
    mine = _engine_call(sys._getframe())
    if mine is not None:
        return iter([mine])
    return filter(None, map(_engine_call, sys._current_frames().values()))


def _engine_call(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE_CALL:
        frame = frame.f_back
    return frame


def _edges_into_leaves(roots: list[Any]) -> Counter[int]:
    """Count the edges into each node that has no edges itself."""
    seen = dict.fromkeys(roots)  # holds on to the nodes, so that each one keeps its id
    pending = [*seen]
    edges: Counter[int] = Counter(id(root) for root in roots if not root.next_functions)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None:
                continue
            edges[id(node)] += 1
            if node not in seen:
                seen[node] = None
                pending.append(node)
    return Counter({id(node): edges[id(node)] for node in seen if not node.next_functions})
