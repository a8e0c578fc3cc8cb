"""The demo's checks of an iteration: are the gradients eager DDP's, and did DDP reduce the plan's buckets?

Gradients are judged against the same model in float64. Eager's own distance to it shows the size of rounding
for each parameter, even if a gradient is zero in theory and consists only of rounding.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt import Plan
from ddpopt.observation.observe import Observation

ROUNDING_LIMIT = 8.0
"""The largest error of a compiled gradient, in units of eager's own error."""

EXACT_BACKENDS = ("aot_eager", "eager")
"""Backends that run eager's kernels: on two ranks, where a sum has one order, every bit must be equal."""


@dataclass(frozen=True)
class Check:
    """One iteration compared with eager DDP's from equal weights; the worst over all parameters and ranks.

    Attributes:
        difference: the largest difference of two elements, in the gradients' own unit.
        error: the distance to the float64 gradient, in units of eager's own distance to it.
        as_planned: whether DDP reduced exactly the plan's buckets, in their order.
    """

    difference: float
    error: float
    as_planned: bool

    def gradients_right(self, *, bitwise: bool) -> bool:
        """Whether the gradients are as close to eager's as required."""
        return self.difference == 0.0 or (not bitwise and self.error <= ROUNDING_LIMIT)

    def worst_over_ranks(self) -> "Check":
        """Merge the checks of all ranks; every rank must call this."""
        numbers = torch.tensor([self.difference, self.error, float(not self.as_planned)], dtype=torch.float64)
        numbers = numbers.nan_to_num(nan=float("inf"), posinf=float("inf"))
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        difference, error, off_plan = numbers.tolist()
        return Check(difference, error, as_planned=not off_plan)


def must_be_bitwise(backend: str) -> bool:
    """Whether every bit must equal eager DDP's."""
    return backend in EXACT_BACKENDS and dist.get_world_size() <= 2


def exact_gradients(model: nn.Module, backward: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Compute the gradients in float64, averaged over the ranks: the values that both copies approximate.

    Args:
        model: the model without DDP; it is not changed.
        backward: runs forward and backward of a model.

    Returns:
        The gradients by parameter name.
    """
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    backward(exact)
    gradients = {name: param.grad for name, param in exact.named_parameters() if param.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def worst_gradient(ours: nn.Module, eager: nn.Module, exact: dict[str, Tensor]) -> tuple[float, float]:
    """Compare the gradients of two copies of a model.

    Args:
        ours: the copy to judge.
        eager: the eager copy.
        exact: float64 gradients by parameter name.

    Returns:
        The largest difference to eager, and the largest error in units of eager's, over all parameters. Both
        are infinite where a gradient is missing on one side, and NaN where one is NaN.
    """
    pairs = zip(ours.named_parameters(), eager.parameters(), strict=True)
    rows = [_compare_one(mine.grad, theirs.grad, exact.get(name)) for (name, mine), theirs in pairs]
    difference, error = (
        torch.tensor(rows, dtype=torch.float64).amax(0).tolist()
    )  # amax keeps NaN, max() may not
    return difference, error


def _compare_one(mine: Tensor | None, theirs: Tensor | None, exact: Tensor | None) -> tuple[float, float]:
    if mine is None or theirs is None or exact is None:
        missing_in_all = mine is theirs is exact
        return (0.0, 0.0) if missing_in_all else (float("inf"), float("inf"))
    # Eager may be exact by luck, so its error counts as at least one unit in the last place.
    unit = max((theirs - exact).norm().item(), torch.finfo(theirs.dtype).eps * exact.norm().item(), 1e-30)
    return (mine - theirs).abs().max().item(), (mine - exact).norm().item() / unit


def follows_plan(seen: Observation, plan: Plan) -> bool:
    """Return whether DDP's reducer had the plan's buckets, and sent each in order.

    Args:
        seen: an observation of at least one iteration.
        plan: the plan.

    Returns:
        True if every observed iteration did.
    """
    planned = [bucket.params for bucket in plan.buckets]
    return bool(seen.iterations) and all(
        [bucket.params for bucket in iteration.buckets] == planned
        and [collective.bucket for collective in iteration.collectives] == list(range(len(planned)))
        for iteration in seen.iterations
    )
