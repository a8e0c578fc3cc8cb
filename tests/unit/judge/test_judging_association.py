"""the values that are named are those whose gradients differ, and no others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.judge.judging.association import reassociated_values
from ddpopt.planning.capture import capture

Joined = tuple[Tensor, ...]
Join = Callable[["Layers", Tensor], Joined]
CAP_MB = 1e-4


class Layers(nn.Module):
    """Three layers, each in a segment of its own; how they are joined is up to the test."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(96, 96)
        self.middle = nn.Linear(96, 96)
        self.last = nn.Linear(96, 96)
        self.join = join

    def forward(self, x: Tensor) -> Joined:
        return self.join(self, x)


def loss_of(outputs: Joined) -> Tensor:
    return torch.stack([output.square().mean() for output in outputs]).sum()


def twice_where_made_and_again_behind(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    inner = layers.middle(made.relu() + made.sigmoid() + made.cos())
    return (layers.last(inner) + made.tanh() * made.sin(),)


def twice_where_made_and_returned(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    return layers.last(layers.middle(made.relu() + made.sigmoid())), made


def once_in_each_segment(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    inner = layers.middle(made.relu()) + made.sin()
    return (layers.last(inner) + made.tanh(),)


def twice_in_the_last_segment(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    return (layers.last(layers.middle(made.relu())) + made.tanh() * made.sin(),)


def twice_in_the_last_segment_that_returns_a_view(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    value = layers.last(layers.middle(made.relu())) + made.tanh() * made.sin()
    return value, made.view(-1)


def twice_in_between(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    inner = layers.middle(made.relu()) + made.sigmoid() * made.cos()
    return (layers.last(inner) + made.tanh(),)


def twice_behind_and_returned(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    inner = layers.middle(made.relu()) + made.sigmoid() * made.cos()
    return layers.last(inner), made


def viewed_where_made(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    view = made.view(-1, 48)
    inner = layers.middle(made.relu() * made.cos())
    return (layers.last(inner) + view.tanh().view(-1, 96) * made.sin(),)


def leaving_beside_a_view_that_is_read(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    view = made.view(-1, 48)
    inner = layers.middle(made.relu().detach() + view.sin().view(-1, 96))
    return (layers.last(inner) + view.tanh().view(-1, 96) + made.cos(),)


def two_views_leaving_of_which_one_is_read(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    read, other = made.view(-1, 48), made.view(-1, 32)
    inner = layers.middle(made.detach().sin() + read.cos().view(-1, 96))
    return (layers.last(inner) + read.tanh().view(-1, 96) * other.sigmoid().view(-1, 96),)


def two_views_leaving_and_a_third_read(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    one, other = made.view(-1, 48), made.view(-1, 32)
    inner = layers.middle(made.relu())
    return (layers.last(inner) + one.tanh().view(-1, 96) * other.sigmoid().view(-1, 96),)


def two_views_leaving(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    one, other = made.view(-1, 48), made.view(-1, 32)
    inner = layers.middle(other.sin().view(-1, 96).detach())
    return (layers.last(inner) + one.tanh().view(-1, 96) * other.sigmoid().view(-1, 96),)


def one_view_leaving_of_a_value_that_is_read_behind(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    view = made.view(-1, 48)
    inner = layers.middle(x)
    return (layers.last(inner) + view.tanh().view(-1, 96) + made.cos() * made.sin(),)


def leaving_beside_what_sends_no_gradient(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    apart, view = made.detach().view(-1, 32), made.view(-1, 48)
    inner = layers.middle(made.relu())
    return (layers.last(inner) + view.tanh().view(-1, 96) * apart.sigmoid().view(-1, 96),)


NAMED = (
    two_views_leaving_and_a_third_read,
    two_views_leaving_of_which_one_is_read,
    twice_in_between,
    twice_behind_and_returned,
    viewed_where_made,
    leaving_beside_a_view_that_is_read,
    twice_in_the_last_segment_that_returns_a_view,
)
NOT_NAMED = (
    one_view_leaving_of_a_value_that_is_read_behind,
    leaving_beside_what_sends_no_gradient,
    two_views_leaving,
    twice_where_made_and_again_behind,
    twice_where_made_and_returned,
    once_in_each_segment,
    twice_in_the_last_segment,
)


def inputs() -> Tensor:
    return torch.randn(33, 96, generator=torch.Generator().manual_seed(1))


def gradients_under_split(join: Join) -> list[Tensor | None]:
    ddp = DistributedDataParallel(Layers(join), bucket_cap_mb=CAP_MB)
    step = ddpopt.compile(ddp, backend="aot_eager", strategy="split")
    torch.autograd.backward(loss_of(step(inputs())))
    return [parameter.grad for parameter in ddp.parameters()]


def gradients_of_eager(join: Join) -> list[Tensor]:
    model = Layers(join)
    return list(torch.autograd.grad(loss_of(model(inputs())), list(model.parameters())))


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
@pytest.mark.parametrize("join", [*NAMED, *NOT_NAMED])
def test_a_value_is_named_just_where_cuts_change_the_last_bits_of_a_gradient(join: Join) -> None:
    captured = capture(Layers(join), inputs(), strategy="split", bucket_cap_mb=CAP_MB)
    named = reassociated_values(captured.graphs[0].gm, captured.plan())
    same = [
        got is not None and torch.equal(got, eager)
        for got, eager in zip(gradients_under_split(join), gradients_of_eager(join), strict=True)
    ]
    assert len(captured.plan().segments) == 3
    assert named == (("made",) if join in NAMED else ())
    assert all(same) == (join not in NAMED)


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
def test_a_view_that_a_segment_was_given_is_named_for_the_views_of_it_there() -> None:
    def join(layers: Layers, x: Tensor) -> Joined:
        view = layers.first(x).view(-1, 48)
        inner = layers.middle(x)
        further = view.view(-1, 32)
        inner = layers.last(inner + further.cos().view(-1, 96))
        return (inner + further.tanh().view(-1, 96) + view.sin().view(-1, 96),)

    captured = capture(Layers(join), inputs(), strategy="split", bucket_cap_mb=CAP_MB)
    assert reassociated_values(captured.graphs[0].gm, captured.plan()) == ("view",)
    pairs = zip(gradients_under_split(join), gradients_of_eager(join), strict=True)
    assert not all(got is not None and torch.equal(got, eager) for got, eager in pairs)


def gradients_of_whole_graphs(join: Join) -> list[Tensor]:
    model = Layers(join)
    out = torch.compile(model, backend="aot_eager")(inputs())
    return list(torch.autograd.grad(loss_of(out), list(model.parameters())))


# Written out: a break in a function that both call would end their graphs at the call.
def an_inputs_view_is_read_behind_a_cut(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    torch._dynamo.graph_break()
    inner = made.relu() * made.cos() + made.sigmoid()
    view = made.view(-1, 48)
    inner = layers.middle(inner)
    return (layers.last(inner) + view.tanh().view(-1, 96),)


def an_inputs_view_is_read_here_and_behind_a_cut(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    torch._dynamo.graph_break()
    view = made.view(-1, 48)
    inner = layers.middle(view.cos().view(-1, 96))
    return (layers.last(inner) + view.tanh().view(-1, 96) + made.sin(),)


def an_inputs_view_is_returned(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    torch._dynamo.graph_break()
    inner = made.relu() * made.cos() + made.sigmoid()
    view = made.view(-1, 48)
    inner = layers.middle(inner)
    return layers.last(inner), view


def an_input_is_read_in_the_first_segment_alone(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    torch._dynamo.graph_break()
    inner = layers.middle(made.relu() * made.cos() + made.sigmoid())
    return (layers.last(inner),)


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
@pytest.mark.parametrize(
    ("join", "moved"),
    [
        (an_inputs_view_is_read_behind_a_cut, True),
        (an_inputs_view_is_read_here_and_behind_a_cut, True),
        (an_inputs_view_is_returned, False),
        (an_input_is_read_in_the_first_segment_alone, False),
    ],
)
def test_an_input_of_a_later_graph_is_named_where_a_view_of_it_crosses_a_cut(join: Join, moved: bool) -> None:
    captured = capture(Layers(join), inputs(), strategy="split", bucket_cap_mb=CAP_MB)
    plan = captured.plan()
    named = reassociated_values(captured.graphs[1].gm, plan, 1)
    same = [
        got is not None and torch.equal(got, whole)
        for got, whole in zip(gradients_under_split(join), gradients_of_whole_graphs(join), strict=True)
    ]
    assert len([segment for segment in plan.segments if segment.graph == 1]) == 2
    made = captured.graphs[1].gm.graph.find_nodes(op="placeholder")[0].name
    assert named == ((made,) if moved else ())
    assert all(same) != moved
