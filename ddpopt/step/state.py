"""Tensors that a user's pass over a step adds to it: averages of weights, residuals of a compression.

They are the last inputs of the step's graph, which the pass reads and writes as an optimizer does parameters.

Invariant: a name means one tensor, in all graphs of a step; and the ranks' tensors are equal when they first
take part in a step, but for those that are declared to be each rank's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._guards import TracingContext

from ddpopt.errors import UsageError
from ddpopt.step.overrides import OF_STATE

TRANSFORM = "ddpopt.train_step(transform=...)"
FORM = "{shape} of {dtype} on {device}"


class StatefulTransform(ABC):
    """A pass over a step's graph that has tensors of its own, kept from step to step; inherit from it.

    It declares all of them for each graph of the step.
    """

    @abstractmethod
    def __call__(self, graph_module: fx.GraphModule, state: "Declared") -> fx.GraphModule | None:
        """Change the graph, once for each graph of the step.

        Args:
            graph_module: the graph, as any ``transform`` gets it.
            state: declares the tensors that the pass reads and writes.

        Returns:
            The graph to use; None for `graph_module` itself.
        """

    def finish(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  # most leave nothing
        """Complete what a step leaves for the next one; ``step.last(...)`` calls it after a step.

        Args:
            state: the tensors of the pass, by their names.
        """


@dataclass
class StepState:
    """The tensors that passes added to a step.

    Attributes:
        tensors: each by its name.
        own: names of those that each rank has for itself.
        loaded: those of a checkpoint, until the pass declares them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    _sent: set[str] = field(default_factory=set)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of a checkpoint; before the first step, they are used when they are declared.

        Raises:
            UsageError: one has another form than the step's, or the step has none of its name.
        """
        if not self.tensors:
            self.loaded = {name: value.detach().clone() for name, value in state.items()}
            return
        _require_declared(state.keys() - self.tensors.keys())
        for name, value in state.items():
            _require_form(name, value, form_of(self.tensors[name]))
        for name, value in state.items():
            self.tensors[name].copy_(value.detach())

    def declare(self, made: Mapping[str, Tensor], own: Iterable[str]) -> None:
        """Add what a pass has declared.

        Raises:
            UsageError: it did not declare all that was loaded.
        """
        _require_declared(self.loaded.keys() - made.keys())
        self.loaded.clear()
        self.tensors |= made
        self.own.update(own)

    def make_equal(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        """Give all ranks the first rank's tensors, of those that are new and meant to be equal."""
        for name in names:
            if name not in self._sent and name not in self.own:
                dist.broadcast(self.tensors[name], group=group, group_src=0)
            self._sent.add(name)

    def face(self, names: Iterable[str]) -> list[Any]:
        """What the ranks' tensors have to have in common."""
        return [(name, form_of(self.tensors[name]), name in self.own) for name in names]


class Declared:
    """What a `StatefulTransform` declares for one graph.

    Args:
        graph: the graph.
        inputs: the tensors of the user among its inputs.
        state: the step's tensors.

    Attributes:
        inputs: the user's tensors, by the names of the graph's placeholders; parameters are among them.
        tensors: what was declared, in the order of the placeholders.
        own: the names of those that each rank has for itself.
    """

    def __init__(self, graph: fx.Graph, inputs: Mapping[str, Tensor], state: StepState) -> None:
        self.inputs = inputs
        self.tensors: dict[str, Tensor] = {}
        self.own: set[str] = set()
        self._graph = graph
        self._state = state

    def tensor(
        self, name: str, like: fx.Node, initial: Tensor | None = None, *, own: bool = False
    ) -> fx.Node:
        """Declare a tensor, which the graph may read, and write with an operator such as ``aten.copy_``.

        Args:
            name: its name in ``step.state_dict()``.
            like: a node whose value has its shape, dtype and device.
            initial: its value before the first step; by default zeros.
            own: whether each rank has its own. Else all ranks begin with the first one's, and the pass keeps
                them equal.

        Returns:
            The placeholder.

        Raises:
            UsageError: the name is declared twice, or a tensor of that name, or `initial`, has another form.
        """
        if name in self.tensors:
            raise UsageError(f"{TRANSFORM}: {name!r} is declared twice")
        form = form_of(like.meta["val"])
        tensor = self._state.tensors.get(name)
        if tensor is None:
            tensor = torch.zeros(form["shape"], dtype=form["dtype"], device=form["device"])
            first = self._state.loaded.get(name, initial)
            if first is not None:
                _require_form(name, first, form)
                tensor.copy_(first.detach())
        _require_form(name, tensor, form)
        last = self._graph.find_nodes(op="placeholder")[-1]
        with self._graph.inserting_after(last):
            node = self._graph.placeholder(f"state_{len(self.tensors)}")
        fake_mode: Any = TracingContext.get().fake_mode
        node.meta["val"] = fake_mode.from_tensor(tensor, static_shapes=True)
        node.meta[OF_STATE] = True
        self.tensors[name] = tensor
        if own:
            self.own.add(name)
        return node


def add_values(graph: fx.Graph) -> None:
    """Add a fake value, as nodes that were captured have one, to those that earlier passes inserted."""
    context: Any = TracingContext.get()
    with context.fake_mode, torch.no_grad():
        for node in graph.nodes:
            known = all("val" in each.meta for each in node.all_input_nodes)
            if node.op == "call_function" and "val" not in node.meta and known:
                values = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.meta["val"] = node.target(*values[0], **values[1])


def form_of(tensor: Tensor) -> dict[str, Any]:
    """The form of a tensor."""
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "device": tensor.device}


def _require_declared(unknown: Iterable[str]) -> None:
    if names := ", ".join(repr(name) for name in sorted(unknown)):
        raise UsageError(f"{TRANSFORM}: the loaded state has {names}, which the pass does not declare")


def _require_form(name: str, tensor: Tensor, form: Mapping[str, Any]) -> None:
    found = form_of(tensor) | {"device": form["device"]}  # a checkpoint may be on another one
    if found != form:
        raise UsageError(f"{TRANSFORM}: {name!r}: expected {FORM.format(**form)}, got {FORM.format(**found)}")
