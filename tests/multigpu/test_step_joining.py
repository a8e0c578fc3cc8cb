"""Steps under ``join()``: ranks with different numbers of inputs train as in eager DDP."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

import ddpopt
from ddpopt.errors import UnsupportedError
from ddpopt.ranks.group import Ranks

if torch.__version__ < "2.13":
    pytest.skip("ddpopt.train_step needs torch 2.13 or newer", allow_module_level=True)

WIDTH, CAP_MB = 6, 3e-4
NIGHT = pytest.mark.nightly


def net(norm: bool) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH) if norm else nn.Tanh())


def step(model: Any, optimizer: Any, x: Tensor) -> Any:
    model(x).square().mean().backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def accumulated(model: Any, optimizer: Any, x: Tensor) -> Any:
    with model.no_sync():
        model(x).square().mean().backward()
    return step(model, optimizer, x)


def unfinished(model: Any, optimizer: Any, x: Tensor) -> Any:
    return model(x).detach()


def of_two(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.other(model(x)).square().mean().backward()


def averaging(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


WAYS: dict[str, tuple[int, dict[str, Any], bool, Callable[[Any], object] | None]] = {
    "fewer later": (1, {}, True, None),
    "none at all": (2, {"gradient_as_bucket_view": True}, False, None),
    "averaging hook": (1, {}, False, averaging),
}
"""By how many steps each rank takes fewer than the one before, DDP's arguments, if it has buffers, a hook."""


def trained(ranks: Ranks, run: Any, name: str) -> Iterator[Any]:
    """What each step returns and leaves: alone, then under ``join()``, and alone again."""
    torch._dynamo.reset()
    fewer, ddp, norm, hook = WAYS[name]
    model = DDP(net(norm), bucket_cap_mb=CAP_MB, **ddp)
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3 if name == "fewer later" else 2):
        joins = epoch == 1 if name == "fewer later" else epoch == 0
        steps = max(0, 4 - fewer * ranks.rank) if joins else 2
        with model.join() if joins else nullcontext():
            for place in range(steps):
                torch.manual_seed(100 * epoch + 10 * place + ranks.rank)
                returned = run(model, optimizer, torch.randn(4, WIDTH))
                state = [optimizer.state[each] for each in model.parameters()]
                yield [each.clone() for each in tree_leaves([returned, [*model.parameters()], state])]
        yield [each.clone() for each in (*model.parameters(), *model.buffers())]


def assert_as_eager(ranks: Ranks, name: str, fusion: Any, tolerance: float) -> None:
    expected = [*trained(ranks, step, name)]
    found = [*trained(ranks, ddpopt.train_step(step, backend="aot_eager", fusion=fusion), name)]
    said = ""
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        said = str(error)
    assert not any(ranks.gather(said))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["fewer later", *(pytest.param(name, marks=NIGHT) for name in [*WAYS][1:])])
@pytest.mark.parametrize("fusion", [pytest.param("concat", marks=NIGHT), "coalesced"])
def test_ranks_may_have_different_numbers_of_inputs(ranks: Ranks, name: str, fusion: Any) -> None:
    assert_as_eager(ranks, name, fusion, 0.0)


@NIGHT
@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", WAYS)
def test_three_ranks_may_in_another_order_of_summation(ranks: Ranks, name: str) -> None:
    assert_as_eager(ranks, name, "concat", 1e-6)


@pytest.mark.parametrize(
    ("run", "ddp", "join", "words"),
    [
        (step, {"find_unused_parameters": True}, {}, "find_unused_parameters or static_graph"),
        (step, {}, {"divide_by_initial_world_size": False}, "divide_by_initial_world_size=False"),
        (accumulated, {}, {}, "several forwards, or without a backward"),
        (unfinished, {}, {}, "several forwards, or without a backward"),
        (of_two, {}, {}, "a step of several modules"),
    ],
)
def test_what_ranks_without_inputs_cannot_repeat_is_refused(
    ranks: Ranks, run: Any, ddp: dict[str, Any], join: dict[str, Any], words: str
) -> None:
    model = DDP(net(norm=False), **ddp)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.other = DDP(net(norm=False))
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UnsupportedError, match=words):  # noqa: SIM117  # the error has to leave join()
        with model.join(**join):
            ddpopt.train_step(run, backend="eager")(model, optimizer, torch.ones(4, WIDTH))
    assert all(map(torch.equal, model.parameters(), before))
