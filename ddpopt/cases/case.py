"""The definition of a case.

A case is a model with everything that one data-parallel step of it needs: inputs for each rank and step, a
loss, and DDP's arguments. The inputs and loss functions may use tensors and modules of their own, which are
outside DDP (a soft prompt, a head): verification compares their gradients, and no optimizer updates them.
Invariant: equal arguments give equal tensors, on every rank, process and platform, so two runs of a case
differ only in the mode that ran them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ddpopt.errors import UsageError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward."""


def mean_square(output: object) -> Tensor:
    """Return the mean of squares over all floating-point and complex tensors in an output.

    Args:
        output: the output of a model: a tensor, or containers of tensors and anything else.

    Returns:
        A scalar, at least float32, the sum of ``|x| ** 2`` over all elements, divided by their number.

    Raises:
        UsageError: if the output holds no floating-point or complex element.
    """
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    parts = [_as_real(leaf) for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    count = sum(part.numel() for part in parts)
    if count == 0:
        raise UsageError(
            "expected a floating-point tensor in the model's output, "
            f"got {type(output).__name__} without one; return one, or give the case a loss"
        )
    return torch.stack([part.square().sum() for part in parts]).sum() / count


def on_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in containers to a device; leaves stay leaves."""

    def moved(leaf: Any) -> Any:
        there = leaf.to(device) if isinstance(leaf, Tensor) else leaf
        is_new_leaf = there is not leaf and leaf.is_leaf
        return there.detach().requires_grad_(leaf.requires_grad) if is_new_leaf else there

    return tree_map(moved, value)


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real, and widen half precision so that squares do not overflow."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real if real.dtype == torch.float64 else real.float()


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its inputs, its loss and the DDP arguments it needs.

    Attributes:
        name: unique among the cases that run together.
        model: builds the model, on the CPU unless it chooses another device, with equal weights at every
            call.
        inputs: ``(rank, step) -> (args, kwargs)``; equal at every call, different per rank and step. They may
            require gradients, or be computed from parameters outside DDP.
        about: one sentence on what the case exercises, with the public report it comes from, if any.
        loss: maps the model's output to a scalar to differentiate; may read parameters outside DDP.
        ddp_kwargs: arguments for ``DistributedDataParallel`` that the case needs, or that it is about (a
            bucket cap).
        graphs: the number of graphs that Dynamo captures in the first step of a compiled run.
        unused: trainable parameters that get no gradient on at least one rank.
        ranks_differ: whether ranks run different graphs, because they use different parameters or sizes.
        parallelize: ``(model, mesh) -> model`` splits a model between the ranks of a mesh of one dimension,
            as ``parallelize_module`` does; None if only whole models are trained.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int, int], Call]
    about: str
    loss: Callable[[Any], Tensor] = mean_square
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    graphs: int = 1
    unused: tuple[str, ...] = ()
    ranks_differ: bool = False
    parallelize: Callable[[nn.Module, Any], nn.Module] | None = None

    def on(self, device: torch.device) -> "Case":
        """Return the case with its inputs on a device."""
        return replace(self, inputs=lambda rank, step: on_device(self.inputs(rank, step), device))

    def step(self, model: Callable[..., Any], rank: int, step: int) -> Tensor:
        """Run one forward and return its loss, ready for ``backward()``.

        The default generators are seeded first, differently per rank and step, so that dropout repeats too.

        Args:
            model: what ``self.model()`` returned, perhaps wrapped in DDP or compiled.
            rank: the rank whose inputs are used.
            step: index of the training step, from 0.

        Returns:
            The scalar loss.
        """
        torch.manual_seed(step_seed(rank, step))
        args, kwargs = self.inputs(rank, step)
        return self.loss(model(*args, **kwargs))


def step_seed(rank: int, step: int) -> int:
    """Return the seed of a rank and a step: 0 for the first step of rank 0, unique for up to 65536 ranks.

    Args:
        rank: rank of the process.
        step: index of the training step, from 0.

    Returns:
        A non-negative seed.

    >>> step_seed(0, 0), step_seed(1, 0), step_seed(0, 1)
    (0, 1, 65536)
    """
    return step * 65536 + rank
