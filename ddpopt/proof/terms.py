"""Terms: what the value of a graph node is, said without the graph.

The certificate compares two programs, not two graphs. So each value becomes a term: the value of a node of
the original, an item of such a value, an attribute, a group of terms, or a literal (which is itself).

Invariant: two terms are told apart by exact value and type; 1, True and 1.0 are three literals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ddpopt.graph.nodes import MISSING, SYMBOLIC, Missing

Term = object
"""A `Made`, `Item`, `Held`, `Unknown`, `Copy` or `Group`; anything else is a literal."""


ABSENT = MISSING
"""What there is where there is no value, for None is one."""


@dataclass(frozen=True)
class Made:
    """The value of the original's node `name`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Item:
    """One item of a tuple or list that a node of the original returns."""

    base: Made | Item
    index: int

    def __str__(self) -> str:
        return f"{self.base}[{self.index}]"


@dataclass(frozen=True, eq=False)
class Held:
    """The object that an attribute names, and the example value that tracing left for it."""

    label: str
    value: object
    example: object

    def __str__(self) -> str:
        return f"attribute {self.label!r}"


@dataclass(frozen=True)
class Unknown:
    """A value that no node of the original makes."""

    label: str

    def __str__(self) -> str:
        return f"{self.label} (which the original does not have)"


@dataclass(frozen=True, eq=False)
class Copy:
    """What a segment is given in place of a value.

    Attributes:
        method: ``"detach"`` from autograd, or ``"detach().requires_grad_"``, which sends nothing further
            either.
        of: the value.
        before: the segment before which the copy is made.
    """

    method: str
    of: Term
    before: int

    def __str__(self) -> str:
        return f"{show(self.of)}.{self.method}()"


@dataclass(frozen=True, eq=False)
class Group:
    """A tuple, list, dict or slice of terms; `keys` are a dict's."""

    kind: type
    items: tuple[Term, ...]
    keys: tuple[object, ...] = ()

    def __str__(self) -> str:
        items = [show(item) for item in self.items]
        if self.kind is dict:
            return "{" + ", ".join(f"{k!r}: {i}" for k, i in zip(self.keys, items, strict=True)) + "}"
        if self.kind is list:
            return f"[{', '.join(items)}]"
        if self.kind is tuple:
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        return f"{self.kind.__name__}({', '.join(items)})"


def group(value: object, read: Callable[[object], Term]) -> Term:
    """`value` with each container in it as a `Group`, and each other object as `read` gives it."""
    if isinstance(value, list):
        return Group(list, tuple(group(item, read) for item in value))
    if isinstance(value, tuple):
        return Group(type(value), tuple(group(item, read) for item in value))
    if isinstance(value, dict):
        return Group(dict, tuple(group(item, read) for item in value.values()), tuple(value))
    if isinstance(value, slice):
        return Group(slice, tuple(group(item, read) for item in (value.start, value.stop, value.step)))
    return read(value)


def leaves(term: Term) -> Iterator[Term]:
    """The terms in `term` that are no group, left to right."""
    if isinstance(term, Group):
        for item in term.items:
            yield from leaves(item)
    else:
        yield term


def without_copies(term: Term) -> Term:
    """`term` with what each copy in it is a copy of."""
    if isinstance(term, Group):
        return Group(term.kind, tuple(map(without_copies, term.items)), term.keys)
    return term.of if isinstance(term, Copy) else term


def show(term: Term) -> str:
    """A term as a person would write it."""
    if isinstance(term, (Made, Item, Held, Unknown, Copy, Group)):
        return str(term)
    if isinstance(term, torch.Tensor):
        return f"a tensor of shape {tuple(term.shape)}"
    return repr(term)


def differences(expected: Term, found: Term, path: str, example: Callable[[Term], object]) -> Iterator[str]:
    """Where two terms differ; empty if they are the same value.

    Two ways of writing a value are taken for the value itself: a tuple of all its items, and the constant
    that tracing found it to be.

    Args:
        expected: as the original has it.
        found: as the stitched module has it.
        path: where the terms are, for the messages.
        example: the example value of a term, or `ABSENT`.

    Yields:
        One clause for each innermost place that differs.
    """
    if _equal(expected, found) or _is_constant(example(expected), found):
        return
    pairs = _paired(expected, found, example)
    if pairs is None:
        yield f"{path}: expected {show(expected)}, found {show(found)}"
        return
    for key, inner_expected, inner_found in pairs:
        yield from differences(inner_expected, inner_found, f"{path}[{key!r}]", example)


def _equal(expected: Term, found: Term) -> bool:
    """Whether two terms without a look inside are the same."""
    if isinstance(expected, Held) and isinstance(found, Held):
        return expected.value is found.value
    if expected is found:
        return True
    if type(expected) is not type(found):
        return False
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(found)  # tells -0.0 from 0.0 and takes nan for nan
    return isinstance(expected, (Made, Item, *_LITERALS)) and expected == found


_LITERALS = (int, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_constant(example: object, found: Term) -> bool:
    """Whether tracing fixed a value to just the literal `found`."""
    if isinstance(example, (torch.Tensor, *SYMBOLIC, Missing)) or isinstance(
        found, (Made, Item, Held, Unknown, Copy, Group)
    ):
        return False
    return _equal(example, found)


def _paired(
    expected: Term, found: Term, example: Callable[[Term], object]
) -> Sequence[tuple[object, Term, Term]] | None:
    """The items of two terms side by side, if they have the same shape."""
    if not isinstance(found, Group):
        return None
    if isinstance(expected, (Made, Item)):
        expected = _spelled_out(expected, found.kind, example(expected))
    if not isinstance(expected, Group) or expected.kind is not found.kind:
        return None
    if len(expected.items) != len(found.items) or not _same_keys(expected.keys, found.keys):
        return None
    keys = expected.keys or range(len(expected.items))
    return list(zip(keys, expected.items, found.items, strict=True))


def _same_keys(expected: Sequence[object], found: Sequence[object]) -> bool:
    return all(_equal(a, b) for a, b in zip(expected, found, strict=True))


def _spelled_out(term: Made | Item, kind: type, example: object) -> Term:
    """The value of a term as the tuple or list of its items; named tuples count as tuples."""
    if isinstance(example, list) and kind is list:
        return Group(list, tuple(Item(term, index) for index in range(len(example))))
    if isinstance(example, tuple) and kind in (tuple, type(example)):
        return Group(kind, tuple(Item(term, index) for index in range(len(example))))
    return term
