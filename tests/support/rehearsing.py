"""Helpers of the tests of one rank: a small model, what is explained of it, and a reducer that runs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.cases import corpus
from ddpopt.ddp.specs import limits_of, specs_from_ddp
from ddpopt.explanation.explain import explain_case
from ddpopt.explanation.result import Explanation
from ddpopt.observation import reducer_buckets
from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets
from ddpopt.planning.limits import BucketConfig

WIDTH = 128


class Linears(nn.Module):
    """Linear layers of which `order` says which run when."""

    def __init__(self, width: int = WIDTH, layers: int = 3, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.order = order or tuple(range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.order, x)

    def run(self, order: tuple[int, ...], x: Tensor) -> Tensor:
        for index in order:
            x = self.layers[index](x).relu()
        return x


class Broken(Linears):
    """The same in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        middle = len(self.order) // 2
        x = self.run(self.order[:middle], x)
        torch._dynamo.graph_break()
        return self.run(self.order[middle:], x)


def rows(width: int = WIDTH) -> Tensor:
    return torch.ones(4, width)


@functools.cache
def explained(name: str) -> Explanation:
    """A case of the corpus, explained once for all tests."""
    case = corpus.case(name)
    return explain_case(case, case.ddp_kwargs, "split")


def params(buckets: Iterable[Any]) -> list[tuple[str, ...]]:
    return [bucket.params for bucket in buckets]


def running_buckets(ddp: Any, step: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, ...]]:
    """The buckets of a reducer after four steps."""
    for _ in range(4):
        step(*inputs).square().mean().backward()
    return params(reducer_buckets.running_buckets(ddp))


def assert_buckets_as_predicted(ddp: Any, train: Callable[[int], object]) -> BucketConfig:
    """A reducer has the buckets of the rule before the first step, and after four; what its limits are.

    Steps are told their numbers.
    """
    specs, config = specs_from_ddp(ddp), limits_of(ddp)
    _assert_buckets(ddp, specs, initial_buckets(specs, config))
    ready: list[list[str]] = []
    param: Any  # torch leaves the hook's registration untyped
    for name, param in ddp.module.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: ready[-1].append(name))
    for number in range(4):
        ready.append([])
        train(number)
    if config.rebuilds:
        by_name = {spec.name: spec for spec in specs}
        seen = ready[1 if config.static_graph else 0]
        specs = tuple(by_name[name] for name in dict.fromkeys([*seen, *by_name]) if name in by_name)
    _assert_buckets(ddp, specs, (rebuilt_buckets if config.rebuilds else initial_buckets)(specs, config))
    return config


def _assert_buckets(ddp: Any, specs: Any, indices: Any) -> None:
    expected = [tuple(specs[index].name for index in bucket) for bucket in indices]
    assert params(reducer_buckets.running_buckets(ddp)) == expected
