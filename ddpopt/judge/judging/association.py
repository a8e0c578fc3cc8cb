"""Where cutting a graph may change the order in which gradients are summed.

The gradient of a value is the sum of what its readers send, last reader first. A segment sums over its own
readers before it hands the sum on, so a value that is read several times in one segment and again after it
has its sum put together in another order: the same sum, with other last bits. What a graph returns is read
again after its last segment. The segment that makes a value is none of these: it goes on from the sum that
it is given, reader by reader. It is one if a view of the value leaves it, for AOTAutograd makes such a view
outside of the segment; so the last segment that reads a value of another is one too if a view of it leaves.
And whatever leaves a segment as a view sends its gradient to the value that it shows, past the views between
and before what the segment itself reads of them.

Invariant: a value that is not named here has its gradient summed in the order of the uncut graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from ddpopt.graph.aliases import viewed_input
from ddpopt.graph.nodes import body_nodes, example_value, requires_grad, storages
from ddpopt.planning.facts import gradient_carriers
from ddpopt.planning.plan import Plan

READ_REPEATEDLY = (
    "cosine_similarity",
    "gru_cell",
    "multi_head_attention_forward",
    "normalize",
    "rms_norm",
)
"""Functions that read one argument in several of the operations that they consist of."""
COMMUTED = 2
"""So many terms have one sum, whichever comes first."""


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
    after = max(home.values(), default=0) + 1
    carriers = gradient_carriers(gm.graph)
    reads: dict[fx.Node, Counter[int]] = {}
    for node in body_nodes(gm.graph):
        if node in carriers:
            for source, times in _reads(node).items():
                reads.setdefault(source, Counter())[home[node.name]] += times
    for source in gm.graph.output_node().all_input_nodes:
        reads.setdefault(source, Counter())[after] += 1
    leaving = _leaving(gm, home)
    found = (node for node in gm.graph.nodes if node in reads)
    kept = {node: (_steady(node, home), _last(node, reads[node], home, leaving)) for node in found}
    past = _past_views(reads, home, leaving)
    return tuple(
        node.name for node, segments in kept.items() if node in past or _changes(node, reads[node], segments)
    )


def _reads(node: fx.Node) -> Counter[fx.Node]:
    """How often a call reads each of its inputs; twice stands for several times."""
    name = getattr(node.target, "__name__", str(node.target))
    composite = name in READ_REPEATEDLY or isinstance(node.target, HigherOrderOperator)
    sources = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    return Counter(sources * 2 if composite else sources)


def _changes(source: fx.Node, per_segment: Counter[int], kept: Sequence[int | None]) -> bool:
    """Whether a segment that is not among those that keep the order has two or more contributions."""
    if not isinstance(example_value(source), torch.Tensor) or not requires_grad(example_value(source)):
        return False
    return any(count > 1 for segment, count in per_segment.items() if segment not in kept)


def _steady(source: fx.Node, home: Mapping[str, int]) -> int | None:
    """The segment that makes a value, if all that it adds to the gradient is added one by one."""
    own, index = storages(source), home.get(source.name)
    readers = [user for user in source.users if home.get(user.name) == index]
    return index if all(set(own).isdisjoint(storages(user)) for user in readers) else None


def _past_views(
    reads: Mapping[fx.Node, Counter[int]],
    home: Mapping[str, int],
    leaving: Mapping[int, Sequence[fx.Node]],
) -> dict[fx.Node, None]:
    """The values with three contributions or more, of which one comes back past a view that was between."""
    found: dict[fx.Node, None] = {}
    for index, nodes in leaving.items():
        views = Counter(_base(node, home) for node in nodes if _is_made_again(node, home))
        for base, outer in views.items():
            inner = _read_inside(base, index, reads, home)
            elsewhere = sum(times for segment, times in reads.get(base, {}).items() if segment != index)
            if outer + inner > 1 and outer + inner + elsewhere > COMMUTED:
                found[base] = None
    return found


def _is_made_again(node: fx.Node, home: Mapping[str, int]) -> bool:
    """Whether AOTAutograd makes what leaves a segment outside of it, and would not for a whole graph.

    A view of an input that the graph returns is made outside of the whole graph, too.
    """
    base, index = _base(node, home), home[node.name]
    if base is node or not requires_grad(example_value(node)):
        return False
    return base.name in home or any(home.get(user.name, index) != index for user in node.users)


def _base(node: fx.Node, home: Mapping[str, int]) -> fx.Node:
    """The value that a segment made or was given and that `node` shows there; itself, if it is no view."""
    index, base = home[node.name], node
    while home.get(base.name) == index and (source := viewed_input(base)) is not None:
        base = source
    return base


def _read_inside(
    base: fx.Node, index: int, reads: Mapping[fx.Node, Counter[int]], home: Mapping[str, int]
) -> int:
    """How often a segment reads a value or a view of it, but for the making of those views."""
    shown, times = [base], 0
    for node in shown:  # grows meanwhile: views of views too
        views = [user for user in node.users if home.get(user.name) == index and viewed_input(user) is node]
        views = [view for view in views if requires_grad(example_value(view))]
        times += reads.get(node, Counter())[index] - len(views)
        shown += views
    return times


def _last(
    source: fx.Node,
    per_segment: Counter[int],
    home: Mapping[str, int],
    leaving: Mapping[int, Sequence[fx.Node]],
) -> int | None:
    """The last segment that reads a value, unless a view of what it was given leaves it."""
    own, index, made_in = set(storages(source)), max(per_segment), home.get(source.name)
    if made_in == index:
        return index  # it is given no value of another segment
    views = (node for node in leaving.get(index, ()) if not own.isdisjoint(storages(node)))
    if made_in is None:
        views = (view for view in views if _is_made_again(view, home))
    return None if any(views) else index


def _leaving(gm: fx.GraphModule, home: Mapping[str, int]) -> dict[int, list[fx.Node]]:
    """For each segment, the nodes that are read outside of it."""
    found: dict[int, list[fx.Node]] = {}
    for node in body_nodes(gm.graph):
        index = home[node.name]
        if any(home.get(user.name) != index for user in node.users):
            found.setdefault(index, []).append(node)
    return found
