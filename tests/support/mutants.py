"""Ways to get a cut wrong: each names every edit of a stitched module, or of a plan, that is it.

The proof has to reject them (tests/unit/proof), the properties to find them where partition makes them
(tests/property), and the judge to find them where they are trained with (tests/selftest).

Some edits change nothing that anybody could see (a value cloned that nothing writes to): those may be
accepted, and no others.
"""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ddpopt.planning.plan import Plan, Segment

Edit = Callable[[], object]
Edits = Callable[[fx.GraphModule], Iterator[Edit]]
Where = Callable[..., bool]

GRAD = torch._C._set_grad_enabled
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
COMPUTES = ("call_function", "call_method")


@dataclass(frozen=True)
class Mutant:
    """One way to get a cut wrong.

    Attributes:
        name: unique.
        edits: every edit of a stitched module that is it.
        unseen: whether the edited module may compute the same, and is wrong all the same.
    """

    name: str
    edits: Edits
    unseen: bool = False

    def apply(self, stitched: fx.GraphModule, choose: Callable[[int], int] = lambda _: 0) -> bool:
        """Do the edit that `choose` names of so many; whether there was one to do."""
        edits = list(self.edits(stitched))
        if edits:
            edits[choose(len(edits))]()
        return bool(edits)


def anywhere(*_: object) -> bool:
    return True


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of segments, in the order in which they run."""
    return [node for node in graph.nodes if node.op == "call_module"]


def body(call: fx.Node) -> fx.GraphModule:
    """The segment that is called."""
    owner: Any = call.graph.owning_module
    found: fx.GraphModule = getattr(owner, str(call.target))
    return found


def inputs(call: fx.Node) -> list[fx.Node]:
    """The inputs of the segment that is called."""
    return list(body(call).graph.find_nodes(op="placeholder"))


def segments(stitched: fx.GraphModule) -> list[fx.GraphModule]:
    return list(map(body, calls(stitched.graph)))


def steps(stitched: fx.GraphModule, where: Where = anywhere) -> Iterator[fx.Node]:
    """The nodes of all segments that compute something."""
    for segment in segments(stitched):
        yield from (node for node in segment.graph.nodes if node.op in COMPUTES and where(node))


def recompile(stitched: fx.GraphModule) -> None:
    for module in (stitched, *segments(stitched)):
        module.graph.lint()
        module.recompile()


def likeness(node: fx.Node) -> object:
    """Equal for values that may stand for one another."""
    value = node.meta.get("example_value")
    return (str(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def alike(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    return [n for n in others if n is not node and likeness(n) is not None and likeness(n) == likeness(node)]


def is_switch(node: fx.Node) -> bool:
    return node.target in (GRAD, ENTER, EXIT)


def is_crossing(source: fx.Node) -> bool:
    """Whether a value that a segment is given is another segment's."""
    return source.op not in ("placeholder", "get_attr")


# --- which nodes run, and where ------------------------------------------------------------------


def left_out(stitched: fx.GraphModule, where: Where = anywhere) -> Iterator[Edit]:
    for node in steps(stitched, where):
        yield from (partial(_replace, node, source) for source in alike(node, node.all_input_nodes))


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def dead_code_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    yield lambda: [segment.graph.eliminate_dead_code() for segment in segments(stitched)]


def run_twice(stitched: fx.GraphModule, where: Where = anywhere) -> Iterator[Edit]:
    for node in steps(stitched, where):
        yield partial(_add_after, node, partial(node.graph.node_copy, node))


def _add_after(node: fx.Node, create: Callable[[], object]) -> None:
    with node.graph.inserting_after(node):
        create()


def swapped(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        if node.next.op in COMPUTES and node not in node.next.all_input_nodes:
            yield partial(node.next.append, node)


def run_early(stitched: fx.GraphModule) -> Iterator[Edit]:
    """What draws or writes runs as soon as its operands are there."""
    for node in steps(stitched, lambda n: "dropout" in n.name or n.target in ("add_", "lerp_")):
        reached = node
        while reached.prev.op in COMPUTES and reached.prev not in node.all_input_nodes:
            reached = reached.prev
        if reached is not node:
            yield partial(reached.prepend, node)


def run_late(stitched: fx.GraphModule, where: Where = anywhere) -> Iterator[Edit]:
    """What writes to a value runs when all else of its segment has run."""
    for node in steps(stitched, where):
        for source in alike(node, node.all_input_nodes):
            yield partial(_run_last, node, source)


def _run_last(node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.output_node().prepend(node)


def in_next_segment(gm: fx.GraphModule, where: Where = anywhere, *, in_both: bool = False) -> Iterator[Edit]:
    for former, latter in pairwise(calls(gm.graph)):
        there = [node.name for node in body(latter).graph.nodes if node.op in COMPUTES]
        for node in body(former).graph.nodes:
            stays = [*alike(node, node.all_input_nodes), None]
            alone = all(user.op == "output" for user in node.users)
            if node.op not in COMPUTES or node.name in there or not where(node):
                continue
            if in_both or alone or stays[0]:
                yield partial(_move_on, node, former, latter, None if in_both else stays[0], in_both)


def _move_on(node: fx.Node, former: fx.Node, latter: fx.Node, stays: fx.Node | None, in_both: bool) -> None:
    """Run a node first thing in the segment after its own; there, `stays` is read in its place."""
    copies = {source: hand_on(source, former, latter) for source in node.all_input_nodes}
    graph, given = body(latter).graph, inputs(latter)
    with graph.inserting_after(given[-1]) if given else graph.inserting_before():
        again = graph.node_copy(node, copies.__getitem__)
    for each in (each for each in given if each.name == node.name):
        each.replace_all_uses_with(again)
        each.name = f"{node.name}_as_it_was"
    again.name = node.name
    if not in_both:
        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, lambda n: stays if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n: stays if n is node else n)
        node.graph.erase_node(node)


def hand_on(value: fx.Node, former: fx.Node, latter: fx.Node) -> fx.Node:
    """Give a segment a value of an earlier one, unless it has it; the input that is this value."""
    graph, given = body(latter).graph, inputs(latter)
    for known in given:
        if known.name == value.name:
            return known
    if value.op == "placeholder":
        passed = former.args[value.graph.find_nodes(op="placeholder").index(value)]
    else:
        output = value.graph.output_node()
        results: Any = output.args[0]
        output.args = ((*results, value),)
        with latter.graph.inserting_before(latter):
            passed = latter.graph.call_function(operator.getitem, (former, len(results)))
        passed.meta["example_value"] = value.meta.get("example_value")
    with graph.inserting_after(given[-1]) if given else graph.inserting_before():
        made: fx.Node = graph.placeholder(value.name)
    made.meta, made._dynamo_source = dict(value.meta), getattr(value, "_dynamo_source", None)
    latter.args = (*latter.args, passed)
    return made


def handed_on(stitched: fx.GraphModule) -> Iterator[Edit]:
    """What a segment takes again is given to it as the earlier segment has it."""
    for place, latter in enumerate(calls(stitched.graph)):
        again = {node.name: node for node in body(latter).graph.nodes if node.op in COMPUTES}
        for former in calls(stitched.graph)[:place]:
            for node in body(former).graph.nodes:
                if node.op in COMPUTES and node.name in again and not is_switch(node):
                    yield partial(_give_instead, again.pop(node.name), node, former, latter)


def _give_instead(again: fx.Node, node: fx.Node, former: fx.Node, latter: fx.Node) -> None:
    _replace(again, hand_on(node, former, latter))


def switched(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        for enabled in (False, True):
            yield partial(_add_after, node, partial(node.graph.call_function, GRAD, (enabled,)))


def switch_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    yield from (partial(_erase, node) for node in steps(stitched, is_switch))


def _erase(node: fx.Node) -> None:
    for user in list(node.users):
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def segments_swapped(stitched: fx.GraphModule) -> Iterator[Edit]:
    """The second of two segments runs on the first one's input, and that one on what comes of it."""
    for former, latter in pairwise(calls(stitched.graph)):
        made_later = [node for node in latter.all_input_nodes if node > former]
        for crossing in filter(is_crossing, latter.all_input_nodes):
            results = [user for user in latter.users if user.op == "call_function"]
            in_a_row = crossing in former.users and made_later == [crossing]
            for given in alike(crossing, former.all_input_nodes):
                if results and in_a_row and not is_crossing(given):
                    yield partial(_swap_segments, former, latter, crossing, given, results[0])


def _swap_segments(former: fx.Node, latter: fx.Node, value: fx.Node, given: fx.Node, result: fx.Node) -> None:
    latter.replace_input_with(value, given)
    result.replace_all_uses_with(value)
    for node in (latter, result):
        former.prepend(node)
    former.replace_input_with(given, result)


# --- what they are called with -------------------------------------------------------------------


def reads_another(stitched: fx.GraphModule) -> Iterator[Edit]:
    for segment in segments(stitched):
        yield from _reading_another(segment.graph, ("call_function", "call_method", "output"))


def given_another(stitched: fx.GraphModule, where: Where = anywhere) -> Iterator[Edit]:
    yield from _reading_another(stitched.graph, ("call_module", "call_method", "output"), where)


def _reading_another(graph: fx.Graph, ops: tuple[str, ...], where: Where = anywhere) -> Iterator[Edit]:
    earlier: list[fx.Node] = []
    for node in graph.nodes:
        for source in node.all_input_nodes if node.op in ops else ():
            for other in alike(source, earlier):
                if where(node, source, other):
                    yield partial(node.replace_input_with, source, other)
        earlier.append(node)


def inputs_exchanged(stitched: fx.GraphModule) -> Iterator[Edit]:
    """Two segments are given each other's parameter."""
    for former, latter in pairwise(calls(stitched.graph)):
        for one in (node for node in former.all_input_nodes if node not in latter.all_input_nodes):
            for other in alike(one, latter.all_input_nodes):
                if not is_crossing(one) and not is_crossing(other) and other not in former.all_input_nodes:
                    yield partial(_exchange, former, latter, one, other)


def _exchange(former: fx.Node, latter: fx.Node, one: fx.Node, other: fx.Node) -> None:
    former.replace_input_with(one, other)
    latter.replace_input_with(other, one)


def called_otherwise(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched, lambda node: not is_switch(node)):
        yield partial(setattr, node, "target", torch.erf if node.op == "call_function" else "erf")
        if node.op == "call_function":
            yield partial(_call_as_method, node)


def _call_as_method(node: fx.Node) -> None:
    node.op, node.target = "call_method", "erf"


def literal_of_another_value(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        for place, value in enumerate(node.args):
            yield from (partial(node.update_arg, place, other) for other in _others(value))
        for key, value in node.kwargs.items():
            yield from (partial(node.update_kwarg, key, other) for other in _others(value))


def _others(value: object) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value / 2 + 1
    elif isinstance(value, torch.dtype):
        yield torch.float64 if value is not torch.float64 else torch.float32


def keyword_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        for key in node.kwargs:
            rest = {name: value for name, value in node.kwargs.items() if name != key}
            yield partial(setattr, node, "kwargs", rest)


def another_attribute(stitched: fx.GraphModule) -> Iterator[Edit]:
    for segment in segments(stitched):
        for node in segment.graph.find_nodes(op="get_attr"):
            if "." not in str(node.target):
                yield partial(_hold_a_copy, segment, str(node.target))


def _hold_a_copy(segment: fx.GraphModule, name: str) -> None:
    setattr(segment, name, copy.deepcopy(getattr(segment, name)))


def argument_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    yield from (partial(setattr, call, "args", call.args[:-1]) for call in calls(stitched.graph) if call.args)


def unread_input_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    for call in calls(stitched.graph):
        for place, node in enumerate(inputs(call)):
            if not node.users:
                yield partial(_leave_input_out, call, node, place)


def _leave_input_out(call: fx.Node, node: fx.Node, place: int) -> None:
    call.args = (*call.args[:place], *call.args[place + 1 :])
    node.graph.erase_node(node)


def inputs_in_another_order(stitched: fx.GraphModule) -> Iterator[Edit]:
    for one, other in pairwise(stitched.graph.find_nodes(op="placeholder")):
        yield partial(other.append, one)


def input_with_a_default(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in reversed(stitched.graph.find_nodes(op="placeholder")):
        yield partial(setattr, node, "args", (None,))


def other_outputs(stitched: fx.GraphModule) -> Iterator[Edit]:
    output = stitched.graph.output_node()
    results: Any = output.args[0]
    if tuple(reversed(results)) != tuple(results):
        yield partial(setattr, output, "args", (tuple(reversed(results)),))
    yield partial(setattr, output, "args", (tuple(results[:-1]),))


# --- copies at cuts ------------------------------------------------------------------------------


def through(change: str | Callable[..., Any], where: Where = anywhere, *, early: bool = False) -> Edits:
    """A segment is given what a method or a function makes of a value.

    Args:
        change: the method or function.
        where: told the call and the value.
        early: whether that is made before the call before.
    """

    def edits(stitched: fx.GraphModule) -> Iterator[Edit]:
        order = [*calls(stitched.graph), stitched.graph.output_node()]
        for place, call in enumerate(order):
            for source in filter(likeness, call.all_input_nodes):
                if where(call, source) and place >= early and not (early and is_crossing(source)):
                    yield partial(_pass_through, call, source, change, order[place - early])

    return edits


def _pass_through(call: fx.Node, source: fx.Node, change: str | Callable[..., Any], before: fx.Node) -> None:
    graph: Any = call.graph
    with graph.inserting_before(before):
        create = graph.call_method if isinstance(change, str) else graph.call_function
        changed = create(change, (source,))
    changed.meta.update(source.meta)
    call.replace_input_with(source, changed)


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(value.dtype)


def copy_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in stitched.graph.nodes:
        if node.op == "call_method" and node.target in ("detach", "requires_grad_"):
            yield partial(_replace, node, node.all_input_nodes[0])


def input_returned(stitched: fx.GraphModule) -> Iterator[Edit]:
    for segment in segments(stitched):
        output = segment.graph.output_node()
        results: Any = output.args[0]
        for node in segment.graph.find_nodes(op="placeholder"):
            yield partial(setattr, output, "args", ((*results, node),))


# --- what tracing left on them -------------------------------------------------------------------


def _described(stitched: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Nodes with each key of the metadata that they have to keep."""
    own = {*stitched.graph.find_nodes(op="placeholder"), *steps(stitched)}
    for segment in (stitched, *segments(stitched)):
        for node in segment.graph.nodes:
            if node in own:
                yield from ((node, key) for key in node.meta if node.target is not operator.getitem)
            elif node.op == "placeholder" and "example_value" in node.meta:
                yield node, "example_value"


def note_lost(stitched: fx.GraphModule) -> Iterator[Edit]:
    yield from (partial(node.meta.pop, key) for node, key in _described(stitched))


def note_of_another(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node, key in _described(stitched):
        kind = type(node.meta[key])
        others: dict[Any, Any] = {str: "another", dict: {"another": 1}, list: ["another"], tuple: ()}
        yield partial(node.meta.__setitem__, key, others.get(kind, others))


def source_lost(stitched: fx.GraphModule) -> Iterator[Edit]:
    for module in (stitched, *segments(stitched)):
        for node in module.graph.find_nodes(op="placeholder"):
            if getattr(node, "_dynamo_source", None) is not None:
                yield partial(setattr, node, "_dynamo_source", None)


MUTANTS = (
    Mutant("a node is left out", left_out),
    Mutant("dead code is left out", dead_code_left_out),
    Mutant("a node runs twice", run_twice),
    Mutant("a node runs in two segments", partial(in_next_segment, in_both=True)),
    Mutant("a node runs in the next segment", in_next_segment),
    Mutant("two nodes are swapped", swapped),
    Mutant("what draws or writes runs early", run_early),
    Mutant("what writes runs late", run_late),
    Mutant("two segments are swapped", segments_swapped),
    Mutant("what is taken again is passed on", handed_on),
    Mutant("grad mode is switched", switched),
    Mutant("a switch is left out", switch_left_out),
    Mutant("a node reads another value", reads_another),
    Mutant("a node calls something else", called_otherwise),
    Mutant("a literal is another", literal_of_another_value),
    Mutant("a keyword is left out", keyword_left_out),
    Mutant("an attribute is another", another_attribute, unseen=True),
    Mutant("a segment is given another value", given_another),
    Mutant("two segments are given each other's parameter", inputs_exchanged),
    Mutant("a segment gets one argument too few", argument_left_out, unseen=True),
    Mutant("a segment is not given what it does not read", unread_input_left_out),
    Mutant("inputs are in another order", inputs_in_another_order, unseen=True),
    Mutant("an input has a default", input_with_a_default, unseen=True),
    Mutant("outputs are others", other_outputs, unseen=True),
    Mutant("a segment is given a detached value", through("detach")),
    Mutant("a segment is given a copy", through("clone")),
    Mutant("a segment is given a rounded value", through(rounded)),
    Mutant("a copy at a cut is left out", copy_left_out),
    Mutant("a segment returns what it is given", input_returned),
    Mutant("metadata is lost", note_lost, unseen=True),
    Mutant("metadata is another's", note_of_another, unseen=True),
    Mutant("a source is lost", source_lost, unseen=True),
)

# --- plans ---------------------------------------------------------------------------------------

Items = tuple[Any, ...]


def _changed(plan: Plan, listed: str, place: int, **changes: Any) -> Plan:
    """A plan of which one of the buckets, segments or cuts is another."""
    items = list(getattr(plan, listed))
    items[place] = replace(items[place], **changes)
    changed: dict[str, Any] = {listed: tuple(items)}
    return replace(plan, **changed)


def _shorter(items: Items) -> Iterator[Items]:
    """The items without the first one, without the second one, and so on."""
    return (items[:place] + items[place + 1 :] for place in range(len(items)))


def _left_out(plan: Plan) -> Iterator[Plan]:
    """A segment, a cut, or what a segment or a bucket lists."""
    if len(plan.segments) > 1:
        yield replace(plan, segments=plan.segments[:-1])
    yield from (replace(plan, cuts=cuts) for cuts in _shorter(plan.cuts))
    for place, segment in enumerate(plan.segments):
        for held in ("nodes", "params", "buckets"):
            for rest in _shorter(getattr(segment, held)):
                yield _changed(plan, "segments", place, **{held: rest})
    for place, bucket in enumerate(plan.buckets):
        for name, rest in zip(bucket.params, _shorter(bucket.params), strict=True):
            if name not in plan.unread:
                yield _changed(plan, "buckets", place, params=rest)


def _too_much(plan: Plan) -> Iterator[Plan]:
    """A segment more, or a parameter in two buckets."""
    last = plan.segments[-1]
    yield replace(plan, segments=(*plan.segments, Segment(last.index + 1, last.graph, (), (), ())))
    for place, (bucket, other) in enumerate(pairwise(plan.buckets)):
        yield _changed(plan, "buckets", place + 1, params=(*other.params, bucket.params[0]))


def _elsewhere(plan: Plan) -> Iterator[Plan]:
    """A node, a cut, a parameter or a bucket where it does not belong."""
    for place, (before, after) in enumerate(pairwise(plan.segments)):
        *kept, moved = before.nodes
        shorter = _changed(plan, "segments", place, nodes=tuple(kept))
        yield _changed(shorter, "segments", place + 1, nodes=(moved, *after.nodes))
        for node in after.nodes[1:2]:
            yield _changed(plan, "cuts", place, before=node)
    for place, (bucket, other) in enumerate(pairwise(plan.buckets)):
        if bucket.segment != other.segment:
            shorter = _changed(plan, "buckets", place, params=bucket.params[1:])
            yield _changed(shorter, "buckets", place + 1, params=(*other.params, bucket.params[0]))
            swapped = replace(other, index=bucket.index), replace(bucket, index=other.index)
            yield replace(plan, buckets=(*plan.buckets[:place], *swapped, *plan.buckets[place + 2 :]))
    for place, bucket in enumerate(plan.buckets):
        yield _changed(plan, "buckets", place, index=len(plan.buckets))
        for segment in (bucket.segment - 1, bucket.segment + 1):
            if 0 <= segment < len(plan.segments):
                yield _changed(plan, "buckets", place, segment=segment)


PLAN_MUTANTS: tuple[Callable[[Plan], Iterator[Plan]], ...] = (_left_out, _too_much, _elsewhere)
"""By what is wrong, as each one's docstring says: every plan with that wrong in one place."""
