"""Dynamo's graph of a step as a graph of aten operators, in which gradients that DDP averages are marked.

Autograd runs while the operators are recorded, so they are those of an eager step, in their order.
Accumulations move up to where their gradient is ready, as eager's autograd runs them.

Invariant: the graph computes what Dynamo's does, and takes and returns the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.graph.drawing import AS_EAGER
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import CHECKPOINT, by_storage, read_storages, storages
from ddpopt.planning.plan import Plan
from ddpopt.step.accumulation import MARK
from ddpopt.step.parallel import Averaging, Own, Parallel
from ddpopt.step.replicas import AVERAGE, SYNCHRONIZED, Averaged, Known, Replica
from ddpopt.step.settings import INSTEAD, WHAT
from ddpopt.step.state import StepState
from ddpopt.step.tracing import Seen
from ddpopt.step.unused import FILLED, reached_from

torch.library.define("ddpopt::numbered", "(Tensor gradient, int accumulation) -> Tensor")
torch.library.impl("ddpopt::numbered", "default", lambda gradient, _: gradient.clone())
NUMBERED: Any = torch.ops.ddpopt.numbered.default
"""Marks a gradient before and after the accumulation with a number."""


@dataclass
class CapturedStep:
    """A captured step.

    Attributes:
        gm: the graph, in which each averaged gradient passes through ``ddpopt::average``.
        replicas: the modules.
        slots: the parameters that are averaged, in ready order; the second arguments of ``ddpopt::average``.
        averaging: which of its accumulations average.
        tensors: those of its inputs that are tensors, by the name of their placeholder.
        plans: the buckets of each module; empty until they are planned.
        state: what passes add to the step, in all of its graphs.
        added: the names of what they add to this graph, in the order of its last inputs.
    """

    gm: fx.GraphModule
    replicas: tuple[Replica, ...]
    slots: tuple[Averaged, ...]
    averaging: Averaging
    tensors: Mapping[str, Tensor]
    plans: tuple[Plan, ...] = ()
    state: StepState = field(default_factory=StepState)
    added: tuple[str, ...] = ()


def record_step(
    gm: fx.GraphModule, inputs: Sequence[Any], seen: Seen, parallel: Parallel, near: Own
) -> CapturedStep:
    """Record the operators of a step.

    Args:
        gm: Dynamo's graph.
        inputs: its inputs.
        seen: the DDP modules and optimizers of the step.
        parallel: how its modules are data-parallel.
        near: the modules that its function can read.

    Raises:
        UsageError: a gradient is missing or reduced twice, the step reads no parameter of an optimizer, or
            has no module that can be trained so.
        UnsupportedError: DDP's first iteration would differ from the others.
    """
    replicas = parallel.replicas([*seen.replicas.values()], near, inputs)
    known = slots_of(replicas)
    averaging = parallel.averaging(known, replicas, seen.forwards)
    recorded, averaged = _recorded(gm, inputs, averaging)
    slots = _mark(recorded.graph, averaged, averaging)
    _require_own_optimizers(seen, {*known, *map(id, inputs)})
    averaging.finish()
    recorded.recompile()
    named = zip(recorded.graph.find_nodes(op="placeholder"), inputs, strict=True)
    tensors = {node.name: value for node, value in named if isinstance(value, Tensor)}
    return CapturedStep(recorded, replicas, slots, averaging, tensors)


def slots_of(replicas: Iterable[Replica]) -> Known:
    """What modules average, by ``id`` of the parameter.

    Raises:
        UnsupportedError: a module has an option, or a parameter, that a step does not support.
        UsageError: its parameters were replaced.
    """
    found: dict[int, list[Averaged]] = {}
    for replica in replicas:
        parameters = dict(replica.module.named_parameters())
        for spec in replica.specs():
            if spec.sparse:
                raise UnsupportedError(f"{WHAT}: {spec.name!r} has sparse gradients; {INSTEAD}")
            key = id(parameters[spec.name])
            found.setdefault(key, []).append(Averaged(replica, spec, (key, replica.group.group_name)))
    return found


@dataclass
class _Accumulations:
    """The accumulations of a step, in their order.

    Attributes:
        real: ``id`` of each input, by that of its fake tensor.
        averaging: what averages each.
        averaged: for each accumulation, what averages its gradient.
        begun: ``id`` of the parameters whose accumulation has begun, and the number of each.
    """

    real: Mapping[int, int]
    averaging: Averaging
    averaged: list[list[Averaged]] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)

    def number(self, parameter: Tensor) -> int:
        """The number of the accumulation that begins or ends for a parameter."""
        key = self.real.get(id(parameter), 0)  # the same object, if an operator wrote to it before
        if key in self.begun:
            return self.begun.pop(key)
        self.averaged.append(self.averaging.averaging(key))
        self.begun[key] = len(self.averaged) - 1
        return self.begun[key]


class _RecordingInterpreter(fx.Interpreter):
    """Runs Dynamo's graph; what a checkpoint would compute again is kept, as everything in the graph is."""

    def __init__(self, gm: fx.GraphModule, accumulations: _Accumulations) -> None:
        super().__init__(gm)
        self._accumulations = accumulations

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call."""
        averaging = self._accumulations.averaging
        if target is CHECKPOINT:
            return _RecordingInterpreter(args[0], self._accumulations).run(*args[1:])
        if target is SYNCHRONIZED:
            module, outputs, _ = args
            reached = {self._accumulations.real.get(each, 0) for each in reached_from(outputs)}
            return averaging.forward(module, outputs, reached)
        if target is MARK:
            parameter, gradient = args
            return NUMBERED(gradient, self._accumulations.number(parameter))
        if target is torch.autograd.grad:
            averaging.backward()
        if target is torch.ops.ddpopt.opaque and torch.is_autocast_enabled(args[1][-1].device.type):
            raise UsageError("opaque: autocast does not reach the module; call it outside of autocast")
        return super().call_function(target, args, kwargs)


def _recorded(
    gm: fx.GraphModule, inputs: Sequence[Any], averaging: Averaging
) -> tuple[fx.GraphModule, list[list[Averaged]]]:
    """The graph of operators, and what averages the gradient of each accumulation."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    context: Any = TracingContext.get()
    traced = [node.meta["example_value"] for node in placeholders]
    fakes = [_fake(context, each, value) for each, value in zip(traced, inputs, strict=True)]
    real = {id(fake): id(value) for fake, value in zip(fakes, inputs, strict=True)}
    accumulations = _Accumulations(real, averaging)
    interpreter = _RecordingInterpreter(gm, accumulations)
    torch.clear_autocast_cache()
    with context.fake_mode, torch.autograd.set_multithreading_enabled(False), torch.enable_grad():
        found: fx.GraphModule = make_fx(interpreter.run, AS_EAGER)(*fakes)
    torch.clear_autocast_cache()
    for node, given in zip(found.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node._rename(given.name)
        node.target = node.name
    return found, accumulations.averaged


def _fake(context: Any, traced: Any, value: Any) -> Any:
    """A fake tensor as the backend's, which it would use again, with an autograd history of its own."""
    if not isinstance(value, Tensor):
        return traced
    known = context.tensor_to_context.get(value)
    source = None if known is None else known.tensor_source
    fake: Any = context.fake_mode.from_tensor(value, symbolic_context=known, source=source)
    fresh = fake.detach()
    fresh.item_memo = fake.item_memo
    return fresh.requires_grad_(value.requires_grad)


def _mark(
    graph: fx.Graph, averaged_by: Sequence[Sequence[Averaged]], averaging: Averaging
) -> tuple[Averaged, ...]:
    """Replace the marks of accumulations by those of averaged gradients, where these are ready."""
    slots: list[Averaged] = []
    numbered: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=NUMBERED):
        numbered.setdefault(node.args[1], []).append(node)
    pairs = [(begin, end) for begin, end in numbered.values()]
    if averaging.only_if_read:
        averaged_by = _only_read(graph, pairs, averaged_by)
    _zeros_first(graph, [begin.args[0] for (begin, _), by in zip(pairs, averaged_by, strict=True) if by])
    order = {node: place for place, node in enumerate(graph.nodes)}
    holding = by_storage(graph.nodes)
    # these may share a storage, but no memory
    accumulating = {each for begin, end in pairs for each in (begin, *_until(begin, end), *end.users)}
    for begin, end in sorted(pairs, key=lambda pair: order[pair[0].args[0]]):
        gradient: Any = end.args[0]
        number: Any = end.args[1]
        for averaged in averaged_by[number]:
            if averaged in slots:
                raise UsageError(
                    f"{WHAT}: two backward passes of one step reduce the gradient of "
                    f"{averaged.spec.name!r} of {averaged.replica.name}. {averaging.twice}"
                )
            with graph.inserting_before(end):
                gradient = graph.call_function(AVERAGE, (gradient, len(slots)))
            gradient.meta = dict(end.meta)
            slots.append(averaged)
        end.replace_all_uses_with(gradient)
        begin.replace_all_uses_with(begin.all_input_nodes[0])
        if averaged_by[number]:
            _move_up(begin, gradient, holding, accumulating)
        graph.erase_node(end)
        graph.erase_node(begin)
    return tuple(slots)


def _only_read(
    graph: fx.Graph,
    pairs: Sequence[tuple[fx.Node, fx.Node]],
    averaged_by: Sequence[Sequence[Averaged]],
) -> list[Sequence[Averaged]]:
    """What averages each accumulation: nothing, if only the parameter's next accumulation reads the sum."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    holding = by_storage(graph.nodes)
    of_parameter: dict[int, list[int]] = {}
    for number, averaged in enumerate(averaged_by):
        for key in {each.sent[0] for each in averaged}:
            of_parameter.setdefault(key, []).append(number)
    found = [*averaged_by]
    for numbers in of_parameter.values():
        until = [order[pairs[number][0]] for number in numbers[1:]]
        for number, stop in zip(numbers, [*until, len(order)], strict=True):
            begin, end = pairs[number]
            read = {key for node in _until(begin, end) for key in read_storages(node)}
            stored = [each for each in end.users if read.intersection(written_storages(each))]
            held = [each for node in (end, *stored) for key in storages(node) for each in holding[key]]
            touching = {each for node in held for each in (node, *node.users)} - {*stored}
            between = range(order[end] + 1, stop)
            is_left = stop == len(order) and any(each.op == "placeholder" for each in held)
            if not is_left and not any(order[each] in between for each in touching):
                found[number] = ()
    return found


def _zeros_first(graph: fx.Graph, averaged: Sequence[Any]) -> None:
    """Make zeros of gradients that only other ranks have, before the first gradient of this one is ready.

    Args:
        graph: the graph.
        averaged: the gradients that are averaged.
    """
    filled = list(graph.find_nodes(op="call_function", target=FILLED.default))
    first = min((each for each in averaged if each not in filled), default=None)
    for node in filled:
        assert first is not None  # a parameter is filled only in a backward that reaches others
        first.prepend(node)
        node.target = torch.ops.aten.zeros_like.default


def _move_up(
    begin: fx.Node, last: fx.Node, holding: Mapping[int, Sequence[fx.Node]], accumulating: set[fx.Node]
) -> None:
    """Move an accumulation to where all that it reads is ready, and all that it overwrites was read."""
    moved = _until(begin, last)
    own = {key for node in moved for key in written_storages(node)}
    before: set[Any] = {begin.args[0], *(each for node in moved for each in node.all_input_nodes)}
    for key in {key for node in moved for key in read_storages(node)}:
        touching = {each for held in holding.get(key, ()) for each in (held, *held.users)} - accumulating
        before |= {each for each in touching if key in own or key in written_storages(each)}
    source: Any = max(each for each in before if each < begin)
    while source.next.op == "placeholder":
        source = source.next
    for node in moved:
        source.append(node)
        source = node


def _until(begin: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes after the first one."""
    found: list[fx.Node] = []
    while begin is not last:
        begin = begin.next
        found.append(begin)
    return found


def _require_own_optimizers(seen: Seen, read: set[int]) -> None:
    """Check that optimizers update parameters that the step reads; these are given by ``id``."""
    for name, optimizer in seen.optimizers.values():
        if not any(id(each) in read for group in optimizer.param_groups for each in group["params"]):
            modules = ", ".join(replica.name for replica in seen.replicas.values())
            raise UsageError(f"{WHAT}: {name} holds no parameter of {modules}; build it from theirs")
