"""Dynamo's graph of a step as a graph of aten operators, in which gradients that DDP averages are marked.

Autograd runs while the operators are recorded, so they are those of an eager step, in their order.
Accumulations move up to where their gradient is ready, as eager's autograd runs them.

Invariant: the graph computes what Dynamo's does, and takes and returns the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.errors import UsageError
from ddpopt.graph.drawing import AS_EAGER
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import CHECKPOINT, by_storage, read_storages
from ddpopt.step.replicas import AVERAGE, Averaged, Replica, require_all_used, slots_of
from ddpopt.step.settings import WHAT
from ddpopt.step.tracing import MARK, Seen


@dataclass
class Captured:
    """A captured step.

    Attributes:
        gm: the graph, in which each averaged gradient passes through ``ddpopt::average``.
        replicas: the DDP modules.
        slots: the parameters that are averaged, in ready order; the second arguments of ``ddpopt::average``.
    """

    gm: fx.GraphModule
    replicas: tuple[Replica, ...]
    slots: tuple[Averaged, ...]


def capture(gm: fx.GraphModule, inputs: Sequence[Any], seen: Seen) -> Captured:
    """Record the operators of a step.

    Args:
        gm: Dynamo's graph.
        inputs: its inputs.
        seen: the modules and optimizers of the step.

    Raises:
        UsageError: a gradient is missing or reduced twice, or the step reads no parameter of an optimizer.
    """
    replicas = tuple(seen.replicas.values())
    recorded, marked = _recorded(gm, inputs)
    known = slots_of(replicas)
    slots = _mark(recorded.graph, marked, known)
    _require_own_optimizers(seen, {*known, *map(id, inputs)})
    require_all_used([each for found in known.values() for each in found], slots)
    recorded.recompile()
    return Captured(recorded, replicas, slots)


class _RecordingInterpreter(fx.Interpreter):
    """Runs Dynamo's graph; what a checkpoint would compute again is kept, as everything in the graph is.

    Attributes:
        marked: the parameter of each mark, as the graph is given it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.marked: list[Any] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call."""
        if target is CHECKPOINT:
            return args[0](*args[1:])
        if target is torch.ops.ddpopt.mark:
            self.marked.append(args[0])  # the same object, if an operator wrote to it before
        if target is torch.ops.ddpopt.opaque and torch.is_autocast_enabled(args[1][-1].device.type):
            raise UsageError("opaque: autocast does not reach the module; call it outside of autocast")
        return super().call_function(target, args, kwargs)


def _recorded(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[int]]:
    """The graph of operators, and ``id`` of the parameter of each mark."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    context: Any = TracingContext.get()
    traced = [node.meta["example_value"] for node in placeholders]
    fakes = [_fake(context, each, value) for each, value in zip(traced, inputs, strict=True)]
    interpreter = _RecordingInterpreter(gm)
    torch.clear_autocast_cache()
    with context.fake_mode, torch.autograd.set_multithreading_enabled(False), torch.enable_grad():
        found: fx.GraphModule = make_fx(interpreter.run, AS_EAGER)(*fakes)
    torch.clear_autocast_cache()
    for node, given in zip(found.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node._rename(given.name)
        node.target = node.name
    real = {id(fake): id(value) for fake, value in zip(fakes, inputs, strict=True)}
    return found, [real.get(id(each), 0) for each in interpreter.marked]


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
    graph: fx.Graph, marked: Sequence[int], known: Mapping[int, Sequence[Averaged]]
) -> tuple[Averaged, ...]:
    """Replace the marks of accumulations by those of averaged gradients, where these are ready."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    slots: list[Averaged] = []
    marks = graph.find_nodes(op="call_function", target=MARK)  # by turns, before and after an accumulation
    pairs = [*zip(marks[::2], marks[1::2], strict=True)]
    parameters = dict(zip(marks[::2], marked[::2], strict=True))
    holding = by_storage(graph.nodes)
    # these may share a storage, but no memory
    accumulating = {each for begin, end in pairs for each in (begin, *_until(begin, end), *end.users)}
    for begin, end in sorted(pairs, key=lambda pair: order[pair[0].args[1]]):
        _, gradient, modules, first = end.args
        averaged_by = known.get(parameters[begin], ())
        # DDP reduces once after a forward; a gradient that starts from None after that is this rank's own
        done = [slot.sent for slot in slots] if first else []
        times = [(each, modules.count(id(each.replica.ddp))) for each in averaged_by]
        running = [each for each, n in times if n > (each.sent in done)]
        found = [*{each.sent: each for each in running}.values()]  # once for each group
        for averaged in found:
            if averaged in slots:
                raise UsageError(
                    f"{WHAT}: two backward passes of one step reduce the gradient of "
                    f"{averaged.spec.name!r} of {averaged.replica.name}. Call DDP once and "
                    "add the losses, or use no_sync() for all backwards of a step but "
                    "the last; before a backward of this rank alone, set gradients to None"
                )
            with graph.inserting_before(end):
                gradient = graph.call_function(AVERAGE, (gradient, len(slots)))
            gradient.meta = dict(end.meta)
            slots.append(averaged)
        end.replace_all_uses_with(gradient)
        begin.replace_all_uses_with(begin.args[1])
        if found:
            _move_up(begin, gradient, holding, accumulating)
        graph.erase_node(end)
        graph.erase_node(begin)
    return tuple(slots)


def _move_up(
    begin: fx.Node, last: fx.Node, holding: Mapping[int, Sequence[fx.Node]], accumulating: set[fx.Node]
) -> None:
    """Move an accumulation to where all that it reads is ready, and all that it overwrites was read."""
    moved = _until(begin, last)
    own = {key for node in moved for key in written_storages(node)}
    before: set[Any] = {begin.args[1], *(each for node in moved for each in node.all_input_nodes)}
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
