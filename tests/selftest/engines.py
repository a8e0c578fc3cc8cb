"""Published silent bugs of data-parallel engines, each an engine of a few lines that the judge has to find.

The judge is also given `Averaging`, of which most of them are made: it is right.
``tests/data/engine_reports.json`` lists them; ``python -m tests.selftest.engines > docs/engine_reports.md``
writes the page.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddpopt.judge.engines.sharded import FullyShard, FullyShardedDataParallel1, mesh_of
from ddpopt.testing import Engine

HEAD = """\
# Public reports against data-parallel engines

Each row is a public report of a silent bug: a step that runs, with wrong gradients or parameters. The \
self-test of the judge has each as an [engine](engines.md) of a few lines, made of torch's own where that \
still has the bug, and the judge finds it. `python -m tests.selftest.engines` writes this page.

| report | what happened upstream | found by | under |
|---|---|---|---|
"""


class Averaging(Engine):
    """A right engine: it averages gradients one by one, at the end of a backward."""

    syncs = True
    backwards = 0

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        return model

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.syncs:
            for name, parameter in self.model.named_parameters():
                self.reduce(name, parameter)
        self.backwards += 1

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self.mean(parameter.grad)

    def mean(self, gradient: Tensor) -> None:
        gradient.div_(self.group.size())
        dist.all_reduce(gradient, group=self.group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True


class SumsOnly(Averaging):
    def mean(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)


class AveragesTwice(Averaging):
    def mean(self, gradient: Tensor) -> None:
        super().mean(gradient.div_(self.group.size()))


class ShardsOfOneRank(FullyShardedDataParallel1):
    compiles = False

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        self.root = FullyShardedDataParallel(
            model,
            device_mesh=mesh_of(model, group, rows=group.size()),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return self.root  # type: ignore[no-any-return]


class ClipsItsShard(FullyShardedDataParallel1):
    compiles = False
    clip = Engine.clip


class CountsEachGradientOnEachRank(Averaging):
    def clip(self, max_norm: float) -> Tensor:
        times = self.group.size() ** 0.5
        norm: Tensor = super().clip(max_norm / times)
        return norm.mul(times)


class OverwritesGradients(Averaging):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        self.zero_grad()
        super().backward(loss)


class ForgetsMicroBatches(Averaging):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.zero_grad()


class LosesTheSecondUse(Averaging):
    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                vars(module)["forward"] = Once(module)
        return super().prepare(model, group)


class Once:
    """Calls a layer; every second time without gradients for its parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.calls = layer, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        again = self.calls % 2 == 0
        weight, bias = (p.detach() if again else p for p in (self.layer.weight, self.layer.bias))
        return nn.functional.linear(x, weight, bias)


class OnlyWhereUsed(Averaging):
    gives = "arguments"

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.mean(mean)


class LastShardOfTiedStays(Averaging):
    def step(self, learning_rate: float) -> None:
        tied = next(self.model.parameters())
        rows = len(tied) - len(tied) // self.group.size()
        last = tied.detach()[rows:].clone()
        super().step(learning_rate)
        tied.detach()[rows:] = last


class NotInTheFirstStep(Averaging):
    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        if self.backwards > 0:
            super().reduce(name, parameter)


class BypassesDdp(Engine):
    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        return DistributedDataParallel(model, process_group=group).module  # type: ignore[no-any-return]


class ExpertsNotAveraged(Averaging):
    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if name.startswith("layers.1.") and parameter.grad is not None:
            parameter.grad.mul_(self.group.size())


class IgnoresParameters(FullyShard):
    compiles = False

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        ignored = {p for name, p in module.named_parameters() if "layers.1." in name}
        fully_shard(module, mesh=mesh_of(module, group), ignored_params=ignored)
        return module


class ReducesInBfloat16(Averaging):
    def mean(self, gradient: Tensor) -> None:
        narrow = gradient.bfloat16()
        super().mean(narrow)
        gradient.copy_(narrow)


@dataclass(frozen=True)
class Reported:
    """A published bug.

    Attributes:
        report: repository and number.
        upstream: what happened there, in a sentence.
        engine: name of the class here that has it.
        found_by: the levels that have to find it on two ranks.
        option: the option that shows it.
        case: the case of the matrix that shows it.
    """

    report: str
    upstream: str
    engine: str
    found_by: Sequence[str]
    option: str = "default"
    case: str = "plain"

    def row(self) -> str:
        repository, _, number = self.report.partition("#")
        link = f"[{self.report}](https://github.com/{repository}/issues/{number})"
        under = f"`{self.option}`" + ("" if self.case == "plain" else f", case `{self.case}`")
        return f"| {link} | {self.upstream}. | {', '.join(self.found_by)} | {under} |"


DATA = Path(__file__).parents[1] / "data" / "engine_reports.json"
REPORTED = tuple(Reported(**row) for row in json.loads(DATA.read_text(encoding="utf-8")))


def page() -> str:
    return HEAD + "\n".join(reported.row() for reported in REPORTED) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # its output
