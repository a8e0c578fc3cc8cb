"""Where cutting a graph may change the order in which gradients are summed.

The gradient of a value is the sum of what its readers send. A segment sums over its own readers before it
hands the sum on, so a value that is read several times in one segment and again in a later one has its sum
put together in another order: the same sum, with other last bits.

Invariant: a value that is not named here has its gradient summed in the order of the uncut graph.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from ddpopt.facts import gradient_carriers
from ddpopt.graphs import body_nodes, example_value, requires_grad
from ddpopt.plan import Plan

READ_REPEATEDLY = (
    "cosine_similarity",
    "gru_cell",
    "multi_head_attention_forward",
    "normalize",
    "rms_norm",
)
"""Functions that read one argument in several of the operations that they consist of."""


def reassociated_values(gm: fx.GraphModule, plan: Plan, graph: int = 0) -> tuple[str, ...]:
    """Names of the values whose gradient may be summed in another order once `gm` is cut.

    Args:
        gm: the graph that the plan was made for.
        plan: where it is cut.
        graph: which of the plan's graphs `gm` is.

    Returns:
        Node names, in graph order; empty if the cut graph computes bit by bit what the whole one does.
    """
    home = {name: s.index for s in plan.segments if s.graph == graph for name in s.nodes}
    carriers = gradient_carriers(gm.graph)
    reads: dict[fx.Node, Counter[int]] = {}
    for node in body_nodes(gm.graph):
        if node in carriers:
            for source, times in _reads(node).items():
                reads.setdefault(source, Counter())[home[node.name]] += times
    return tuple(n.name for n in gm.graph.nodes if n in reads and _changes(n, reads[n]))


def _reads(node: fx.Node) -> Counter[fx.Node]:
    """How often a call reads each of its inputs; twice stands for several times."""
    name = getattr(node.target, "__name__", str(node.target))
    composite = name in READ_REPEATEDLY or isinstance(node.target, HigherOrderOperator)
    sources = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    return Counter(sources * 2 if composite else sources)


def _changes(source: fx.Node, per_segment: Counter[int]) -> bool:
    """Whether a segment other than the last adds up two or more contributions of its own first."""
    if not isinstance(example_value(source), torch.Tensor) or not requires_grad(example_value(source)):
        return False
    last = max(per_segment)
    return any(count > 1 for segment, count in per_segment.items() if segment != last)
