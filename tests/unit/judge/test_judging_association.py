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
Read = Callable[..., Tensor]
CAP_MB = 1e-4


class Layers(nn.Module):
    """Three layers, each in a segment of its own; how they are joined is up to the test."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(96, 96) for _ in range(3))
        self.join = join

    def forward(self, x: Tensor) -> Joined:
        return self.join(self, x)


def loss_of(outputs: Joined) -> Tensor:
    return torch.stack([output.square().mean() for output in outputs]).sum()


def wide(view: Tensor) -> Tensor:
    return view.view(-1, 96)


def reading(
    here: Read,
    between: Read | None = None,
    behind: Read | None = None,
    *,
    widths: tuple[int, ...] = (),
    returned: Callable[..., Joined] = lambda *_: (),
) -> Join:
    """Each segment reads what the first layer made, and views of it in these widths that are made there."""

    def join(layers: Layers, x: Tensor) -> Joined:
        made = layers.first(x)
        views = [made.view(-1, width) for width in widths]
        value = layers.middle(here(made, *views))
        if between:
            value = value + between(made, *views)
        value = layers.last(value)
        if behind:
            value = value + behind(made, *views)
        return value, *returned(made)

    return join


def one_view_leaving_of_a_value_that_is_read_behind(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    view = made.view(-1, 48)
    inner = layers.middle(x)
    return (layers.last(inner) + wide(view.tanh()) + made.cos() * made.sin(),)


def leaving_beside_what_sends_no_gradient(layers: Layers, x: Tensor) -> Joined:
    made = layers.first(x)
    apart, view = made.detach().view(-1, 32), made.view(-1, 48)
    inner = layers.middle(made.relu())
    return (layers.last(inner) + wide(view.tanh()) * wide(apart.sigmoid()),)


def twice(made: Tensor) -> Tensor:
    return made.tanh() * made.sin()


def both(_: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return wide(one.tanh()) * wide(other.sigmoid())


NAMED = {
    "two views leaving and a third read": reading(lambda m, *_: m.relu(), None, both, widths=(48, 32)),
    "two views leaving of which one is read": reading(
        lambda m, v, _: m.detach().sin() + wide(v.cos()), None, both, widths=(48, 32)
    ),
    "twice in between": reading(torch.relu, twice, torch.cos),
    "twice behind and returned": reading(torch.relu, twice, returned=lambda m: (m,)),
    "viewed where made": reading(
        lambda m, _: m.relu() * m.cos(), None, lambda m, v: wide(v.tanh()) * m.sin(), widths=(48,)
    ),
    "leaving beside a view that is read": reading(
        lambda m, v: m.relu().detach() + wide(v.sin()),
        None,
        lambda m, v: wide(v.tanh()) + m.cos(),
        widths=(48,),
    ),
    "twice in the last segment that returns a view": reading(
        torch.relu, None, twice, returned=lambda m: (m.view(-1),)
    ),
}
NOT_NAMED = {
    "one view leaving of a value that is read behind": one_view_leaving_of_a_value_that_is_read_behind,
    "leaving beside what sends no gradient": leaving_beside_what_sends_no_gradient,
    "two views leaving": reading(lambda m, v, w: wide(w.sin()).detach(), None, both, widths=(48, 32)),
    "twice where made and again behind": reading(lambda m: m.relu() + m.sigmoid() + m.cos(), None, twice),
    "twice where made and returned": reading(lambda m: m.relu() + m.sigmoid(), returned=lambda m: (m,)),
    "once in each segment": reading(torch.relu, torch.sin, torch.tanh),
    "twice in the last segment": reading(torch.relu, None, twice),
}


def inputs() -> Tensor:
    return torch.randn(33, 96, generator=torch.Generator().manual_seed(1))


def under_split_is_as(join: Join, step: Callable[[nn.Module], Callable[[Tensor], Joined]]) -> bool:
    """Whether the gradients under split are those of another way to run the model, bit by bit."""
    ddp = DistributedDataParallel(Layers(join), bucket_cap_mb=CAP_MB)
    split = ddpopt.compile(ddp, backend="aot_eager", strategy="split")
    torch.autograd.backward(loss_of(split(inputs())))
    model = Layers(join)
    expected = torch.autograd.grad(loss_of(step(model)(inputs())), list(model.parameters()))
    got = [parameter.grad for parameter in ddp.parameters()]
    return all(g is not None and torch.equal(g, own) for g, own in zip(got, expected, strict=True))


def eagerly(model: nn.Module) -> Callable[[Tensor], Joined]:
    return model


def compiled_whole(model: nn.Module) -> Callable[[Tensor], Joined]:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
@pytest.mark.parametrize("name", [*NAMED, *NOT_NAMED])
def test_a_value_is_named_just_where_cuts_change_the_last_bits_of_a_gradient(name: str) -> None:
    join = {**NAMED, **NOT_NAMED}[name]
    captured = capture(Layers(join), inputs(), strategy="split", bucket_cap_mb=CAP_MB)
    assert len(captured.plan().segments) == 3
    named = reassociated_values(captured.graphs[0].gm, captured.plan())
    assert named == (("linear",) if name in NAMED else ())
    assert under_split_is_as(join, eagerly) == (name not in NAMED)


@pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
def test_a_view_that_a_segment_was_given_is_named_for_the_views_of_it_there() -> None:
    def join(layers: Layers, x: Tensor) -> Joined:
        view = layers.first(x).view(-1, 48)
        inner = layers.middle(x)
        further = view.view(-1, 32)
        inner = layers.last(inner + wide(further.cos()))
        return (inner + wide(further.tanh()) + wide(view.sin()),)

    captured = capture(Layers(join), inputs(), strategy="split", bucket_cap_mb=CAP_MB)
    assert reassociated_values(captured.graphs[0].gm, captured.plan()) == ("view",)
    assert not under_split_is_as(join, eagerly)


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
    assert len([segment for segment in plan.segments if segment.graph == 1]) == 2
    made = captured.graphs[1].gm.graph.find_nodes(op="placeholder")[0].name
    assert named == ((made,) if moved else ())
    assert under_split_is_as(join, compiled_whole) != moved
