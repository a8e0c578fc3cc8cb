"""Which tensors share memory, by the bytes that they span.

Invariant: tensors whose elements overlap are always found.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

Pairs = frozenset[tuple[str, str]]
"""Pairs of names that share memory."""


def sharing(tensors: Mapping[str, Tensor]) -> Pairs:
    """Find tensors that share memory.

    Args:
        tensors: the tensors by name.

    Returns:
        Pairs of names whose spans of bytes overlap, each in the order of the names.
    """
    pairs: set[tuple[str, str]] = set()
    active: list[tuple[int, str]] = []
    spans = (span for name, tensor in tensors.items() for span in _spans(name, tensor))
    for start, end, name in sorted(spans):
        active = [(last, other) for last, other in active if last > start]
        pairs |= {(min(name, other), max(name, other)) for _, other in active if other != name}
        active.append((end, name))
    return frozenset(pairs)


def _spans(name: str, tensor: Tensor) -> Iterator[tuple[int, int, str]]:
    """The byte ranges of a tensor; none for a tensor without its own memory, like a sharded one."""
    if tensor.is_sparse:
        tensor = tensor._values()
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    if plain and tensor.device.type != "meta" and tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        yield start, start + (last + 1) * tensor.element_size(), name
