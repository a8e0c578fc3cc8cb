"""Record operators that draw random numbers so that a compiler draws what eager draws.

Invariant: the recorded graph draws as many numbers as eager, in the same order.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@functools.cache
def _draws_in_memory_order(device: torch.device) -> bool:
    """Whether eager does; on Intel's processors MKL draws a contiguous tensor, as a backend does."""
    with _disable_current_modes():
        tensors = torch.empty(9, 9, device=device), torch.empty(9, 9, device=device).t()
        drawn = [each.bernoulli_(generator=torch.Generator(device).manual_seed(0)) for each in tensors]
        return torch.equal(drawn[0], drawn[1].t())


def _bernoulli(tensor: Tensor, p: float = 0.5, generator: Any = None) -> Any:
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if order == sorted(order) or not _draws_in_memory_order(tensor.device):
        return NotImplemented
    tensor.permute(order).bernoulli_(p, generator=generator)
    return tensor


AS_EAGER: Any = {torch.ops.aten.bernoulli_.float: _bernoulli}
"""Decompositions of operators with which a backend would draw in another order than eager."""
