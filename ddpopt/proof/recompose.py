"""Read a graph as a program: steps over terms, whether it is one graph or stitched from segments.

The certificate checks a stitched module by what it computes. So its segments are inlined again here, by
the names of their nodes and the positions of their arguments, regardless of how they were made.

Invariant: shares no code with planning and cutting, and visits each node once.
"""

import itertools
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ddpopt.graph.nodes import MISSING, example_value, fetch
from ddpopt.graph.state import ENTER_AUTOCAST, EXIT_AUTOCAST, GRAD_MODE
from ddpopt.proof.steps import Crossing, GraphSteps, OpenSpan, Original, ProgramState, ProgramStep, example_of
from ddpopt.proof.terms import Copy, Group, Held, Item, Made, Term, Unknown, group, show

CALLS = ("call_function", "call_method", "call_module")


def read_original(original: fx.GraphModule) -> Original:
    """Read the graph that was cut, as a program of one segment with its values by name."""
    nodes = {node.name: node for node in original.graph.nodes}
    walk = _Walk(original, nodes, 0)
    walk.run([Made(node.name) for node in walk.inputs])
    program = GraphSteps(tuple(walk.inputs), tuple(walk.steps), walk.result, {0: walk.state})
    terms = {node.name: term for node, term in walk.values.items()}
    return Original(program, nodes, terms, {step.name: step for step in walk.steps})


def recompose(stitched: fx.GraphModule, original: Original, own: Mapping[int, Container[str]]) -> GraphSteps:
    """Inline the segments of a stitched module again.

    Args:
        stitched: its graph calls segments, picks their outputs, and does nothing else.
        original: the graph that it was cut from.
        own: for each segment, by index and in order, the nodes that should be in it. Used only for
            nodes whose name appears in several segments, and for the kinds of calls that a cut adds.

    Returns:
        The program that the stitched module computes.
    """
    walk = _Stitched(stitched, original, own)
    walk.run([original.terms.get(node.name, Unknown(node.name)) for node in walk.inputs])
    first: dict[str, ProgramStep] = {}
    for step in walk.steps:
        if step.name not in first or step.name in own.get(step.segment, ()):
            first[step.name] = step
    return GraphSteps(
        inputs=tuple(walk.inputs),
        steps=tuple(step for step in walk.steps if first[step.name] is step),
        result=walk.result,
        ends=walk.ends,
        repeats=tuple(step for step in walk.steps if first[step.name] is not step),
        crossings=tuple(walk.crossings),
        returns=walk.returns,
        undefined=tuple(walk.undefined),
        strays=tuple(walk.strays),
    )


class _Walk:
    """Converts one graph to steps; `nodes` are the original's, by name."""

    def __init__(self, module: fx.GraphModule, nodes: Mapping[str, fx.Node], segment: int) -> None:
        self.module = module
        self.nodes = nodes
        self.segment = segment
        self.state = ProgramState()  # as DDP calls the graph, and as each segment is called
        self.where = f"segment {segment}"
        self.inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.steps: list[ProgramStep] = []
        self.values: dict[fx.Node, Term] = {}
        self.undefined: list[str] = []
        self.strays: list[str] = []
        self.result: Term = MISSING

    def run(self, arguments: Sequence[Term]) -> None:
        """Visit all nodes once, with the placeholders bound to `arguments` in order."""
        if len(arguments) != len(self.inputs):
            self.undefined.append(
                f"{self.where}: {len(self.inputs)} inputs expected, {len(arguments)} arguments passed"
            )
        self.values.update(zip(self.inputs, arguments, strict=False))
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = _read_attribute(self.module, node)
            elif node.op == "output":
                self.result = self.term(node.args[0], node)
            elif node.op != "placeholder":
                self.values[node] = self.call(self.read(node))

    def call(self, step: ProgramStep) -> Term:
        """Take one step of the program; return its value."""
        self.take(step)
        picked = _picked(self.nodes, step)
        if picked is MISSING:
            picked = _handed_back(self.nodes, step)
        return Made(step.name) if picked is MISSING else picked

    def take(self, step: ProgramStep) -> None:
        """Record a step and the state after it."""
        self.steps.append(step)
        self.switch(step, step.name)

    def switch(self, step: ProgramStep, opener: str) -> None:
        """Record the state after a step; `opener` names the autocast span that it may open."""
        autocast = self.state.autocast
        if step.callee is ENTER_AUTOCAST:
            self.state = replace(self.state, autocast=(*autocast, OpenSpan(opener, _arguments(step))))
        elif step.callee is EXIT_AUTOCAST and autocast and autocast[-1].opener == _name_of(step.args[0]):
            self.state = replace(self.state, autocast=autocast[:-1])
        elif step.callee is GRAD_MODE:
            self.state = replace(self.state, grad_mode=step.args[0] is True)

    def read(self, node: fx.Node) -> ProgramStep:
        """A computing node as a step, with its arguments as terms."""
        args = tuple(self.term(argument, node) for argument in node.args)
        kwargs = {key: self.term(argument, node) for key, argument in node.kwargs.items()}
        callee = fetch(self.module, str(node.target), MISSING) if node.op == "call_module" else node.target
        reads = {source: self.values.get(source, Unknown(source.name)) for source in node.all_input_nodes}
        return ProgramStep(node, self.segment, callee, args, kwargs, self.state, reads)

    def term(self, argument: object, reader: fx.Node) -> Term:
        """An argument of `reader` as a term."""

        def read(leaf: object) -> Term:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf not in self.values:
                self.undefined.append(f"{self.where}, node {reader.name}: reads {leaf.name} too early")
                return Unknown(leaf.name)
            return self.values[leaf]

        return group(argument, read)


class _Reading(_Walk):
    """Converts one segment to steps of the original.

    A node with the name of an original node is that node. Other nodes allowed are switches of state before
    the first and after the last of these, switches of grad mode around a repeated node, and items of tuples
    anywhere.
    """

    def __init__(
        self, module: fx.GraphModule, original: Original, segment: int, planned: Container[str]
    ) -> None:
        super().__init__(module, original.nodes, segment)
        self.original = original
        calls = [node for node in module.graph.nodes if node.op in CALLS]
        self.own = {node: None for node in calls if self._is_own(node, planned)}
        in_plan = [node.name for node in self.own if node.name in planned] or [node.name for node in self.own]
        self.resumed = original.steps[in_plan[0]].state.autocast if in_plan else ()
        self.left = len(self.own)
        again = {node for node in calls if node.name in original.steps and node.name not in planned}
        adjacent = [(a, b) for pair in itertools.pairwise(calls) for a, b in (pair, pair[::-1])]
        self.around_repeats = {node: None for node, other in adjacent if other in again}

    def call(self, step: ProgramStep) -> Term:
        if step.node in self.own:
            self.left -= 1
            self.take(step)
            return self.original.terms[step.name]
        picked = _picked(self.nodes, step)
        if picked is not MISSING:
            return picked
        if step.callee is operator.getitem and step.name in self.original.steps:
            self.take(step)  # not an item of a tuple but a repeated view of a tensor
            return self.original.terms[step.name]
        if not self._may_switch(step):
            self.strays.append(f"{self.where}, node {step.name}: is not in the original, and no cut needs it")
        opener = self._resumed_opener(step)
        self.switch(step, opener)
        return self.original.terms.get(opener, Unknown(opener))

    def _is_own(self, node: fx.Node, planned: Container[str]) -> bool:
        added_by_cuts = (ENTER_AUTOCAST, EXIT_AUTOCAST, GRAD_MODE, operator.getitem)
        return node.name in self.original.steps and (node.target not in added_by_cuts or node.name in planned)

    def _may_switch(self, step: ProgramStep) -> bool:
        """Whether a cut may need this state switch here."""
        at_start = self.left == len(self.own)
        at_end = self.left == 0
        if step.callee is GRAD_MODE:
            return at_start or at_end or step.node in self.around_repeats
        return (step.callee is ENTER_AUTOCAST and at_start) or (step.callee is EXIT_AUTOCAST and at_end)

    def _resumed_opener(self, step: ProgramStep) -> str:
        """The original's span that a step at the start of a segment reopens; else the step's own label."""
        depth = len(self.state.autocast)
        if step.callee is ENTER_AUTOCAST and depth < len(self.resumed):
            span = self.resumed[depth]
            if span.arguments == _arguments(step):
                return span.opener
        return f"{step.name} of {self.where}"


class _Stitched(_Walk):
    """Converts the graph that calls the segments, and may pass them detached values."""

    def __init__(self, module: fx.GraphModule, original: Original, own: Mapping[int, Container[str]]) -> None:
        super().__init__(module, original.nodes, 0)
        self.where = "the stitched module"
        self.original = original
        self.own = own
        self.ends: dict[int, ProgramState] = {}
        self.crossings: list[Crossing] = []
        self.returns: dict[int, Term] = {}

    def call(self, step: ProgramStep) -> Term:
        if isinstance(step.callee, fx.GraphModule) and not step.kwargs:
            return self._inline(step.callee, step.args)
        match step.callee, step.args:  # only methods are called by a name
            case "detach", (value,):
                return Copy("detach", value, self.segment)
            case "requires_grad_", (Copy(method="detach") as copy,):
                return Copy("detach().requires_grad_", copy.of, copy.before)
        picked = _picked(self.nodes, step)
        if picked is MISSING:
            self.strays.append(f"{self.where}, node {step.name}: is in no segment")
            return Unknown(step.name)
        return picked

    def _inline(self, module: fx.GraphModule, arguments: Sequence[Term]) -> Term:
        inner = _Reading(module, self.original, self.segment, self.own.get(self.segment, ()))
        copies = [term if isinstance(term, Copy) else None for term in arguments]
        terms = [term.of if isinstance(term, Copy) else term for term in arguments]
        inner.run(terms)
        rows = zip(inner.inputs, terms, copies, strict=False)
        self.crossings.extend(Crossing(self.segment, *row) for row in rows)
        self.steps.extend(inner.steps)
        self.undefined.extend(inner.undefined)
        self.strays.extend(inner.strays)
        self.ends[self.segment] = inner.state
        self.returns[self.segment] = inner.result
        self.segment += 1
        return inner.result


def _picked(nodes: Mapping[str, fx.Node], step: ProgramStep) -> Term:
    """The item that a getitem of a tuple or list picks, or `MISSING` if the step is something else."""
    if step.callee is not operator.getitem or len(step.args) != 2:
        return MISSING
    base, index = step.args
    items = base.items if isinstance(base, Group) else example_of(nodes, base)
    if not isinstance(items, (tuple, list)) or type(index) is not int:
        return MISSING
    if not -len(items) <= index < len(items):
        return MISSING
    if isinstance(base, (Made, Item)):
        return Item(base, index % len(items))
    return items[index]


def _handed_back(nodes: Mapping[str, fx.Node], step: ProgramStep) -> Term:
    """The argument that a step writes to and then returns; `MISSING` if it makes a new tensor."""
    value = example_value(step.node)
    if not isinstance(value, torch.Tensor):
        return MISSING
    return next((leaf for leaf in step.written if example_of(nodes, leaf) is value), MISSING)


def _read_attribute(module: fx.GraphModule, node: fx.Node) -> Term:
    value = fetch(module, str(node.target), MISSING)
    return Held(str(node.target), value, node.meta.get("example_value", value))


def _arguments(step: ProgramStep) -> str:
    return ", ".join([*map(show, step.args), *(f"{key}={show(value)}" for key, value in step.kwargs.items())])


def _name_of(term: Term) -> str:
    return term.name if isinstance(term, Made) else getattr(term, "label", "")
