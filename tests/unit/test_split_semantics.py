"""Strategy split on one rank: who reads a tensor, by whatever name, reads what eager DDP reads there."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt.errors import CertificateError
from ddpopt.fuzz.questions import Outcome
from ddpopt.planning import cut_points
from ddpopt.planning.facts import gradient_carriers
from ddpopt.proof.certificate import certify
from ddpopt.ranks.group import Ranks
from ddpopt.split.partition import partition
from ddpopt.testing.drawn import BLOCKS, DrawnModel, Step, step
from tests.support.found import examined
from tests.support.tracing import cut_before, trace

WIDTH = 8
CAP = WIDTH * WIDTH * 4 / 2**20


pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning"),
]
WRITING = ("written", "written_by_function", "statistics", "looked_up", "written_inside")
"""Blocks that take a view of a buffer or an input, write behind a layer, and read the view behind that."""
LAYER = step("linear")
APART = [
    step("kept_and_written", by="checkpoints"),
    step("statistics", by="F", read="saved"),
    *(step("built", by=by, body=(LAYER, LAYER)) for by in BLOCKS["built"].options["by"]),
    *(step("turned", by=by, body=(LAYER, LAYER)) for by in BLOCKS["turned"].options["by"]),
]
"""Steps that put what may not be parted on both sides of a layer."""
READ_LATE = [step("read_late", of=of, body=(LAYER, LAYER)) for of in BLOCKS["read_late"].options["of"]]
WRITES = [
    *APART,
    *READ_LATE,
    *(
        step(name, by=by, of=("buffer", "input")[place % 2], read=("view", "returned")[place // 2 % 2])
        for name in WRITING
        for place, by in enumerate(BLOCKS[name].options["by"])
    ),
]
CHUNKS, BY_NIGHT = range(0, len(WRITES), 3), pytest.mark.nightly
REGION = step("written_inside", by="region")
"""What torch before 2.13 cannot compile, in one piece either."""


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning")
@pytest.mark.parametrize("first", [pytest.param(n, marks=BY_NIGHT if n % 4 else ()) for n in CHUNKS])
def test_a_view_is_read_as_it_is_after_a_write(first: int, alone: Ranks) -> None:
    drawn = DrawnModel(tuple(WRITES[first : first + 3]), cap_bytes=1)
    (answer,) = examined(alone, drawn, "ddpopt-split")
    if torch.__version__ < "2.13" and REGION in drawn.steps:
        assert answer.kind is Outcome.BACKEND
        assert "invoke_subgraph HigherOrderOperator does not currently support training" in answer.detail
        others = tuple(each for each in drawn.steps if each != REGION)
        (answer,) = examined(alone, replace(drawn, steps=others), "ddpopt-split")
    assert answer.kind is Outcome.OK, answer


class Between(nn.Module):
    """Four layers, and what is done to a value between the second and the third."""

    own: Tensor
    one: Tensor

    def __init__(self, body: Callable[["Between", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("own", torch.randn(WIDTH, WIDTH))
        self.register_buffer("one", torch.tensor(1))
        self.body = body

    def layer(self, index: int, h: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](h))

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        return (self.layers[3](self.body(self, self.layer(0, x), given)),)


def detached_in_place(model: Between, h: Tensor, _: Tensor) -> Tensor:
    h = model.layer(1, h)
    twice = h * 2
    h.detach_()
    return model.layer(2, twice + h)


def strided(model: Between, h: Tensor, given: Tensor) -> Tensor:
    base = given.as_strided((WIDTH, WIDTH // 2), (WIDTH, 2))
    dense = base.contiguous()
    dense.mul_(2)
    h = model.layer(1, h + (base + dense).repeat(1, 2))
    base.mul_(0.5)
    return model.layer(2, h + base.repeat(1, 2))


def columns(model: Between, h: Tensor, given: Tensor) -> Tensor:
    right = given * 1
    h = model.layer(1, h + right)
    h = model.layer(2, h + right.as_strided((WIDTH, 1), (WIDTH, 1), 3))
    right.mul_(0.5)
    return h + right


def view_by_tensor(model: Between, h: Tensor, _: Tensor) -> Tensor:
    places = torch.stack([model.one, model.one + 3])
    view = torch.tensor_split(model.own, places)[1]
    h = model.layer(1, h + view.sum(0))
    places.add_(1)
    h = model.layer(2, h)
    model.own.mul_(0.5)
    return h + view.sum(0)


def broadcast(model: Between, h: Tensor, given: Tensor) -> Any:
    first, second = given * 2, given * 3
    h = model.layer(1, h) + first
    left, right = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]  # torch's own
    h = model.layer(2, h)
    left.mul_(2)
    return h + left + right


def batch(model: Between, h: Tensor, given: Tensor) -> Any:
    base = given * 2
    h = model.layer(1, h) + base
    view = torch.vmap(lambda row: row.view(2, -1))(base)
    h = model.layer(2, h)
    view.mul_(2)
    return h + view.view(WIDTH, WIDTH)


def float_in_region(model: Between, h: Tensor, _: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        scale = h.sum().item() + 1
        return model.layer(2, model.layer(1, h * scale) * scale)

    return model.layer(0, cast(Tensor, checkpoint(block, h, use_reentrant=False)))


def bool_in_region(model: Between, h: Tensor, _: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        h = model.layer(1, h)
        positive = (h.sum() > 0).item()
        return model.layer(2, h * positive) * positive

    return cast(Tensor, checkpoint(block, h, use_reentrant=False))


def by_data(model: Between, h: Tensor, _: Tensor) -> Tensor:
    h = model.layer(2, model.layer(1, h * model.own))
    model.own.data.mul_(0.5)
    return h


class HalvingData(torch.autograd.Function):
    """Writes to an argument so that autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor) -> Tensor:
        base.data.mul_(0.5)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def by_data_in_a_body(model: Between, h: Tensor, _: Tensor) -> Any:
    h = model.layer(2, model.layer(1, h * model.own))
    return HalvingData.apply(h, model.own)  # type: ignore[no-untyped-call]  # torch's own


def read_and_written_in_one_segment(model: Between, h: Tensor, given: Tensor) -> Tensor:
    right = given * 1
    h = torch.sin(model.layer(2, model.layer(1, h)) + right)
    right.mul_(0.5)
    return h


def input_that_is_trained_from_then_on(model: Between, h: Tensor, given: Tensor) -> Tensor:
    given.copy_(model.layer(1, h))
    return model.layer(2, given)


def made_before_it_is_trained(model: Between, h: Tensor, _: Tensor) -> Tensor:
    zeros = torch.zeros(WIDTH, WIDTH)
    zeros.copy_(model.layer(1, h))
    return model.layer(2, zeros)


def parts_that_autograd_takes_for_values(model: Between, h: Tensor, _: Tensor) -> Tensor:
    parts = torch.unsafe_chunk(h * 1, 2)
    h = model.layer(1, torch.cat(parts))
    parts[0].mul_(2)
    return model.layer(2, h) + torch.cat(parts)


def counted_by_its_version(model: Between, h: Tensor, given: Tensor) -> Tensor:
    before = given._version
    given.add_(1.0)
    h = model.layer(2, model.layer(1, h))
    return h * (given._version - before)


def number_read_before_a_write_by_vmap(model: Between, h: Tensor, given: Tensor) -> Tensor:
    number = given[0, 3].item()
    h = model.layer(1, h) + number
    torch.vmap(lambda row: row.mul_(2))(given)
    return model.layer(2, h) + number


def pulled_back_later(model: Between, h: Tensor, _: Tensor) -> Tensor:
    value, pull = torch.func.vjp(torch.sin, model.layer(1, h))  # type: ignore[misc]  # as without has_aux
    return model.layer(2, h) + cast(Tensor, pull(torch.ones_like(value))[0])


BODIES = (
    number_read_before_a_write_by_vmap, pulled_back_later, counted_by_its_version,
    parts_that_autograd_takes_for_values, detached_in_place, strided, columns, view_by_tensor,
    broadcast, batch, float_in_region, bool_in_region, by_data, by_data_in_a_body,
    read_and_written_in_one_segment, input_that_is_trained_from_then_on, made_before_it_is_trained,
)  # fmt: skip
BODIES_IN_TURN = [
    pytest.param(body, marks=BY_NIGHT if place % 3 else ()) for place, body in enumerate(BODIES)
]
"""By day every third."""


@pytest.mark.parametrize("body", BODIES_IN_TURN, ids=lambda body: body.__name__)
def test_what_is_done_in_place_is_seen_where_eager_sees_it(body: Any) -> None:
    torch._dynamo.reset()
    model = Between(body)
    expected = trained(copy.deepcopy(model), lambda ddp: ddp)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = trained(model, partial(ddpopt.compile, backend="aot_eager", strategy="split"))
    assert [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)] == []


FORBIDDING = (
    cut_points._redescribed, cut_points._recomputed_after_write,
    cut_points._aliased_with_own_gradient, cut_points.up_to_last_write,
    lambda body: cut_points._without_backward(body, gradient_carriers(body.graph)),
)  # fmt: skip
HARMLESS = {"detached_in_place": ["add"], "broadcast": ["add_1", "add_2"]}
"""Cuts after the last write, which planning forbids all the same."""


def accepted_of_forbidden(model: nn.Module, inputs: Any, *forbidding: Any) -> list[str]:
    """Where the proof accepts a cut that planning forbids: the nodes behind these cuts."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        traced = trace(model, *inputs)
    found, accepted = cut_points.Body(traced.gm.graph), []
    forbidden = found.blocked(span for find in forbidding for span in find(found))
    for node, why in zip(found.nodes, forbidden, strict=True):
        plan = cut_before(traced.gm, node.name)
        with contextlib.suppress(CertificateError):
            certify(traced.gm, partition(traced.gm, plan), plan, {})
            accepted += [node.name] * (why is not None)
    return accepted


@pytest.mark.parametrize("body", BODIES_IN_TURN, ids=lambda body: body.__name__)
def test_the_proof_rejects_each_cut_that_planning_forbids_for_memory_or_gradients(body: Any) -> None:
    # what else planning forbids fails in Dynamo or AOTAutograd
    found = accepted_of_forbidden(Between(body), two_inputs(), *FORBIDDING)
    assert found == HARMLESS.get(body.__name__, [])


@pytest.mark.parametrize("late", [*APART, *READ_LATE], ids=repr)
def test_it_rejects_cuts_of_drawn_models_too(late: Step) -> None:
    program = DrawnModel((LAYER, late), cap_bytes=1).program
    more = [cut_points._uncrossable] if late in READ_LATE else []
    assert accepted_of_forbidden(program.model(), program.inputs()[0], *FORBIDDING, *more) == []


def two_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)


def two_names_of_one_input() -> tuple[Tensor, Tensor]:
    x = torch.randn(WIDTH, WIDTH)
    return x, x.view(WIDTH, WIDTH)


class ByAnotherName(Between):
    """Writes to an input, with gradient, by another name than the one that a later layer reads."""

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(1, self.layer(0, self.own * 1))
        given.add_(h)
        return (self.layers[3](self.layer(2, h) + x),)


class BothNamesBefore(Between):
    """As above, but the other name is read before the write too, and backward needs what was overwritten."""

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(1, self.layer(0, self.own * 1))
        before = x.sum()
        given.mul_(h)
        return (self.layers[3](self.layer(2, h) + x) + before,)


class SeenWithoutGradient(Between):
    """Returns views that were taken without gradient; of a number's bits, nothing can require grad."""

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(1, self.layer(0, x + given))
        with torch.no_grad():
            seen = h.chunk(2, 1)[0], h.chunk(2, 1)[1].detach(), h.view(torch.int32), h.view(-1)
        return (self.layers[3](self.layer(2, h)), *seen)


@pytest.mark.parametrize("kind", [ByAnotherName, BothNamesBefore, SeenWithoutGradient])
def test_each_name_of_one_memory_has_the_value_and_gradient_that_eager_gives_it(kind: type[Between]) -> None:
    torch._dynamo.reset()
    model = kind(pulled_back_later)
    expected = trained(copy.deepcopy(model), lambda ddp: ddp, two_names_of_one_input)
    compiled = partial(ddpopt.compile, backend="aot_eager", strategy="split")
    assert all(map(torch.equal, trained(model, compiled, two_names_of_one_input), expected))


def trained(
    model: nn.Module,
    wrap: Callable[[DistributedDataParallel], Any],
    given: Callable[[], tuple[Tensor, Tensor]] = two_inputs,
) -> list[Tensor]:
    """Outputs, inputs, gradients and buffers of two steps."""
    step = wrap(DistributedDataParallel(model, bucket_cap_mb=CAP, find_unused_parameters=True))
    left: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(seed)
        inputs = given()
        outputs = [leaf for leaf in pytree.tree_leaves(step(*inputs)) if isinstance(leaf, Tensor)]
        losses = [leaf.square().mean() for leaf in outputs if leaf.requires_grad]
        torch.autograd.backward(torch.stack(losses).sum())
        gradients = [parameter.grad for parameter in model.parameters()]
        leaves = pytree.tree_leaves((outputs, inputs, gradients, [*model.buffers()]))
        left += (leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor))
    return left
