"""What a captured step leaves: the value that it returns, gradients, optimizer state, replaced buffers.

Tensors that a step changes in place are changed by its graph. Tensors that it makes, and puts somewhere, are
outputs of the graph, and are put into the same places after each run.

Invariant: after a run everything is where the user's function would have left it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.graph.nodes import SYMBOLIC
from ddpopt.step.lift import Inputs
from ddpopt.step.reach import PLAIN

States = Mapping[str, tuple[Mapping[Any, Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]]
Slot = tuple[str, Any]
"""``("input", index)``, ``("output", index)`` or ``("value", the value itself)``."""


@dataclass(frozen=True)
class StepOutcome:
    """Where the outputs of a graph belong.

    Attributes:
        returned: the leaves of the value that the function returns.
        spec: its containers.
        gradients: the ``.grad`` that tensors have afterwards, by index of the tensor, where it changes.
        states: what optimizers hold afterwards: name, index of the parameter, key, value.
        places: what modules hold afterwards, by index in `Inputs.places`, where it changes.
        broadcasts: for each DDP module, whether it broadcasts buffers in its next forward.
        initializes: whether the step makes state that later steps only change.
    """

    returned: tuple[Slot, ...]
    spec: TreeSpec
    gradients: tuple[tuple[int, Slot], ...]
    states: tuple[tuple[str, int, str, Slot], ...]
    places: tuple[tuple[int, Slot], ...]
    broadcasts: tuple[bool, ...]
    initializes: bool

    def distribute(self, inputs: Inputs, outputs: Sequence[Any], ddps: Sequence[Any]) -> Any:
        """Put the outputs of a run into their places.

        Args:
            inputs: the inputs of the run.
            outputs: the outputs of the graph.
            ddps: the DDP modules.

        Returns:
            What the user's function returns.
        """

        def found(slot: Slot) -> Any:
            kind, value = slot
            return inputs.tensors[value] if kind == "input" else outputs[value] if kind == "output" else value

        for place, slot in self.gradients:
            inputs.tensors[place].grad = found(slot)
        for name, place, key, slot in self.states:
            inputs.reached.optimizers[name].state[inputs.tensors[place]][key] = found(slot)
        for place, slot in self.places:
            held, key = inputs.places[place]
            held[key] = found(slot)
        for ddp, broadcasts in zip(ddps, self.broadcasts, strict=True):
            ddp.require_forward_param_sync = broadcasts
        return tree_unflatten([found(slot) for slot in self.returned], self.spec)


class _Reader:
    """Tells inputs, outputs and other values apart."""

    def __init__(self, fakes: Sequence[Tensor]) -> None:
        self.place_of = {id(fake): place for place, fake in enumerate(fakes)}
        self.outputs: list[Any] = []
        self._output_of: dict[int, int] = {}

    def slot(self, value: Any) -> Slot:
        if id(value) in self.place_of:
            return "input", self.place_of[id(value)]
        if not isinstance(value, (Tensor, *SYMBOLIC)):
            return "value", value
        place = self._output_of.setdefault(id(value), len(self.outputs))
        if place == len(self.outputs):
            self.outputs.append(value)
        return "output", place


def read_outcome(
    returned: Any,
    inputs: Inputs,
    fakes: Sequence[Tensor],
    states: States,
    ddps: Sequence[Any],
) -> tuple[StepOutcome, list[Any]]:
    """Read what a function has left, while fake tensors are still in its modules and optimizers.

    Args:
        returned: what it returned.
        inputs: its inputs.
        fakes: the fake tensors, in the order of ``inputs.tensors``.
        states: the state of each optimizer before the step, and now.
        ddps: the DDP modules.

    Returns:
        The outcome, and the outputs of the graph.

    Raises:
        UsageError: an optimizer counts in Python.
    """
    reader = _Reader(fakes)
    leaves, spec = tree_flatten(returned)
    slots = tuple(map(reader.slot, leaves))
    odd = [value for kind, value in slots if kind == "value" and not isinstance(value, PLAIN)]
    if odd:
        raise UnsupportedError(
            f"train_step: the step returns a {type(odd[0]).__name__}; return tensors and plain values, in "
            "tuples, lists or dictionaries"
        )
    gradients = []
    for place, fake in enumerate(fakes):
        if fake.is_leaf:
            slot = reader.slot(fake.grad)
            before = inputs.gradients.get(place)
            if slot != (("value", None) if before is None else ("input", before)):
                gradients.append((place, slot))
    kept = tuple(_states(reader, inputs, states))
    new = any(key not in states[name][0].get(inputs.tensors[place], {}) for name, place, key, _ in kept)
    places = []
    for place, ((held, key), staged) in enumerate(zip(inputs.places, inputs.staged, strict=True)):
        if reader.slot(held[key]) != ("input", staged):
            places.append((place, reader.slot(held[key])))
    broadcasts = tuple(bool(ddp.require_forward_param_sync) for ddp in ddps)
    outcome = StepOutcome(slots, spec, tuple(gradients), kept, tuple(places), broadcasts, new)
    return outcome, reader.outputs


def _states(reader: _Reader, inputs: Inputs, states: States) -> Iterator[tuple[str, int, str, Slot]]:
    for name, (held, state) in states.items():
        for fake, entries in state.items():
            place = reader.place_of[id(fake)]
            before = held.get(inputs.tensors[place], {})
            for key, value in entries.items():
                slot = reader.slot(value)
                old: Any = before.get(key)
                if isinstance(old, Tensor) and slot == ("input", inputs.index[id(old)]):
                    continue
                if slot[0] == "value" and key in before:
                    if old != value:
                        raise UsageError(
                            f"train_step: {name} changes state[...][{key!r}] from {old!r} to {value!r}, a "
                            "Python number, which a graph cannot do again; use SGD, Adam, AdamW or Adagrad"
                        )
                    continue
                yield name, place, key, slot
