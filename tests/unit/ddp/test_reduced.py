"""ddpopt.ddp.reduced: a reducer's parameters are those that DDP was built with, whatever became of them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.ddp.reduced import as_built, held_parameters
from ddpopt.dynamo.backend import Strategy
from ddpopt.errors import UnsupportedError
from ddpopt.planning.bucket_rule import specs_from_ddp
from tests.multigpu.models import same

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
WIDTH = 16
ONE_LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20


class Net(nn.Module):
    """Four layers, of which a forward may use only the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, count: int = 4) -> Tensor:
        for layer in self.layers[:count]:
            x = torch.tanh(layer(x))
        return x


class Sparse(nn.Module):
    """An embedding with sparse gradients before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)


def freeze(module: nn.Module, frozen: bool = True) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)


def sevenfold(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A reduction that shows, on one rank, what was reduced."""
    del state
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 7 + 1)
    return future


def ddp_of(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **{"bucket_cap_mb": ONE_LAYER_MB, **kwargs})


def names(ddp: Any) -> list[str]:
    return [spec.name for spec in specs_from_ddp(ddp)]


def test_what_was_frozen_or_thawed_after_ddp_was_built_does_not_count() -> None:
    net = Net()
    freeze(net.layers[0])
    ddp = DistributedDataParallel(net)
    before = names(ddp)
    freeze(net.layers[0], frozen=False)
    freeze(net.layers[2])
    assert names(ddp) == before
    assert [parameter.requires_grad for parameter in net.layers[2].parameters()] == [False, False]
    with as_built(ddp):
        assert {id(p) for p in net.parameters() if p.requires_grad} == set(map(id, held_parameters(ddp)))


def test_a_frozen_parameter_can_be_imposed_on_and_is_reduced_once_it_is_thawed() -> None:
    ddp, eager = ddp_of(), ddp_of()
    plan = ddpopt.plan(ddp, torch.ones(2, WIDTH))
    freeze(ddp.module)
    impose(ddp, plan)
    freeze(ddp.module, frozen=False)
    for module in (ddp, eager):
        module.register_comm_hook(None, sevenfold)
        module(torch.ones(2, WIDTH)).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ddp.parameters(), eager.parameters(), strict=True))


@pytest.mark.parametrize("imposed", [False, True])
def test_a_parameter_that_was_replaced_is_no_longer_planned_for(imposed: bool) -> None:
    ddp = ddp_of()
    if imposed:
        impose(ddp, ddpopt.plan(ddp, torch.ones(2, WIDTH)))
    ddp.module.layers[1].bias = nn.Parameter(torch.zeros(WIDTH))
    if imposed:
        assert names(ddp) == [name for name, _ in ddp.module.named_parameters() if name != "layers.1.bias"]
        return
    with pytest.raises(UnsupportedError) as caught:
        specs_from_ddp(ddp)
    assert str(caught.value) == (
        "the module has lost 1 of the 8 parameters that DDP was built with: others took their places, and "
        "DDP reduces none of those. Build DDP after the last parameter was replaced"
    )


def test_before_the_first_backward_of_a_sparse_gradient_the_log_must_tell() -> None:
    net = Sparse()
    ddp = DistributedDataParallel(net)
    before = names(ddp)
    freeze(net)
    assert names(ddp) == before == ["table.weight", "layer.weight", "layer.bias"]
    part = Sparse()
    part.layer.bias.requires_grad_(False)
    ddp = DistributedDataParallel(part)
    freeze(part.layer)
    with pytest.raises(UnsupportedError, match=r"DDP was built with 2 parameters, some of which have been"):
        specs_from_ddp(ddp)


def test_asking_leaves_every_flag_as_it_was_whatever_happens_meanwhile() -> None:
    ddp = ddp_of()
    freeze(ddp.module.layers[1])
    before = [parameter.requires_grad for parameter in ddp.parameters()]
    with contextlib.suppress(ZeroDivisionError), as_built(ddp):
        freeze(ddp.module)
        raise ZeroDivisionError
    assert [parameter.requires_grad for parameter in ddp.parameters()] == before


def test_integers_are_never_trained() -> None:
    net = Sparse()
    net.register_parameter("count", nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    ddp = DistributedDataParallel(net)
    freeze(net)
    assert names(ddp) == ["table.weight", "layer.weight", "layer.bias"]
    with as_built(ddp):
        assert {id(p) for p in net.parameters() if p.requires_grad} == set(map(id, held_parameters(ddp)))


# ------------------------------------------------------------------------------ trained as eager DDP does

Say = Callable[[Any, Callable[[], Any]], list[Tensor | None]]


def steps(ddp: Any, call: Any, times: int, **arguments: Any) -> list[Tensor | None]:
    """The gradients of some training steps."""
    found: list[Tensor | None] = []
    for number in range(times):
        call(
            torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number)), **arguments
        ).sum().backward()
        found.extend(None if p.grad is None else p.grad.clone() for p in ddp.module.parameters())
        ddp.zero_grad()
    return found


def attack(call: Any) -> list[Tensor | None]:
    """The gradient of an input alone."""
    x = torch.ones(2, WIDTH, requires_grad=True)
    call(x).sum().backward()
    return [x.grad]


def frozen_before_it_is_compiled(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    freeze(ddp.module.layers[0])
    call = compiled()
    found = steps(ddp, call, 2)
    freeze(ddp.module.layers[0], frozen=False)
    return [*found, *steps(ddp, call, 2)]


def frozen_after_it_was_compiled(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    call = compiled()
    freeze(ddp.module.layers[0])
    found = steps(ddp, call, 1)
    freeze(ddp.module.layers[0], frozen=False)
    return [*found, *steps(ddp, call, 2)]


def frozen_for_an_attack_before_each_step(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    call = compiled()
    found: list[Tensor | None] = []
    for _ in range(2):
        freeze(ddp.module)
        found.extend(attack(call))
        freeze(ddp.module, frozen=False)
        found.extend(steps(ddp, call, 1))
    return found


def replaced_before_it_is_compiled(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    ddp.module.layers[1].weight = nn.Parameter(torch.eye(WIDTH))
    return steps(ddp, compiled(), 2)


def replaced_after_it_was_compiled(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    call = compiled()
    ddp.module.layers[1].weight = nn.Parameter(torch.eye(WIDTH))
    return steps(ddp, call, 2)


def replaced_after_a_step(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    call = compiled()
    found = steps(ddp, call, 1)
    ddp.module.layers[1].weight = nn.Parameter(torch.eye(WIDTH))
    return [*found, *steps(ddp, call, 2)]


def accumulated_with_gradients_from_before(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    for parameter in ddp.module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    call = compiled()
    with ddp.no_sync():
        call(torch.ones(2, WIDTH), count=2).sum().backward()
    return steps(ddp, call, 1, count=2) + steps(ddp, call, 1)


def used_and_forgotten_before_the_first_step(ddp: Any, compiled: Callable[[], Any]) -> list[Tensor | None]:
    call = compiled()
    with ddp.no_sync():
        call(torch.ones(2, WIDTH)).sum().backward()
    ddp.zero_grad()
    return steps(ddp, call, 1, count=2) + steps(ddp, call, 1)


STORIES: Sequence[Say] = (
    frozen_before_it_is_compiled,
    frozen_after_it_was_compiled,
    frozen_for_an_attack_before_each_step,
    replaced_before_it_is_compiled,
    replaced_after_it_was_compiled,
    replaced_after_a_step,
    accumulated_with_gradients_from_before,
    used_and_forgotten_before_the_first_step,
)


@pytest.mark.parametrize("strategy", ["split", "inline"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_module_whose_parameters_changed_trains_as_eager_ddp_does(story: Say, strategy: Strategy) -> None:
    def told(wrap: Callable[[Any], Any]) -> list[Tensor | None]:
        ddp = ddp_of(find_unused_parameters=True)
        ddp.register_comm_hook(None, sevenfold)
        try:
            return story(ddp, lambda: wrap(ddp))
        except RuntimeError as error:
            refused.append(str(error))
            return []

    refused: list[str] = []

    eager = told(lambda ddp: ddp)
    found = told(lambda ddp: ddpopt.compile(ddp, backend="aot_eager", strategy=strategy))
    assert refused[::2] == refused[1::2]
    assert [gradient is None for gradient in found] == [gradient is None for gradient in eager]
    for mine, theirs in zip(found, eager, strict=True):
        assert mine is None or theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("strategy", ["split", "inline"])
@pytest.mark.parametrize("times", [0, 1])
def test_a_static_graph_reduces_what_its_first_backward_reached(strategy: Strategy, times: int) -> None:
    def told(wrap: Callable[[Any], Any]) -> list[Tensor | None]:
        ddp = ddp_of(static_graph=True)
        ddp.register_comm_hook(None, sevenfold)
        call = wrap(ddp)
        freeze(ddp.module)
        found = [gradient for _ in range(times) for gradient in attack(call)]
        freeze(ddp.module, frozen=False)
        return [*found, *steps(ddp, call, 3)]

    eager = told(lambda ddp: ddp)
    found = told(lambda ddp: ddpopt.compile(ddp, backend="aot_eager", strategy=strategy))
    assert same([found], [eager])


def test_what_eager_ddp_refuses_is_refused_too() -> None:
    ddp = ddp_of()
    call = ddpopt.compile(ddp, backend="eager", strategy="split")
    freeze(ddp.module.layers[0])
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        steps(ddp, call, 2)
    assert imposed_plan(ddp) is not None
