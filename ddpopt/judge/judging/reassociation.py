"""Which parameters may have gradients of another association because of cuts, proved from graph and plan.

Invariant: a parameter that is not named here has its gradient computed, bit by bit, as without cuts; and a
plan proves nothing of a graph that it was not made for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree as pytree

from ddpopt.errors import UsageError
from ddpopt.graph.effects import mutated_inputs
from ddpopt.graph.nodes import body_nodes, example_value, requires_grad, storages
from ddpopt.judge.judging.association import reassociated_values
from ddpopt.judge.judging.layouts import relaid_values
from ddpopt.judge.judging.reference import Bench
from ddpopt.judge.option_cases import set_extra
from ddpopt.planning.capture import Capture, capture
from ddpopt.planning.facts import ParamUse, gradient_carriers
from ddpopt.planning.limits import DDP_ARGUMENTS_OF_LIMITS
from ddpopt.planning.plan import Plan
from ddpopt.planning.strategy import Strategy


@dataclass(frozen=True)
class Reassociated:
    """What may be summed in another order than in eager.

    Attributes:
        why: in words.
        values: names of the values whose gradients have contributions from several places, or come in another
            layout.
        reached: names of the parameters whose gradients are computed from those.
        unproved: why nothing could be proved, in words; empty where something could.
    """

    why: str = ""
    values: tuple[str, ...] = ()
    reached: frozenset[str] = frozenset()
    unproved: tuple[str, ...] = ()


NOT_TRACED = "what may be summed in another order is not known: the model could not be traced outside of DDP"
NOT_THIS_PLAN = (
    "what may be summed in another order is not known: the graph that the plan was made for could not be "
    "traced again outside of DDP"
)
NO_LAYOUTS = (
    "which gradients cross a cut in another layout is not known: a graph of the model could not be run on "
    "fake tensors"
)


def reassociated(bench: Bench, mode: str, plan: Plan | None) -> Reassociated:
    """Trace a subject's model and find what a mode may re-associate.

    Args:
        bench: whose subject is meant.
        mode: name of the mode: torch's optimizer and ddpopt's split cut graphs; inline, and so ``auto``, cuts
            those that cannot be compiled inline.
        plan: ddpopt's plan in force, if there is one.

    Returns:
        Values and parameters; none if the mode computes bit by bit what eager does, or if nothing can be
        proved, as where the model cannot be traced outside of its DDP module.
    """
    try:
        strategy: Strategy = "inline" if mode == "ddpopt-inline" else "split"
        traced = [_traced(bench, model, strategy) for model in _variants(bench.subject.adapted.model)]
    except UsageError:
        return Reassociated(unproved=(NOT_TRACED,))
    found = [_of_forwards(one) for one in traced] if bench.subject.option.forwards > 1 else []
    if mode in ("ddpopt-split", "ddpopt-inline") and plan is not None:
        found.append(_of_plan(traced, plan, symbolic=_sizes_change(bench)))
    if mode == "torch":
        found += [_of_cuts(one, None, symbolic=_sizes_change(bench)) for one in traced]
    return together(found)


def _traced(bench: Bench, model: nn.Module, strategy: Strategy) -> Capture:
    """The graphs of a model, under the bucket limits that the plan was made for: graphs depend on them."""
    case = bench.subject.adapted
    args, kwargs = case.inputs(bench.rank, 0)
    given = bench.subject.option.arguments(case, model)
    limits = {name: value for name, value in given.items() if name in DDP_ARGUMENTS_OF_LIMITS}
    return capture(model, *args, strategy=strategy, **kwargs, **limits)


def _sizes_change(bench: Bench) -> bool:
    """Whether shapes or integers differ among the inputs of the steps: Dynamo then makes symbols of sizes."""
    inputs = (bench.subject.adapted.inputs(bench.rank, step) for step in range(bench.subject.steps))
    return len({_sizes(given) for given in inputs}) > 1


def _sizes(inputs: object) -> tuple[object, ...]:
    """Touches a private name of torch 2.11 to 2.13, by which DDP finds tensors in dataclasses too."""
    shapes = [tensor.shape for tensor in _find_tensors(inputs)]  # type: ignore[no-untyped-call]  # torch's
    return (*shapes, *(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, int)))


def _variants(make: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    """The model, once for each way in which an option may have it run: its extra parameter used, or not."""
    model = make()
    yield model
    if hasattr(model, "uses_extra"):
        unused = make()
        set_extra(unused, used=False)
        yield unused


def together(found: Sequence[Reassociated]) -> Reassociated:
    """What any rank or graph may sum in another order: all ranks then judge alike."""
    return Reassociated(
        " and ".join(dict.fromkeys(one.why for one in found if one.why)),
        tuple(dict.fromkeys(value for one in found for value in one.values)),
        frozenset[str]().union(*(one.reached for one in found)),
        tuple(dict.fromkeys(reason for one in found for reason in one.unproved)),
    )


def _of_plan(traced: Sequence[Capture], plan: Plan, *, symbolic: bool) -> Reassociated:
    """What a plan's cuts move in the graphs that it was made for: in each, or where inline had to cut."""
    if not any(_places(one, plan) for one in traced):
        return Reassociated()
    for one in traced:
        if _fits(one, plan):
            return _of_cuts(one, plan, symbolic=symbolic)
    return Reassociated(unproved=(NOT_THIS_PLAN,))


def _places(traced: Capture, plan: Plan | None) -> dict[int, int]:
    """The graphs that are cut, and as which of the plan's graphs each counts; without a plan all may be."""
    if plan is None:
        return dict.fromkeys(range(len(traced.graphs)), 0)
    return {index: place for place, index in enumerate(traced.planned) if not traced.graphs[index].inline}


def _of_cuts(traced: Capture, plan: Plan | None, *, symbolic: bool) -> Reassociated:
    """What the cuts of a plan move; without one, what cuts move that nobody knows: they may be anywhere."""
    sums: dict[int, Sequence[str]] = {}
    layouts: dict[int, Sequence[str]] = {}
    unproved = False
    for index, place in _places(traced, plan).items():
        gm = traced.graphs[index].gm
        sums[index] = _repeated(gm) if plan is None else reassociated_values(gm, plan, place)
        relaid = relaid_values(gm, plan, place, symbolic=symbolic)
        layouts[index], unproved = relaid or (), unproved or relaid is None
    whose = "torch's cuts" if plan is None else "the cuts of the plan"
    may = " may" if plan is None else ""
    why = f"gradients cross {whose} in another layout, so that sums over them have another order"
    found = [_moved(f"{whose}{may} sum in another order", traced, sums), _moved(why, traced, layouts)]
    return replace(together(found), unproved=(NO_LAYOUTS,) if unproved else ())


def _fits(traced: Capture, plan: Plan) -> bool:
    """Whether a plan divides just the nodes of the graphs that it is about."""
    planned = Counter((segment.graph, name) for segment in plan.segments for name in segment.nodes)
    graphs = [traced.graphs[index] for index in traced.planned]
    nodes = ((place, node.name) for place, graph in enumerate(graphs) for node in body_nodes(graph.gm.graph))
    return planned == Counter(nodes)


def _of_forwards(traced: Capture) -> Reassociated:
    """Each of several compiled forwards sums over its own uses of a parameter first."""
    uses = [use for of_graph in traced.uses for use in of_graph]
    counts = Counter(use.spec.name for use in uses for _ in use.readers)
    names = tuple(name for name, count in counts.items() if count > 1)
    return Reassociated("each forward sums over its own uses first", names, frozenset(names))


def _moved(why: str, traced: Capture, moved: Mapping[int, Sequence[str]]) -> Reassociated:
    """The parameters whose gradients are computed from those of some values of each graph."""
    reached: set[str] = set()
    for index, names in moved.items():
        if names:
            # Gradients flow from later graphs into earlier ones.
            reached |= {use.spec.name for earlier in traced.uses[:index] for use in earlier}
            reached |= _dependent(traced.graphs[index].gm.graph, traced.uses[index], names)
    values = tuple(name for names in moved.values() for name in names)
    return Reassociated(why if values else "", values, frozenset(reached))


def _repeated(gm: fx.GraphModule) -> list[str]:
    """Values that several operations read, each of which sends a gradient back, or that are returned too."""
    readers = [*gradient_carriers(gm.graph), gm.graph.output_node()]
    counts = Counter(source for node in readers for source in node.all_input_nodes)
    return [node.name for node, count in counts.items() if count > 1 and requires_grad(example_value(node))]


def _dependent(graph: fx.Graph, uses: Sequence[ParamUse], moved: Sequence[str]) -> set[str]:
    """The parameters read on the way to a value, by what writes to its memory too, or that are the value."""
    found = [node for node in graph.nodes if node.name in moved]
    ahead = dict.fromkeys(found)
    memory = {storage for node in found for storage in storages(node)}
    for node in reversed(graph.nodes):
        written = {storage for source in mutated_inputs(node) for storage in storages(source)}
        if node in ahead or not memory.isdisjoint(written):
            ahead |= dict.fromkeys([node, *node.all_input_nodes])
            memory.update(storage for source in node.all_input_nodes for storage in storages(source))
    own = [user for node in found if node.op in ("placeholder", "get_attr") for user in node.users]
    places = {node: place for place, node in enumerate(body_nodes(graph))}
    readers = {places[node] for node in [*ahead, *own] if node in places}
    return {use.spec.name for use in uses if readers.intersection(use.readers)}
