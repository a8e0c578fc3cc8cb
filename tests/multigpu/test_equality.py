"""`assert_ddp_equal`, as a user's test calls it: on ranks, or in a process of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
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


def scales_gradients(factor: float) -> Callable[[GraphModule, list[Tensor]], Any]:
    """A backend that multiplies what its backward gives."""

    def compiled_backward(graph: GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(lambda *args: [None if g is None else g * factor for g in graph(*args)])

    def compiled_forward(graph: GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(fw_compiler=compiled_forward, bw_compiler=compiled_backward)
    return lambda graph, inputs: backend(graph, inputs)


@pytest.mark.world_size(2)
def test_different_weights_and_inputs_on_each_rank_are_equal_to_eager_ddp(ranks: Ranks) -> None:
    torch.manual_seed(ranks.rank)
    model = tower()
    inputs = torch.randn(4, 8)

    def state() -> list[Tensor]:
        return [
            torch.random.get_rng_state(),
            *(parameter.detach().clone() for parameter in model.parameters()),
        ]

    before = state()
    message = raised(lambda: assert_ddp_equal(model, inputs, ddp_kwargs={"bucket_cap_mb": 0.0002}))
    unchanged = all(map(torch.equal, before, state()))
    assert ranks.gather((message, unchanged)) == [("", True)] * ranks.size


@pytest.mark.world_size(2)
def test_a_gradient_that_is_wrong_on_one_rank_is_found_on_every_rank(ranks: Ranks) -> None:
    backend = scales_gradients(2.0 if ranks.rank == 1 else 1.0)
    message = raised(lambda: assert_ddp_equal(tower(), torch.ones(4, 8), backend=backend, strategy="split"))
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
    assert set(seen) == {(2, 8)}
    assert not dist.is_initialized()


@pytest.mark.one_process
def test_another_mode_is_judged_by_its_name() -> None:
    assert_ddp_equal(tower(), (torch.ones(2, 8),), mode="manual")
    with pytest.raises(UsageError, match=r"expected one of eager, manual, .*, got 'nonesuch'"):
        assert_ddp_equal(tower(), (torch.ones(2, 8),), mode="nonesuch")
    assert not dist.is_initialized()


@pytest.mark.world_size(1)
def test_a_module_in_ddp_is_refused(ranks: Ranks) -> None:
    with pytest.raises(UsageError, match=r"not wrapped in DDP, got DistributedDataParallel\. Pass"):
        assert_ddp_equal(DistributedDataParallel(tower().to(ranks.device)), torch.ones(2, 8))
