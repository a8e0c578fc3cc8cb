"""Terms: the values of graph nodes, independent of any graph.

The certificate compares two programs, not two graphs. So each value becomes a term: the value of a node of
the original, an item of such a value, an attribute, a group of terms, or a literal (which is itself).

Invariant: terms are compared by exact value and type; 1, True and 1.0 are three different literals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ddpopt.graph.nodes import SYMBOLIC, Missing

Term = object
"""A `Made`, `Item`, `Held`, `Unknown`, `Copy` or `Group`; anything else is a literal."""


@dataclass(frozen=True)
class Made:
    """The value of the original's node called `name`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Item:
    """One item of a tuple or list that a node of the original returns."""

    base: "Made | Item"
    index: int

    def __str__(self) -> str:
        return f"{self.base}[{self.index}]"


@dataclass(frozen=True, eq=False)
class Held:
    """The object that an attribute names, and its example value from tracing."""

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
    """A copy that a segment gets in place of a value.

    Attributes:
        method: ``"detach"``, or ``"detach().requires_grad_"``, which passes no gradient to the value either.
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
    """`value` with each container as a `Group`, and each other object converted by `read`."""
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
    """The terms in `term` that are not groups, left to right."""
    if isinstance(term, Group):
        for item in term.items:
            yield from leaves(item)
    else:
        yield term


def without_copies(term: Term) -> Term:
    """`term` with each copy replaced by its original."""
    if isinstance(term, Group):
        return Group(term.kind, tuple(map(without_copies, term.items)), term.keys)
    return term.of if isinstance(term, Copy) else term


def show(term: Term) -> str:
    """A term in readable form."""
    if isinstance(term, (Made, Item, Held, Unknown, Copy, Group)):
        return str(term)
    if isinstance(term, torch.Tensor):
        return f"a tensor of shape {tuple(term.shape)}"
    return repr(term)


def differences(expected: Term, found: Term, path: str, example: Callable[[Term], object]) -> Iterator[str]:
    """Find the differences between two terms; none if they are the same value.

    Two forms of a value count as equal to it: a tuple of all its items, and the constant that tracing
    specialized it to.

    Args:
        expected: the original's term.
        found: the stitched module's term.
        path: the location of the terms, for the messages.
        example: returns the example value of a term, or `MISSING`.

    Yields:
        One clause for each innermost difference.
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
    """Whether two terms are the same, without comparing items."""
    if isinstance(expected, Held) and isinstance(found, Held):
        return expected.value is found.value
    if expected is found:
        return True
    if type(expected) is not type(found):
        return False
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(found)  # distinguishes -0.0 from 0.0, and nan equals nan
    return isinstance(expected, (Made, Item, *_LITERALS)) and expected == found


_LITERALS = (int, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_constant(example: object, found: Term) -> bool:
    """Whether tracing specialized a value to the literal `found`."""
    return not isinstance(example, (torch.Tensor, *SYMBOLIC, Missing)) and _equal(example, found)


def _paired(
    expected: Term, found: Term, example: Callable[[Term], object]
) -> Sequence[tuple[object, Term, Term]] | None:
    """The items of two terms in pairs, if the terms have the same structure."""
    if not isinstance(found, Group):
        return None
    if isinstance(expected, (Made, Item)):
        expected = _spelled_out(expected, found.kind, example(expected))
    if not isinstance(expected, Group) or expected.kind is not found.kind:
        return None
    if len(expected.items) != len(found.items) or not all(map(_equal, expected.keys, found.keys)):
        return None
    keys = expected.keys or range(len(expected.items))
    return list(zip(keys, expected.items, found.items, strict=True))


def _spelled_out(term: Made | Item, kind: type, example: object) -> Term:
    """The value of a term as the tuple or list of its items; named tuples count as tuples."""
    if isinstance(example, (tuple, list)) and isinstance(example, kind):
        return Group(kind, tuple(Item(term, index) for index in range(len(example))))
    return term
