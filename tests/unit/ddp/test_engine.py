"""ddpopt.ddp.engine: what is seen from inside a backward, of the parts above and beside it too."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from ddpopt.ddp.engine import NO_TASK, Backward, running_backward, running_node, task_id, will_run
from ddpopt.dynamo.quiet import gc_paused


def leaf_of(parameter: Tensor) -> Any:
    return get_gradient_edge(parameter).node


@dataclass
class Watch:
    """Two parameters, and what is seen from a node between them and the loss."""

    left: Tensor = field(default_factory=lambda: torch.ones(3, requires_grad=True))
    right: Tensor = field(default_factory=lambda: torch.ones(3, requires_grad=True))
    seen: list[Backward | None] = field(default_factory=list)
    runs: list[tuple[bool, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leaves = [leaf_of(self.left), leaf_of(self.right)]

    def product(self) -> Tensor:
        """A function of both, once; its backward is looked at before it reaches them."""
        middle = self.left * self.right
        middle.register_hook(self.look)  # type: ignore[no-untyped-call]  # of torch
        return middle.sum()

    def look(self, _: Tensor) -> None:
        self.seen.append(running_backward())
        left, right = map(will_run, self.leaves)
        self.runs.append((left, right))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """For each look, how many edges lead to the left leaf and to the right one."""
        assert None not in self.seen
        pairs = [[b.leaf_edges.get(id(leaf), 0) for leaf in self.leaves] for b in self.seen if b is not None]
        return [(left, right) for left, right in pairs]


def backward(*roots: Any, **options: Any) -> None:
    torch.autograd.backward(roots, **options)


def in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_outside_of_a_backward_nothing_runs() -> None:
    assert (task_id(), running_backward(), running_node()) == (NO_TASK, None, None)


ROOTS: dict[str, tuple[Callable[[Watch], list[Any]], list[tuple[int, int]]]] = {
    "read once": (lambda watch: [watch.product()], [(1, 1)]),
    "read also behind other operations": (
        lambda watch: [watch.product() + watch.product() + watch.left.exp().sin().sum()],
        [(3, 2)] * 2,
    ),
    "read in the loss": (lambda watch: [watch.product() * watch.right.square().sum()], [(1, 2)]),
    "read for several roots": (
        lambda watch: [(total := watch.product()).sin(), total.cos(), watch.left.sum()],
        [(2, 1)],
    ),
    "a root itself": (lambda watch: [watch.product(), watch.left], [(2, 1)]),
    "a gradient edge for a root": (
        lambda watch: [get_gradient_edge(watch.product() + watch.left.sum())],
        [(2, 1)],
    ),
}


@pytest.mark.parametrize("name", ROOTS)
def test_each_use_of_a_parameter_is_an_edge(name: str) -> None:
    roots, edges = ROOTS[name]
    watch = Watch()
    given = roots(watch)
    backward(*given, grad_tensors=[torch.ones(3) if root is watch.left else torch.ones(()) for root in given])
    assert watch.edges == edges
    assert watch.runs == [(True, True)] * len(edges)


@pytest.mark.parametrize("through", ["backward", "grad"])
def test_leaves_that_get_no_gradient_will_not_run(through: str) -> None:
    watch = Watch()
    if through == "backward":
        backward(watch.product(), inputs=[watch.right])
    else:
        torch.autograd.grad(watch.product(), [watch.left, watch.right])
    assert watch.edges == [(1, 1)]
    assert watch.runs == [(False, through == "backward")]


@pytest.mark.parametrize("creates_graph", [False, True])
@pytest.mark.parametrize("through", ["backward", "grad"])
def test_the_wish_for_a_graph_is_seen(through: str, creates_graph: bool) -> None:
    watch = Watch()
    total = watch.product()
    if through == "grad":
        torch.autograd.grad(total, [watch.left], create_graph=creates_graph)
    else:
        torch.autograd.backward(total, inputs=[watch.left], retain_graph=True)
        gradients = torch.autograd.grad(total, [watch.left], create_graph=creates_graph)
        assert gradients[0].requires_grad is creates_graph
    assert [seen.creates_graph for seen in watch.seen if seen is not None][-1] is creates_graph


def test_each_backward_has_a_task_of_its_own() -> None:
    watch = Watch()
    total = watch.product()
    backward(total, retain_graph=True)
    backward(total)
    first, second = watch.seen
    assert first is not None
    assert second is not None
    assert first.task != second.task
    assert NO_TASK not in (first.task, second.task)


def test_a_backward_that_another_thread_started_is_seen_from_there() -> None:
    watch = Watch()
    total = watch.product() + watch.left.sum()
    in_thread(lambda: backward(total))
    assert watch.edges == [(2, 1)]
    assert task_id() == NO_TASK


def test_two_threads_backwards_at_once_are_told_apart() -> None:
    watches = [Watch(), Watch()]
    barrier = threading.Barrier(2, timeout=10)

    def meet(_: Tensor) -> None:
        barrier.wait()

    totals = []
    for uses, watch in enumerate(watches):
        product = watch.product()
        middle = torch.ones(3, requires_grad=True) * 1  # made last, so its backward comes first
        middle.register_hook(meet)  # type: ignore[no-untyped-call]  # of torch
        totals.append(torch.stack([product, middle.sum(), *[watch.left.sum()] * uses]).sum())
    threads = [threading.Thread(target=backward, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [watch.edges for watch in watches] == [[(1, 1)], [(2, 1)]]


def test_a_thread_without_a_backward_sees_none_while_another_has_one() -> None:
    seen: list[Any] = []
    middle = torch.ones(3, requires_grad=True) * 1
    middle.register_hook(lambda _: in_thread(lambda: seen.append(running_backward())))  # type: ignore[no-untyped-call]
    backward(middle.sum())
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
    assert outer.edges == [(1, 2)] * 2
    assert inner.edges == [(2, 1)]
    first, second = outer.seen
    assert first == second
    assert first is not None
    assert inner.seen[0] is not None
    assert inner.seen[0].task != first.task


def run_engine(total: Tensor) -> None:
    """As C++ would: by none of the ways that torch.autograd offers."""
    Variable._execution_engine.run_backward(
        (total,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def test_where_the_roots_cannot_be_found_nothing_is_known() -> None:
    watch = Watch()
    run_engine(watch.product())
    assert watch.seen == [None]


def test_the_roots_of_a_backward_around_are_not_taken_for_those_of_the_running_one() -> None:
    watch = Watch()
    total = watch.product()
    middle = torch.ones(3, requires_grad=True) * 1
    middle.register_hook(lambda _: run_engine(total))  # type: ignore[no-untyped-call]  # of torch
    backward(middle.sum())
    assert watch.seen == [None]


def test_the_running_node_is_the_one_whose_backward_asks() -> None:
    seen: list[Any] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(running_node() is ctx)
            return gradient

    x = torch.ones(3, requires_grad=True)
    backward(Asks.apply(x).sum())  # type: ignore[no-untyped-call]  # of torch
    assert seen == [True]


@gc_paused()
def test_looking_keeps_no_graph_alive() -> None:
    watch = Watch()
    saved = torch.ones(())
    output = watch.product() * saved
    references = [weakref.ref(saved), weakref.ref(output)]
    backward(output, retain_graph=True)
    del output, saved
    assert [reference() for reference in references] == [None, None]
    assert watch.edges == [(1, 1)]
