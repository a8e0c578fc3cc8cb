"""ddpopt.ddp.engine: what is seen from inside a backward, of the parts above and beside it too."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from ddpopt.ddp.engine import NO_TASK, Backward, running_backward, running_node, task_id


class Watch:
    """Two parameters, and what is seen from a node between them and the loss."""

    def __init__(self) -> None:
        self.left, self.right = (torch.ones(3, requires_grad=True) for _ in range(2))
        self.leaves = [get_gradient_edge(parameter).node for parameter in (self.left, self.right)]
        self.seen: list[Backward | None] = []

    def product(self) -> Tensor:
        """A function of both, once; its backward is looked at before it reaches them."""
        middle = self.left * self.right
        middle.register_hook(self.look)  # type: ignore[no-untyped-call]  # of torch
        return middle.sum()

    def look(self, _: Tensor) -> None:
        self.seen.append(running_backward())

    @property
    def edges(self) -> list[list[int]]:
        """For each look, how many nodes send to the left leaf and to the right one."""
        backwards = [seen for seen in self.seen if seen is not None]
        assert len(backwards) == len(self.seen)
        return [[len(seen.senders.get(id(leaf), ())) for leaf in self.leaves] for seen in backwards]


def backward(*roots: Any, **options: Any) -> None:
    torch.autograd.backward(roots, **options)


def hooked(action: Callable[[], object]) -> Tensor:
    """The loss of a graph in whose backward an action runs."""

    def run(_: Tensor) -> None:
        action()

    middle = torch.ones(3, requires_grad=True) * 1
    middle.register_hook(run)  # type: ignore[no-untyped-call]  # of torch
    return middle.sum()


def run_together(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_outside_of_a_backward_nothing_runs() -> None:
    assert (task_id(), running_backward(), running_node()) == (NO_TASK, None, None)


ROOTS: dict[str, tuple[Callable[[Watch], list[Any]], list[list[int]]]] = {
    "read also behind other operations": (
        lambda own: [own.product() + own.product() + own.left.exp().sin().sum()], [[3, 2]] * 2
    ),
    "read for several roots": (
        lambda own: [(total := own.product()).sin(), total.cos(), own.left.sum()], [[2, 1]]
    ),
    "a root itself": (lambda own: [own.product(), own.left], [[2, 1]]),
    "a gradient edge for a root": (lambda own: [get_gradient_edge(own.product() + own.left.sum())], [[2, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROOTS)
def test_each_use_of_a_parameter_is_a_sender(name: str) -> None:
    roots, edges = ROOTS[name]
    watch = Watch()
    given = roots(watch)
    backward(*given, grad_tensors=[torch.ones(3) if root is watch.left else torch.ones(()) for root in given])
    assert watch.edges == edges


def test_simultaneous_backwards_of_two_threads_are_distinguished() -> None:
    watches = [Watch(), Watch()]
    barrier = threading.Barrier(2, timeout=10)
    totals = []
    for uses, watch in enumerate(watches):
        parts = [watch.product(), *[watch.left.sum()] * uses]
        totals.append(torch.stack([*parts, hooked(barrier.wait)]).sum())  # made last, so it comes first
    run_together(*(partial(backward, total) for total in totals))
    assert [watch.edges for watch in watches] == [[[1, 1]], [[2, 1]]]
    assert task_id() == NO_TASK


def test_a_thread_without_a_backward_sees_none_while_another_has_one() -> None:
    seen: list[Any] = []
    backward(hooked(lambda: run_together(lambda: seen.append(running_backward()))))
    assert seen == [None]


def test_a_backward_inside_a_backward_is_the_running_one_until_it_ends() -> None:
    inner, outer = Watch(), Watch()
    total = inner.product() + inner.left.sum()

    def nest(_: Tensor) -> None:
        outer.look(_)
        backward(total)
        outer.look(_)

    middle = outer.left * outer.right
    middle.register_hook(nest)  # type: ignore[no-untyped-call]  # of torch
    backward(middle.sum() + outer.right.sum())
    assert outer.edges == [[1, 2]] * 2
    assert inner.edges == [[2, 1]]
    assert outer.seen[0] == outer.seen[1] != inner.seen[0]


def run_engine(total: Tensor) -> None:
    """As C++ would: by none of the ways that torch.autograd offers."""
    Variable._execution_engine.run_backward(
        (total,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another backward"])
def test_where_the_roots_cannot_be_found_nothing_is_known(inside: bool) -> None:
    watch = Watch()
    total = watch.product()
    if inside:
        backward(hooked(lambda: run_engine(total)))
    else:
        run_engine(total)
    assert watch.seen == [None]
