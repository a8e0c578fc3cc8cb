"""How Inductor generates code for a call of ``ddpopt::hand_over``.

Inductor fuses and moves kernels after it has read a graph, and reuses memory. Only when it generates the call
is it known what follows: memory that Inductor itself would free after the call is not used, returned or
aliased again, so DDP may take it. DDP may change a parameter once it has the gradient
(`ddpopt.ddp.held.may_change_in_backward`), so all code that reads the parameter comes before the call, or the
call says that it does not.

Invariant: a gradient whose memory is taken has its last use in the call; a parameter has its last use before
the call that hands over its gradient, unless the gradient is marked `LATE`.

Uses private parts of torch: ``torch._inductor.ir.FallbackKernel``, the order in which the
scheduler runs operations (``V.graph.operations``, ``additional_buffer_deps``, ``last_usage``), and the
descriptors that AOTAutograd leaves on placeholders (``meta["desc"]``).
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._inductor import ir
from torch._inductor.virtualized import V

from ddpopt.graph.nodes import by_storage, storages
from ddpopt.inline.handover import COPIED, LATE, TAKEN

TARGET = torch.ops.ddpopt.hand_over.default


class _HandOver(ir.FallbackKernel):
    """The call in Inductor's IR. Its inputs are the gradients."""

    def codegen(self, wrapper: Any) -> None:
        """Generate the call."""
        gradients: Any = self.inputs
        names = [gradient.get_name() for gradient in gradients]
        scheduler: Any = V.graph.scheduler
        last = _last_used(names, scheduler.current_node.last_usage)
        slots = self.constant_args[: len(names)]
        treatment = self.constant_args[len(names) :]
        how = [TAKEN if name in last and t == COPIED else t for name, t in zip(names, treatment, strict=True)]
        self.constant_args = (*slots, *how)
        V.graph.never_reuse_buffers.update(name for name, h in zip(names, how, strict=True) if h == TAKEN)
        super().codegen(wrapper)


def _last_used(names: Sequence[str], last_usage: Iterable[str]) -> set[str]:
    """Inductor's own buffers that a call uses once, as their last user."""
    once = {name for name, count in Counter(names).items() if count == 1}
    return once.intersection(last_usage).difference(V.graph.graph_inputs, V.graph.constants)


class _Program:
    """Facts about the program that Inductor makes of one backward.

    Attributes:
        inputs: for each index of a forward input, the backward's inputs that hold it or share its storage.
    """

    def __init__(self, graph: fx.Graph) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        same_memory = by_storage(placeholders)
        described = {node: node.meta.get("desc") for node in placeholders}
        self.inputs: Mapping[int, list[fx.Node]] = {
            desc.idx: [same for storage in storages(node) for same in same_memory[storage]]
            for node, desc in described.items()
            if isinstance(desc, PlainAOTInput)
        }
        self._seen = 0
        self._readers: defaultdict[str, list[str]] = defaultdict(list)

    def readers(self, name: str) -> list[str]:
        """The buffers computed so far from one of the backward's inputs."""
        for operation in V.graph.operations[self._seen :]:
            for read in operation.get_read_names():
                if read in V.graph.graph_inputs:
                    self._readers[read] += [output.get_name() for output in operation.get_outputs()]
        self._seen = len(V.graph.operations)
        return self._readers[name]


_programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()


def lower(gradients: Sequence[Any], slots: Sequence[int], treatment: Sequence[int]) -> Any:
    """Add a call of ``ddpopt::hand_over`` to the program, after all code that reads the parameters."""
    call = V.graph.current_node
    if V.graph not in _programs:
        _programs[V.graph] = _Program(call.graph)
    program = _programs[V.graph]
    inputs = [program.inputs.get(slot, []) for slot in slots]
    late = [any(_is_read_after(node, call) for node in nodes) for nodes in inputs]
    names = [node.name for nodes, wait in zip(inputs, late, strict=True) if not wait for node in nodes]
    for name in names:
        for user in V.graph.name_to_users[name]:
            user.realize()
    before = [buffer for name in names for buffer in program.readers(name)]
    how = [LATE if wait else t for wait, t in zip(late, treatment, strict=True)]
    gradients = [ir.ExternKernel.realize_input(gradient) for gradient in gradients]
    first = len(V.graph.operations)
    made = _HandOver.create(TARGET, gradients, slots, how)
    for operation in V.graph.operations[first:]:
        V.graph.additional_buffer_deps[str(operation.operation_name)].update(before)
    return ir.TensorBox.create(made)


def _is_read_after(value: fx.Node, call: fx.Node) -> bool:
    """Whether anything reads a value, or a view of it, after a call."""
    return any(node > call for node in _readers_of(value))


def _readers_of(value: fx.Node) -> Iterator[fx.Node]:
    for user in value.users:
        yield user
        if user.op == "call_function" and not set(storages(user)).isdisjoint(storages(value)):
            yield from _readers_of(user)
