"""Where the corpus draws its weights and inputs from: nothing here reads or leaves a global random state."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ddpopt.cases.case import step_seed

M = TypeVar("M", bound=nn.Module)


def seeded(build: Callable[..., M], *args: object, **kwargs: object) -> M:
    """Build a model whose weights are drawn under a fixed seed.

    Args:
        build: the module's class, or a function that builds it.
        *args: positional arguments for ``build``.
        **kwargs: keyword arguments for ``build``.

    Returns:
        The model, equal at every call.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build(*args, **kwargs)


def generator(rank: int, step: int) -> torch.Generator:
    """Return a generator of its own for a rank and a step.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.

    Returns:
        A CPU generator.
    """
    return torch.Generator().manual_seed(step_seed(rank, step))


def normal(rank: int, step: int, *shape: int) -> Tensor:
    """Draw a float32 tensor from the standard normal distribution.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.
        *shape: the tensor's sizes.

    Returns:
        The tensor, on the CPU.
    """
    return torch.randn(shape, generator=generator(rank, step))


def tokens(rank: int, step: int, vocabulary: int, *shape: int) -> Tensor:
    """Draw token numbers.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.
        vocabulary: one more than the largest token.
        *shape: the tensor's sizes.

    Returns:
        An int64 tensor on the CPU with values in ``[0, vocabulary)``.
    """
    return torch.randint(vocabulary, shape, generator=generator(rank, step))


def rows(rank: int, step: int, *, batch: int, width: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Draw the arguments of a model that takes one matrix; what most cases of plain layers use.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.
        batch: rows of the matrix.
        width: columns of the matrix.

    Returns:
        One positional argument of shape ``(batch, width)``, no keyword arguments.
    """
    return (normal(rank, step, batch, width),), {}
