"""The parameters that eager code reads before a compiled graph: in a graph break, or before all graphs.

Their gradients are complete after those of the graph and before those of earlier graphs. No graph shows
these reads, but the inputs of the graph do: autograd has recorded what they were computed from.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddpopt.graph.nodes import tensors_in
from ddpopt.planning.bucket_rule import Specs


def noting_reads(run: Callable[..., Any], specs: Specs, found: set[str]) -> Callable[..., Any]:
    """A callable like `run`, whose first call in grad mode notes which parameters its arguments depend on.

    Args:
        run: takes the inputs of a graph.
        specs: the parameters that DDP reduces.
        found: the names of these parameters are added to it.
    """
    noted = False

    def noting(*arguments: Any) -> Any:
        nonlocal noted
        if not noted and torch.is_grad_enabled():
            noted = True
            found.update(specs[leaf].name for leaf in _leaves(arguments) if leaf in specs)
        return run(*arguments)

    return noting


def _leaves(values: Iterable[object]) -> dict[int, None]:
    """``id`` of each tensor into which a backward from `values` would accumulate a gradient.

    The search stops at compiled graphs, whose own inputs show the rest.
    Uses the names of two kinds of nodes in torch; if they change, only time is lost.
    """
    nodes = (tensor.grad_fn for tensor in tensors_in(values))
    seen: dict[Any, None] = dict.fromkeys(node for node in nodes if node is not None)
    ahead = [*seen]
    leaves: dict[int, None] = {}
    while ahead:
        node = ahead.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = None
        if node.name() == "CompiledFunctionBackward":
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen[before] = None
                ahead.append(before)
    return leaves
