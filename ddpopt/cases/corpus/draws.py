"""Draw the corpus's weights and inputs; nothing here reads or changes a global random state."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case, step_seed

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
    """Return a separate generator for a rank and a step.

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


def arrays(rank: int, step: int, *, shape: tuple[int, ...]) -> Call:
    """Draw the arguments of a model that takes one array, such as a batch of rows, sentences or images.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.
        shape: the array's sizes, usually the batch first.

    Returns:
        One positional argument, no keyword arguments.
    """
    return (normal(rank, step, *shape),), {}


def arrays_case(
    name: str, build: Callable[..., nn.Module], shape: tuple[int, ...], about: str = "", **more: Any
) -> Case:
    """Describe a case whose model takes one array.

    Args:
        name: name of the case.
        build: makes the model, without arguments.
        shape: the array's sizes, usually the batch first.
        about: as in `Case`; by default the first line of `build`'s docstring.
        **more: other fields of `Case`; `inputs` replaces the array.

    Returns:
        The case.
    """
    told = about or (getattr(build, "func", build).__doc__ or name).partition("\n")[0].rstrip(".")
    inputs = more.pop("inputs", partial(arrays, shape=shape))
    return Case(name, partial(seeded, build), inputs, about=told[0].lower() + told[1:], **more)


def rows_case(
    name: str,
    build: Callable[..., nn.Module],
    about: str = "",
    *,
    layers: int = 8,
    dim: int = 384,
    batch: int = 32,
    **more: Any,
) -> Case:
    """Describe a case whose model takes one matrix, like most cases of plain layers.

    Args:
        name: name of the case.
        build: makes the model, given `dim` and `layers`.
        about: as in `Case`; by default the first line of `build`'s docstring.
        layers: the number of layers.
        dim: columns of the matrix.
        batch: rows of the matrix.
        **more: other fields of `Case`.

    Returns:
        The case.
    """
    return arrays_case(name, partial(build, dim=dim, layers=layers), (batch, dim), about, **more)
