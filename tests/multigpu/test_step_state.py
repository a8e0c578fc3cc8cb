"""Passes over a step that add tensors to it: what they compute, keep, save and finish; what is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddpopt
from ddpopt.errors import PlanMismatchError, UsageError
from ddpopt.ranks.group import Ranks
from tests.support.refusals import refusal

if torch.__version__ < "2.13":
    pytest.skip("train_step needs torch 2.13", allow_module_level=True)
from examples.error_feedback import ErrorFeedback

aten: Any = torch.ops.aten
WIDTH, STEPS, RATE = 8, 5, 0.1
DECAY = 0.75
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.nightly))


class Averaging(ddpopt.StatefulTransform):
    """A moving average of the weights."""

    def __call__(self, graph_module: fx.GraphModule, state: Any) -> None:
        graph = graph_module.graph
        for node in graph.find_nodes(op="placeholder"):
            parameter = state.inputs.get(node.name)
            if isinstance(parameter, nn.Parameter):
                average = state.tensor(f"average of {node.name}", node, parameter)
                with graph.inserting_before(graph.output_node()):
                    graph.call_function(aten.lerp_.Scalar, (average, node, 1 - DECAY))


class Late(ddpopt.StatefulTransform):
    """The optimizer gets the gradients of the step before; `finish` applies the last ones."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, graph_module: fx.GraphModule, state: Any) -> None:
        graph = graph_module.graph
        sent = [each for each in graph.nodes if each.name.startswith("bucket_0_gradient")]
        for place, node in enumerate(sent):
            readers = [*node.users]
            pending = state.tensor(f"gradient {place}", node)
            with graph.inserting_after(node):
                late = graph.call_function(aten.clone.default, (pending,))
            with graph.inserting_after(late):
                graph.call_function(aten.copy_.default, (pending, node))
            for reader in readers:
                reader.replace_input_with(node, late)

    def finish(self, state: Mapping[str, Tensor]) -> None:
        shapes = {tuple(each.shape): each for each in state.values()}
        for parameter in self.parameters:
            parameter.sub_(shapes[tuple(parameter.shape)], alpha=RATE)


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2))


def batches(rank: int, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]


def train(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def compiled(transform: Any, backend: str = "aot_eager") -> Any:
    return ddpopt.train_step(train, backend=backend, transform=transform, parallel=ddpopt.Replicate())


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def mean(tensor: Tensor, size: int) -> Tensor:
    total = tensor * (1 / size)
    dist.all_reduce(total)
    return total


def alike(found: Any, expected: Any, backend: str, tolerance: float = 1e-6) -> bool:
    if backend == "inductor":
        return torch.allclose(found, expected, rtol=100 * tolerance, atol=tolerance)
    return torch.equal(found, expected)


def stepped(model: nn.Module, x: Tensor, change: Callable[[str, Tensor], Tensor]) -> None:
    """An eager step, whose gradients are changed before plain SGD takes them."""
    model(x).square().mean().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.add_(change(name, parameter.grad), alpha=-RATE)
            parameter.grad = None


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_feedback_is_what_eager_code_computes(ranks: Ranks, backend: str) -> None:
    ours, expected = model(), model()
    residuals = {name: torch.zeros_like(each) for name, each in expected.named_parameters()}

    def compressed(name: str, gradient: Tensor) -> Tensor:
        wanted = gradient * (1 / ranks.size) + residuals[name]
        small = wanted.to(torch.float16)
        residuals[name] = wanted - small.float()
        dist.all_reduce(small)
        return small.float()

    step = compiled(ErrorFeedback(), backend)
    optimizer = optimizer_of(ours)
    for x in batches(ranks.rank):
        step(ours, optimizer, x)
        stepped(expected, x, compressed)
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    # where a gradient is rounded the other way, it is off by a thousandth
    assert all(alike(found, wanted, backend, tolerance=RATE * 1e-3) for found, wanted in pairs)
    (residual,) = step.state_dict().values()
    lost = torch.cat([each.flatten() for each in residuals.values()])
    assert float(residual.norm()) == pytest.approx(float(lost.norm()), rel=0.5)
    assert backend == "inductor" or torch.equal(residual.sort().values, lost.sort().values)
    everywhere = ranks.gather(residual.tolist())
    assert ranks.size == 1 or everywhere[0] != everywhere[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_moving_average_is_torchs_and_begins_on_all_ranks_with_the_first_ones_weights(
    ranks: Ranks, backend: str
) -> None:
    ours, expected = model(ranks.rank), model()
    average_of: Any = get_ema_multi_avg_fn
    average: Any = AveragedModel(expected, multi_avg_fn=average_of(DECAY))
    average.update_parameters(expected)  # copies them
    step = compiled(Averaging(), backend)
    optimizer = optimizer_of(ours)
    for x in batches(ranks.rank):
        step(ours, optimizer, x)
        stepped(expected, x, lambda _, gradient: mean(gradient, ranks.size))
        average.update_parameters(expected)
    kept = step.state_dict()
    for name, wanted in average.module.named_parameters():
        layer, kind = name.split(".")
        (found,) = [each for key, each in kept.items() if f"_{layer}_" in key and kind in key]
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=1e-7)
        assert len({*map(tuple, ranks.gather(found.flatten().tolist()))}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_step_completes_what_is_pending(ranks: Ranks, backend: str) -> None:
    ours, expected = model(), model()
    pending = {name: torch.zeros_like(each) for name, each in expected.named_parameters()}

    def late(name: str, gradient: Tensor) -> Tensor:
        before, pending[name] = pending[name], mean(gradient, ranks.size)
        return before

    step = compiled(Late([*ours.parameters()]), backend)
    optimizer = optimizer_of(ours)
    *first, last = batches(ranks.rank)
    for x in first:
        step(ours, optimizer, x)
        stepped(expected, x, late)
    step.last(ours, optimizer, last)
    stepped(expected, last, late)
    for name, parameter in expected.named_parameters():
        parameter.data -= RATE * pending[name]
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    assert all(alike(found, wanted, backend) for found, wanted in pairs)


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
def test_a_step_goes_on_from_a_checkpoint(ranks: Ranks, when: str) -> None:
    whole, stopped = model(), model()
    step = compiled(ErrorFeedback())
    for x in batches(ranks.rank):
        step(whole, optimizer_of(whole), x)
    step = compiled(ErrorFeedback())
    for x in batches(ranks.rank)[:3]:
        step(stopped, optimizer_of(stopped), x)
    saved, weights = step.state_dict(), {name: each.clone() for name, each in stopped.state_dict().items()}
    resumed, step = model(), compiled(ErrorFeedback())
    if when == "after a step":
        step(resumed, optimizer_of(resumed), torch.ones(4, WIDTH))
    step.load_state_dict(saved)
    resumed.load_state_dict(weights)
    for x in batches(ranks.rank)[3:]:
        step(resumed, optimizer_of(resumed), x)
    pairs = zip(resumed.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(found, wanted) for found, wanted in pairs)


class Declaring(ddpopt.StatefulTransform):
    """Declares the given tensors, of the form of the first parameter."""

    def __init__(self, *names: str, initial: Tensor | None = None) -> None:
        self.names = names
        self.initial = initial

    def __call__(self, graph_module: fx.GraphModule, state: Any) -> None:
        first = next(iter(graph_module.graph.find_nodes(op="placeholder")))
        for name in self.names:
            state.tensor(name, first, self.initial)


def test_what_cannot_be_used_is_refused_with_its_name_on_all_ranks(ranks: Ranks) -> None:
    def refused(transform: Any, loaded: Mapping[str, Tensor] | None = None, after: int = 0) -> str:
        ours = model()
        step = compiled(transform)
        for _ in range(after):
            step(ours, optimizer_of(ours), torch.ones(4, WIDTH))

        def run() -> None:
            step.load_state_dict(loaded or {})
            step(ours, optimizer_of(ours), torch.ones(4, WIDTH))

        before = [each.clone() for each in ours.parameters()]
        message = str(refusal(run, UsageError))
        assert all(map(torch.equal, ours.parameters(), before))
        assert {*ranks.gather(message)} == {message}
        assert step.state_dict().keys() == ({"a"} if after else set())
        return message

    assert "'a' is declared twice" in refused(Declaring("a", "a"))
    form = r"'a': expected (3, 8) of torch.float32 on cpu, got (2,) of torch.float32 on cpu"
    assert form in refused(Declaring("a", initial=torch.ones(2)))
    assert form in refused(Declaring("a"), {"a": torch.ones(2)})
    assert form in refused(Declaring("a"), {"a": torch.ones(2)}, after=1)
    unknown = "the loaded state has 'b', which the pass does not declare"
    assert unknown in refused(Declaring("a"), {"b": torch.ones(2)})
    assert unknown in refused(Declaring("a"), {"b": torch.ones(2)}, after=1)
    with pytest.raises(UsageError, match="no pass that has one"):
        compiled(None).load_state_dict({"a": torch.ones(2)})


def test_ranks_whose_passes_declare_different_tensors_are_refused(ranks: Ranks) -> None:
    if ranks.size == 1:
        pytest.skip("needs two ranks")
    ours = model()
    before = [each.clone() for each in ours.parameters()]
    differing = Declaring(f"of rank {ranks.rank}")
    step = compiled(differing)
    refusal(lambda: step(ours, optimizer_of(ours), torch.ones(4, WIDTH)), PlanMismatchError)
    assert all(map(torch.equal, ours.parameters(), before))
    # what was refused is sent by no later graph
    differing.names = ("of all",)
    step(ours, optimizer_of(ours), torch.ones(5, WIDTH))
    assert not any(map(torch.equal, ours.parameters(), before))
