"""Which parameters ordinary code reads before a compiled graph: in a graph break, or before all graphs.

Their gradients are complete after those of the graph and before those of the graphs before it. No graph
tells so, but what is given to the graph does: autograd has recorded what it was computed from.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ddpopt.planning.bucket_rule import Specs


def noting_reads(run: Callable[..., Any], specs: Specs, found: set[str]) -> Callable[..., Any]:
    """A callable like `run`, whose first call with gradients notes what its arguments were computed from.

    Args:
        run: takes the inputs of a graph.
        specs: what DDP reduces.
        found: gets the names of those parameters.
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

    What is compiled is not passed: its own inputs show what lies before it.
    Touches names of torch 2.11 to 2.13, those of two sorts of nodes; another name costs time alone.
    """
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    seen: dict[Any, None] = dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
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
