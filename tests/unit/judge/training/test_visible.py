"""ddpopt.judge.training.visible: what a script can see of a step, under names that no run decides."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpopt.judge.training.memory import sharing
from ddpopt.judge.training.values import held_by, leaves
from ddpopt.judge.training.visible import GRADIENT_OF, Sight

KEPT: list[Tensor] = []


@dataclass
class Result:
    """An output of a type of its own."""

    first: Tensor
    count: int


def test_tensors_are_found_in_containers_and_in_objects() -> None:
    value = {"a": [torch.ones(1)], "b": Result(torch.zeros(2), 3)}
    names = [name for name, _ in leaves(value, "output")]
    assert names == ["output['a'][0]", "output['b'].first", "output['b'].count"]


def test_what_overlaps_shares_memory_and_neighbors_and_empty_tensors_do_not() -> None:
    flat, matrix = torch.zeros(8), torch.zeros(3, 3)
    tensors = {"left": flat[:5], "right": flat[4:], "half": flat[:4], "other": torch.zeros(8)}
    assert sharing(tensors) == {("left", "right"), ("half", "left")}
    assert sharing({"column": matrix[:, 1], "matrix": matrix, "none": matrix[:0]}) == {("column", "matrix")}


def keeping() -> Callable[[Tensor], None]:
    kept: list[Tensor] = []
    return kept.append


def test_what_a_function_holds_is_found_wherever_it_holds_it() -> None:
    prompt, scale = torch.ones(3), torch.ones(2)

    def loss(output: Tensor, by: Tensor = scale) -> Tensor:
        return output * prompt * by

    KEPT[:] = [torch.zeros(1)]
    append = keeping()
    append(torch.ones(4))
    pairs = (loss, [prompt, scale]), (lambda g: KEPT.append(-g), KEPT), (partial(loss, by=prompt), [prompt])
    for function, held in pairs:
        assert {id(tensor) for tensor in held} <= {id(value) for _, value in held_by(function)}
    assert [value.shape for _, value in held_by(append)] == [(4,)]


class Keeping(nn.Module):
    """Keeps its output as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


def test_a_gradient_that_the_next_step_writes_to_is_reported() -> None:
    memory, prompt = torch.zeros(2, 2), torch.ones(2, requires_grad=True)
    model, found = Keeping(), []
    weight: Any = model.layer.weight
    weight.register_hook(lambda gradient: memory.add_(gradient).view(2, 2))
    sight = Sight((), model)
    for _ in range(2):
        model.zero_grad()
        sight.before_step(keep=False)
        x = torch.ones(1, 2, requires_grad=True)
        sight.calls((x,), {})
        sight.returns(result := model(x))
        loss = (result * prompt).sum()  # which reads a tensor outside
        sight.reach(loss)
        torch.autograd.backward(loss)
        found.append(sight.memory())
        sight.after_step()
    (_, before), (shared, written) = found
    assert before == ()
    assert ("gradient of layer.weight", "the last step's gradient of layer.weight") in shared
    assert written == ("gradient of layer.weight",)


def test_types_in_an_output_and_the_order_of_its_keys_are_reported() -> None:
    sight = Sight((), nn.Linear(1, 1))
    found = sight.returns({"b": [True], "a": ()})
    assert {name: words for name, words in found.items() if name.startswith("type")} == {
        "type of output": "dict of 'b', 'a'",
        "type of output['b']": "list",
        "type of output['b'][0]": "bool",
        "type of output['a']": "tuple",
    }


def test_an_output_that_is_an_input_has_one_gradient_under_the_inputs_name() -> None:
    sight, x = Sight((), nn.Module()), torch.ones(2, requires_grad=True)
    for _ in range(2):
        sight.before_step(keep=False)
        sight.calls([x], {})
        sight.returns({"same": x})
        torch.autograd.backward(x.sum())
        found = sight.after_step()
        assert f"{GRADIENT_OF}input 0" in found
        assert sight.memory()[1] == ()


@pytest.mark.parametrize(
    ("switch", "left", "before"),
    [
        (torch.use_deterministic_algorithms, True, False),
        (torch.set_float32_matmul_precision, "medium", "highest"),
        (torch.set_warn_always, True, False),
        (partial(torch.set_autocast_dtype, "cpu"), torch.float16, torch.get_autocast_dtype("cpu")),
    ],
)
def test_a_setting_that_is_left_changed_is_reported(switch: Any, left: Any, before: Any) -> None:
    sight, device = Sight((), nn.Module()), torch.device("cpu")
    sight.before_step(keep=False)
    known = sight.settings(device)
    try:
        switch(left)
        assert sight.settings(device) != known
    finally:
        switch(before)
    assert sight.settings(device) == known


def test_what_a_compiler_changes_when_it_is_first_used_is_no_change_of_a_step() -> None:
    sight, device = Sight((), nn.Module()), torch.device("cpu")
    limit = sys.getrecursionlimit()
    reported = []
    try:
        for step in range(4):
            sight.before_step(keep=False)
            sys.setrecursionlimit(limit + step + 1)
            reported.append(sight.settings(device)["list of what it changed in the process"])
    finally:
        sys.setrecursionlimit(limit)
    assert reported == ["nothing", "nothing", "Python's recursion limit", "Python's recursion limit"]
