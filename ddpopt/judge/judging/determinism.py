"""Naming the operation that does not give the same twice.

Invariant: the model is run as it is, under the same seed; nothing but the order and the bits of what its
operations return is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpopt.cases.case import Case
from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.trainer import on_device

NOT_FOUND = "no single operation of one step of the model alone is to blame"
NOT_RUN = "the responsible operation is not known, because a step of the model alone cannot be watched"
SHOWN_CHARACTERS = 200

Call = tuple[str, str, str]
"""An operation, with digests of what it took and of what it returned."""


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """A digest of what every operation takes and returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        took = _digest((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "empty" in str(func):
            result.zero_()  # else it holds whatever was there before
        self.calls.append((str(func), took, _digest(result)))
        return result


def _digest(value: Any) -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for leaf in tree_leaves(value):
        for part in _bytes_of(leaf):
            hashed.update(part)
    return hashed.hexdigest()


def _bytes_of(leaf: Any) -> Iterator[bytes]:
    if not isinstance(leaf, Tensor):
        yield repr(leaf).encode() if isinstance(leaf, (int, float, complex, bool, str, type(None))) else b""
    elif leaf.device.type == "meta" or leaf.is_quantized:
        yield str(leaf.shape).encode()
    else:
        yield raw_bytes(leaf)


def blame(case: Case, rank: int, device: torch.device) -> str:
    """Run one step of a case twice, without DDP, and find where the two part.

    Args:
        case: a case that does not give the same twice.
        rank: whose inputs to use.
        device: where to run it.

    Returns:
        The operation that returned something else for the same arguments, or got other arguments though all
        before it was the same (a number from outside of torch), and which call of it; or that none did, or
        how the model fails without DDP.
    """
    try:
        first, second = _log(case, rank, device), _log(case, rank, device)
    except Exception as error:  # a model that needs DDP, a tensor whose bytes cannot be read
        return f"{NOT_RUN}: {type(error).__name__}: {' '.join(str(error).split())[:SHOWN_CHARACTERS]}"
    return _parted(first, second)


def _parted(first: Sequence[Call], second: Sequence[Call]) -> str:
    """Name the operation at which two logs part."""
    count: dict[str, int] = {}
    for left, right in zip(first, second, strict=False):
        name = left[0]
        count[name] = count.get(name, 0) + 1
        if left == right:
            continue
        if name != right[0]:
            return f"operation {sum(count.values())} is {name} in one run and {right[0]} in the other"
        why = "was given other numbers" if left[1] != right[1] else "returned something else"
        return f"{name} (call {count[name]}) {why}"
    return NOT_FOUND


def _log(case: Case, rank: int, device: torch.device) -> list[Call]:
    model = case.model().to(device)
    moved = type(case)(**{**vars(case), "inputs": lambda r, s: on_device(case.inputs(r, s), device)})
    with _Log() as log:
        torch.autograd.backward(moved.step(model, rank, 0))
    calls: list[Call] = log.calls
    return calls
