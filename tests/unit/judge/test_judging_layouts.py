"""ddpopt.judge.judging.layouts: a gradient is named just if it crosses a cut in another layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpopt.judge.judging.layouts import relaid_values
from ddpopt.planning.capture import capture

Between = Callable[[Tensor], Tensor]
CAP_MB = 0.01


class Two(nn.Module):
    """Two layers, a cut between them; what becomes of the first one's value is up to the test."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second: nn.Module = nn.Linear(64, 64)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x).tanh()
        output: Tensor = self.second(self.between(value))
        return output


def named(between: Between, *, model: type[Two] = Two, symbolic: bool = False) -> tuple[str, ...] | None:
    captured = capture(model(between), torch.randn(4, 64, 64), strategy="split", bucket_cap_mb=CAP_MB)
    assert len(captured.plan().segments) == 2
    return relaid_values(captured.graphs[0].gm, captured.plan(), symbolic=symbolic)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (torch.sin, ()),
        (lambda value: value.transpose(1, 2).contiguous(), ()),
        (lambda value: value.transpose(1, 2).sin(), ("sin",)),
    ],
)
def test_a_gradient_that_its_reader_lays_out_otherwise_is_named_and_no_other(
    between: Between, expected: tuple[str, ...]
) -> None:
    assert named(between) == expected


class Scaled(Two):
    """As `Two`, but what the second layer sends back is laid out as what it got."""

    def __init__(self, between: Between) -> None:
        super().__init__(between)
        self.second = Scale()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(64, 64))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.by


@pytest.mark.parametrize(("symbolic", "expected"), [(False, ()), (True, ("sin",))])
def test_with_symbolic_sizes_a_segment_takes_gradients_by_memory_format(
    symbolic: bool, expected: tuple[str, ...]
) -> None:
    def by_columns(value: Tensor) -> Tensor:
        return value.mT.contiguous().mT.sin()

    assert named(by_columns, model=Scaled, symbolic=symbolic) == expected
    assert named(torch.sin, model=Scaled, symbolic=symbolic) == ()


def test_where_cuts_are_not_known_each_value_counts_as_crossing_one() -> None:
    whole = capture(Two(lambda value: value.transpose(1, 2).sin()), torch.randn(4, 64, 64))
    gm, plan = whole.graphs[0].gm, whole.plan()
    assert relaid_values(gm, plan) == ()
    found = relaid_values(gm, None)
    assert found is not None
    assert "sin" in found


def test_the_gradient_of_a_value_is_that_of_what_it_was_changed_to() -> None:
    def between(value: Tensor) -> Tensor:
        changed = value + 1
        changed[:, 0] = 0.5
        return changed.transpose(1, 2).sin()

    assert named(between) == ("sin",)
    found = relaid_values(capture(Two(between), torch.randn(4, 64, 64)).graphs[0].gm, None)
    assert found is not None
    assert "changed" in found


def test_of_a_graph_that_cannot_be_run_on_fakes_nothing_is_known() -> None:
    captured = capture(Two(torch.sin), torch.randn(4, 64, 64), strategy="split", bucket_cap_mb=CAP_MB)
    gm, plan = captured.graphs[0].gm, captured.plan()
    gm.graph.find_nodes(op="placeholder")[0].meta.clear()
    assert relaid_values(gm, plan) is None
