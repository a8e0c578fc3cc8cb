"""Whether a gradient's memory belongs to the compiled backward alone, counted by its references.

Invariant: a tensor that other code can still reach is never called alone.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def _owners(tensors: Sequence[Tensor]) -> list[int]:
    """The operator ``ddpopt::owners``: count the references to the only tensor in its list.

    Counts references to the tensor itself, to its storage and to its base. All Python references count as
    one; those of the engine and of other views are added. Uses private parts of torch:
    ``Tensor._use_count`` and ``torch._C._storage_Use_Count``.
    """
    tensor: Any  # torch's stubs lack _use_count
    (tensor,) = tensors
    base = tensor._base._use_count() if tensor._is_view() else 0
    return [tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), base]


@functools.cache
def _owners_of_one(is_view: bool) -> list[int]:
    """The same counts for a tensor, or a view of one, that only the operator's caller references."""

    def measure() -> list[int]:
        if is_view:
            return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu").view(1)]))
        return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu")]))

    # a mode would be one more owner, and below autograd there are no views: a new thread has neither problem
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(measure).result()


def is_alone(tensor: Tensor) -> bool:
    """Whether only the operator's caller can reach this tensor's memory."""
    if tensor.layout != torch.strided:
        return False  # a sparse tensor has no single storage
    alone = _owners_of_one(tensor._is_view())
    return all(count <= one for count, one in zip(_owners([tensor]), alone, strict=True))


torch.library.define("ddpopt::owners", "(Tensor[] tensors) -> int[]")
torch.library.impl("ddpopt::owners", "CompositeExplicitAutograd", _owners)
