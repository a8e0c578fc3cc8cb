"""ddpopt.observation.launches: every kind of collective is noted as what it is."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ddpopt.ddp.engine import NO_TASK, task_id
from ddpopt.observation.launches import Launch, LaunchMode

pytestmark = pytest.mark.usefixtures("one_rank_group")


class Notes(list[Launch]):
    """What a mode reports, and how often it saw other operators."""

    others = 0

    def mode(self) -> LaunchMode:
        return LaunchMode(self.append, self.note_other)

    def note_other(self) -> None:
        self.others += 1


def test_collectives_are_noted_with_what_they_send() -> None:
    notes = Notes()
    with notes.mode():
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
        dist.all_gather([torch.zeros(4, dtype=torch.int32)], torch.ones(4, dtype=torch.int32))
        dist.barrier()
    world: Any = dist.group.WORLD
    assert notes == [
        Launch("allreduce", 3, 12, "float32", in_backward=False, group=world.group_name),
        Launch("broadcast", 2, 16, "float64", in_backward=False, group=world.group_name),
        Launch("allgather", 4, 16, "int32", in_backward=False, group=world.group_name),
        Launch("barrier", 0, 0, "", in_backward=False, group=world.group_name),
    ]


def test_functional_collectives_are_noted_once_with_their_group_and_waiting_is_not() -> None:
    notes = Notes()
    other: Any = dist.new_group([0])
    with notes.mode():
        assert functional.all_reduce(torch.ones(3), "sum", other).sum() == 3
        dist.all_reduce(torch.ones(4), group=other)
    assert [(launch.op, launch.numel, launch.group) for launch in notes] == [
        ("all_reduce", 3, other.group_name),
        ("allreduce", 4, other.group_name),
    ]


def test_a_launch_knows_whether_it_was_inside_a_backward() -> None:
    notes = Notes()
    tasks = []

    def reduce(gradient: torch.Tensor) -> None:
        tasks.append(task_id())
        dist.all_reduce(gradient.clone())

    leaf: Any = torch.ones(2, requires_grad=True)
    leaf.register_hook(reduce)
    with notes.mode():
        torch.autograd.backward(leaf.sum())
        dist.all_reduce(torch.ones(3))
    assert [(launch.numel, launch.in_backward) for launch in notes] == [(2, True), (3, False)]
    assert tasks[0] >= 0
    assert task_id() == NO_TASK


def test_operators_inside_a_backward_are_not_taken_for_those_between_two() -> None:
    notes = Notes()
    leaf = torch.ones(2, requires_grad=True)
    product = (leaf * leaf).sum()
    with notes.mode():
        gradient = torch.ones(())
        before = notes.others
        torch.autograd.backward(product, gradient)
        assert notes.others == before
