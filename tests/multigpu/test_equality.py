"""`assert_ddp_equal`, as a user's test calls it: on ranks, or in a process of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import UsageError
from ddpopt.testing import Ranks, assert_ddp_equal


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def raised(call: Callable[[], None]) -> str:
    """What a call raised, so that every rank gets to its next collective."""
    try:
        call()
    except AssertionError as error:
        return str(error)
    return ""


def doubles_on_rank_1(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend whose code is wrong on one rank."""
    factor = 2.0 if dist.get_rank() == 1 else 1.0
    return lambda *args: tuple(factor * value for value in graph(*args))


@pytest.mark.world_size(2)
def test_different_weights_and_inputs_on_each_rank_are_equal_to_eager_ddp(ranks: Ranks) -> None:
    torch.manual_seed(ranks.rank)
    model = tower()
    inputs = torch.randn(4, 8)

    def state() -> list[Tensor]:
        return [torch.random.get_rng_state(), *(p.detach().clone() for p in model.parameters())]

    before = state()
    message = raised(lambda: assert_ddp_equal(model, inputs, ddp_kwargs={"bucket_cap_mb": 0.0002}))
    unchanged = all(map(torch.equal, before, state()))
    assert ranks.gather((message, unchanged)) == [("", True)] * ranks.size


@pytest.mark.world_size(2)
def test_a_gradient_that_is_wrong_on_one_rank_is_found_on_every_rank(ranks: Ranks) -> None:
    case = (tower(), torch.ones(4, 8))
    message = raised(lambda: assert_ddp_equal(*case, backend=doubles_on_rank_1, strategy="split"))
    messages = ranks.gather(message)
    assert messages[0] == messages[-1]
    for name, _ in tower().named_parameters():
        assert f"the gradient of {name}" in message, message


@pytest.mark.one_process
def test_without_ranks_it_makes_a_group_of_one_and_leaves_none() -> None:
    seen: list[tuple[int, ...]] = []

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tower()

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.body(x) * scale}

    def loss(output: dict[str, Tensor]) -> Tensor:
        seen.append(tuple(output["out"].shape))
        return output["out"].sum()

    def inputs(step: int) -> dict[str, Tensor]:
        return {"x": torch.full((2, 8), float(step))}

    assert_ddp_equal(Named(), inputs, kwargs={"scale": torch.ones(8)}, loss=loss, strategy="split", steps=2)
    assert set(seen) == {(2, 8), (1, 8)}  # one of the extra steps has a smaller batch
    assert not dist.is_initialized()


@pytest.mark.one_process
def test_another_mode_is_judged_by_its_name() -> None:
    assert_ddp_equal(tower(), (torch.ones(2, 8),), mode="eager")
    with pytest.raises(UsageError, match=r"expected one of eager, torch, .*, got 'nonesuch'"):
        assert_ddp_equal(tower(), (torch.ones(2, 8),), mode="nonesuch")
    assert not dist.is_initialized()


class LeavesOut(nn.Module):
    """The last of four ranks leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if dist.get_rank() == 3 else self.second(x)


@pytest.mark.world_size(4, simulate=True)
def test_a_test_may_be_each_of_several_ranks_in_turn() -> None:
    ranks = set[int]()

    def inputs(step: int) -> Tensor:
        ranks.add(dist.get_rank())
        return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))

    assert_ddp_equal(tower(), inputs)
    assert ranks == {0, 1, 2, 3}
    with pytest.raises(AssertionError, match=r"on 4 simulated ranks: .*\n.*\n.* rank 3 would send"):
        assert_ddp_equal(LeavesOut(), torch.ones(2, 8))


@pytest.mark.world_size(1)
def test_a_module_in_ddp_is_refused(ranks: Ranks) -> None:
    with pytest.raises(UsageError, match=r"not wrapped in DDP, got DistributedDataParallel\. Pass"):
        assert_ddp_equal(DistributedDataParallel(tower().to(ranks.device)), torch.ones(2, 8))
