"""Helpers of the tests of one rank: a small model, what is explained of it, and a reducer that runs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports

from ddpopt.cases import corpus
from ddpopt.explanation.explain import explain_case
from ddpopt.explanation.result import Explanation, OwnBucket
from ddpopt.planning.bucket_rule import specs_from_ddp

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


def marked(factor: float, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that shows, on one rank, what was reduced, and by whom last."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() * factor + 1)
    return done


@functools.cache
def explained(name: str) -> Explanation:
    """A case of the corpus, explained once for all tests."""
    case = corpus.case(name)
    return explain_case(case, case.ddp_kwargs, "split")


def params(buckets: tuple[OwnBucket, ...]) -> list[tuple[str, ...]]:
    return [bucket.params for bucket in buckets]


def running_buckets(ddp: Any, step: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, ...]]:
    """The buckets of a reducer after four steps."""
    for _ in range(4):
        step(*inputs).square().mean().backward()
    specs = specs_from_ddp(ddp)
    rebuilt: str = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return [tuple(specs[int(index)].name for index in bucket.split()) for bucket in rebuilt.split(",")]
