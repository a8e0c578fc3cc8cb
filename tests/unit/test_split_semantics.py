"""Strategy split on one rank: who reads a tensor, by whatever name, reads what eager DDP reads there."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ddpopt
from tests.multigpu.single import single_rank

WIDTH = 8
CAP = WIDTH * WIDTH * 4 / 2**20
Write = Callable[["Written", Tensor, Tensor, Tensor], object]
Read = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield
    torch._dynamo.reset()


class Written(nn.Module):
    """Four layers; a view of a base is taken after the first, the base is written after the third."""

    own: Tensor
    ones: Tensor

    def __init__(self, base: str, write: Write, read: Read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("own", torch.randn(WIDTH, WIDTH))
        self.register_buffer("ones", torch.ones(WIDTH))
        self.base, self.write, self.read = base, write, read

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.layers[0](x))
        base = {"buffer": self.own, "input": given, "value": h * 1}[self.base]
        view = base.t()
        h = torch.tanh(self.layers[2](torch.tanh(self.layers[1](h))))
        self.write(self, base, view, h)
        h, *others = self.read(h, base, view)
        return self.layers[3](torch.tanh(h)), *others


class Halving(torch.autograd.Function):
    """Writes to an argument without saying so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor) -> Tensor:
        base.mul_(0.5)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


halve: Any = Halving.apply


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]  # torch's own
def unseen(base: Tensor) -> Tensor:
    return base.mul_(0.5).sum()


@torch._dynamo.nonstrict_trace
def untraced(base: Tensor) -> Tensor:
    return base.mul_(0.5).sum()


def halved(x: Tensor, base: Tensor) -> Tensor:
    base.mul_(0.5)
    return x.sin()


def by_numpy(base: Tensor) -> None:
    array = base.numpy()
    array *= 0.5


WRITES: Mapping[str, Write] = {
    "__imul__": lambda _, base, view, h: base.__imul__(0.5),
    "view.mul_": lambda _, base, view, h: view.mul_(0.5),
    "foreach": lambda _, base, view, h: torch._foreach_mul_([base], 0.5),
    "out": lambda _, base, view, h: torch.mul(h.detach(), 2, out=base),
    "batch_norm": lambda model, base, _, h: torch.batch_norm(
        h, None, None, base[0], model.ones, True, 0.1, 1e-5, False
    ),
    "embedding": lambda _, base, view, h: F.embedding(torch.tensor([1]), base, max_norm=0.1),
    "numpy": lambda _, base, view, h: by_numpy(base),
    "allow_in_graph": lambda _, base, view, h: unseen(base),
    "nonstrict_trace": lambda _, base, view, h: untraced(base),
    "checkpoint": lambda _, base, view, h: checkpoint(halved, h, base, use_reentrant=False),
    "autograd.Function": lambda _, base, view, h: halve(h, base),
    "t_": lambda _, base, view, h: torch.ops.aten.t_(base),
    "as_strided_": lambda _, base, view, h: torch.as_strided_(base, (WIDTH, WIDTH), (1, WIDTH)),
}
READS: Mapping[str, Read] = {
    "the view": lambda h, base, view: (h + view,),
    "both": lambda h, base, view: (h + view * 2 + base,),
    "the caller the view": lambda h, base, view: (h, view),
    "the caller the base": lambda h, base, view: (h + view, base),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("base", ["buffer", "input"])
def test_a_view_is_read_as_it_is_behind_a_write(base: str, write: str) -> None:
    expect_as_eager(Written(base, WRITES[write], READS["both"]))


@pytest.mark.parametrize("base", ["buffer", "value"])
@pytest.mark.parametrize("read", READS)
def test_everyone_reads_what_was_written(read: str, base: str) -> None:
    expect_as_eager(Written(base, WRITES["view.mul_"], READS[read]))


def test_a_number_is_read_off_what_was_written() -> None:
    # of a buffer, a whole graph of torch 2.13 gets the gradients wrong itself
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        read: Read = lambda h, base, view: (h * view[0, 1].item(),)  # noqa: E731  # as those above
        expect_as_eager(Written("value", WRITES["view.mul_"], read))


class InPlaceResidual(nn.Module):
    """A block that adds to what it has made, in a checkpoint or by a view."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        h = self.layers[0](x).view(2, -1, WIDTH)
        h += self.layers[1](torch.tanh(h + 1))
        h += self.layers[2](torch.tanh(h + 1))
        return torch.tanh(h)

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        h = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return (self.layers[3](h),)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_residual_may_be_added_in_place(checkpointed: bool) -> None:
    expect_as_eager(InPlaceResidual(checkpointed=checkpointed))


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


class HalvingData(Halving):
    """Writes to an argument so that autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor) -> Tensor:
        base.data.mul_(0.5)
        return x * 1


def by_data_in_a_body(model: Between, h: Tensor, _: Tensor) -> Tensor:
    h = model.layer(2, model.layer(1, h * model.own))
    written: Tensor = HalvingData.apply(h, model.own)  # type: ignore[no-untyped-call]  # torch's own
    return written


def scaled_by_statistics(model: Between, h: Tensor, _: Tensor) -> Tensor:
    h = model.layer(2, model.layer(1, h * model.own[0]))
    return nn.functional.batch_norm(h, model.own[0], model.own[1], training=True, momentum=0.5)


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


BODIES = (
    detached_in_place, strided, columns, view_by_tensor, broadcast, batch, float_in_region, bool_in_region,
    by_data, by_data_in_a_body, scaled_by_statistics,
    read_and_written_in_one_segment, input_that_is_trained_from_then_on, made_before_it_is_trained,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_is_done_in_place_is_seen_where_eager_sees_it(body: Any) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        expect_as_eager(Between(body))


def expect_as_eager(model: nn.Module) -> None:
    """Two steps of training must leave the same behind, bit by bit, compiled by strategy split."""
    torch._dynamo.reset()
    expected, found = trained(copy.deepcopy(model), lambda ddp: ddp), trained(model, compiled)
    assert [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)] == []


def compiled(ddp: DistributedDataParallel) -> Callable[..., Any]:
    step: Callable[..., Any] = ddpopt.compile(ddp, backend="aot_eager", strategy="split")
    return step


def trained(model: nn.Module, wrap: Callable[[DistributedDataParallel], Callable[..., Any]]) -> list[Tensor]:
    """Outputs, inputs, gradients and buffers of two steps."""
    step = wrap(DistributedDataParallel(model, bucket_cap_mb=CAP))
    left: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(seed)
        inputs = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        outputs = step(*inputs)
        outputs[0].square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        left += (
            t.detach().clone() for t in pytree.tree_leaves((outputs, inputs, gradients, [*model.buffers()]))
        )
    return left
