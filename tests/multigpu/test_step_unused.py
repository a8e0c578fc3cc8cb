"""Ranks that use different parameters in a step: averaged, updated and left alone as in eager DDP."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves

import ddpopt
from ddpopt.errors import PlanMismatchError, UnsupportedError
from ddpopt.ranks.group import Ranks
from ddpopt.step import train

if torch.__version__ < "2.13":
    pytest.skip("ddpopt.train_step needs torch 2.13 or newer", allow_module_level=True)

WIDTH, BLOCKS, ROUNDS, CAP_MB = 6, 4, 6, 3e-4
NIGHT = pytest.mark.nightly


class Blocks(nn.Module):
    """Layers of which each rank uses some, an embedding, and a layer that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        weight: Any = self.blocks[1].weight
        weight.data = weight.data.t().contiguous().t()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.used: tuple[bool, ...] = (True,) * BLOCKS

    def forward(self, x: Tensor) -> Any:
        """(batch, WIDTH) to (batch, 2)."""
        for block, is_used in zip(self.blocks, self.used, strict=True):
            if is_used:
                x = torch.tanh(block(x))
        return self.last(self.norm(x))


Step = Callable[[Any, Any, Tensor], Any]


def once(model: Any, optimizer: Any, x: Tensor) -> Any:
    model(x).square().mean().backward()
    return updated(model, optimizer)


def updated(model: Any, optimizer: Any) -> Any:
    """The gradients, after a step of the optimizer."""
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def clipped(model: Any, optimizer: Any, x: Tensor) -> Any:
    model(x).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    return norm, updated(model, optimizer)


def accumulated(model: Any, optimizer: Any, x: Tensor) -> Any:
    with model.no_sync():
        model(2 * x).square().mean().backward()
    return once(model, optimizer, x)


def kept(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    optimizer.step()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def added(model: Any, optimizer: Any, x: Tensor) -> Any:
    """The gradients of all steps add up."""
    model(x).square().mean().backward()
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    optimizer.step()
    return gradients


WAYS: dict[str, tuple[Step, dict[str, Any]]] = {
    "once": (once, {}),
    "clipped": (clipped, {}),
    "accumulated": (accumulated, {}),
    "gradients kept": (kept, {}),
    "gradients added": (added, {}),
    "views": (once, {"gradient_as_bucket_view": True}),
}


def halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def hooked(model: Any) -> None:
    """Register hooks, which see no gradient of another rank's parameter."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3 + 1)
        parameter.register_post_accumulate_grad_hook(halved)


def uses(ranks: int, seed: int) -> list[list[tuple[bool, ...]]]:
    """For each step and rank, which layers are used; sometimes all ranks use the same."""
    draw = random.Random(seed)
    found = []
    for _ in range(ROUNDS):
        of_ranks = [tuple(draw.random() < 0.5 for _ in range(BLOCKS)) for _ in range(ranks)]
        found.append(of_ranks if draw.random() < 0.8 else of_ranks[:1] * ranks)
    return found


def trained(ranks: Ranks, step: Any, seed: int, ddp: dict[str, Any], *, hooks: bool) -> Iterator[Any]:
    """Everything that each step returns and leaves."""
    torch._dynamo.reset()
    model = DDP(Blocks(), bucket_cap_mb=CAP_MB, find_unused_parameters=True, **ddp)
    if hooks:
        hooked(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for place, of_ranks in enumerate(uses(ranks.size, seed)):
        model.module.used = of_ranks[ranks.rank]
        torch.manual_seed(10 * place + ranks.rank)
        returned = step(model, optimizer, torch.randn(4, WIDTH))
        state = [optimizer.state[each] for each in model.parameters() if each in optimizer.state]
        leaves = tree_leaves([returned, *model.parameters(), *model.buffers(), state])
        yield [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def assert_as_eager(ranks: Ranks, name: str, fusion: Any, seed: int, *, hooks: bool = False) -> None:
    step, ddp = WAYS[name]
    captured = ddpopt.train_step(step, backend="aot_eager", fusion=fusion)
    expected = [*trained(ranks, step, seed, ddp, hooks=hooks)]
    found = [*trained(ranks, captured, seed, ddp, hooks=hooks)]
    said = ""
    try:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    except AssertionError as error:
        said = str(error)
    assert not any(ranks.gather(said))


@pytest.mark.parametrize("name", ["once", *(pytest.param(name, marks=NIGHT) for name in [*WAYS][1:])])
@pytest.mark.parametrize("hooks", [pytest.param(False, marks=NIGHT), True])
def test_ranks_may_use_different_parameters(ranks: Ranks, name: str, hooks: bool) -> None:
    assert_as_eager(ranks, name, "concat", 0, hooks=hooks)


@NIGHT
@pytest.mark.world_size(3)
@pytest.mark.parametrize("fusion", ["concat", "coalesced"])
@pytest.mark.parametrize("seed", range(1, 7))
def test_drawn_uses_of_three_ranks_are_as_in_eager(ranks: Ranks, fusion: str, seed: int) -> None:
    assert_as_eager(ranks, [*WAYS][seed % len(WAYS)], fusion, seed)


def test_a_rank_that_fails_in_a_step_that_others_capture_again_is_heard(ranks: Ranks) -> None:
    model = DDP(Blocks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @ddpopt.train_step(backend="aot_eager")  # type: ignore[untyped-decorator]  # any function
    def step(x: Tensor, fails: bool) -> None:
        loss = model(x).square().mean()
        if fails:
            torch.manual_seed(0)
        loss.backward()
        optimizer.step()

    x = torch.ones(4, WIDTH)
    step(x, fails=False)
    model.module.used = (ranks.rank > 0,) * BLOCKS
    with pytest.raises(UnsupportedError if ranks.rank == 0 else PlanMismatchError):
        step(x, fails=ranks.rank == 0)
    step(x, fails=False)
    weights = ranks.gather(model.module.blocks[0].weight.detach())
    assert all(torch.equal(each, weights[0]) for each in weights)


@pytest.mark.world_size(2)
def test_there_is_a_limit_of_sets_of_parameters(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MOST", 2)
    model = DDP(Blocks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ddpopt.train_step(once, backend="aot_eager")
    x = torch.ones(4, WIDTH)
    uses = [tuple(ranks.rank == 0 and place == only for place in range(BLOCKS)) for only in range(BLOCKS)]
    model.module.used = uses[0]
    step(model, optimizer, x)
    model.module.used = uses[1]
    with pytest.raises(UnsupportedError, match="more than 2 different sets of parameters"):
        step(model, optimizer, x)
