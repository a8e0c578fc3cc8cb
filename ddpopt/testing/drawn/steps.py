"""What a drawn model does, as a tree of values: steps, each a block with what it reads and its options.

Invariant: steps may be dropped, swapped and replaced at will, and the model stays valid, for a step reads
what there is; and ``eval(repr(value)) == value``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.testing.drawn.registry import Block, find_block


@dataclass(frozen=True)
class Step:
    """A block in a model; :func:`step` makes one.

    Attributes:
        block: name of the block.
        reads: for each operand, how many values back it stands: 0 is the latest. Counted round and round,
            so that any number names a value.
        options: the choice made for each option of the block.
        body: the steps within.
    """

    block: str
    reads: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    body: tuple[Step, ...]

    def __repr__(self) -> str:
        block = find_block(self.block)
        reads = () if self.reads == tuple(range(len(self.reads))) else self.reads
        options = [f"{name}={v!r}" for name, v in self.options if v != next(iter(block.options[name]))]
        body = [f"body={self.body!r}"] if self.body else []
        return f"step({', '.join([repr(self.block), *map(repr, reads), *options, *body])})"

    def all(self) -> Iterator[Step]:
        """This step and all within."""
        yield self
        for inner in self.body:
            yield from inner.all()

    @property
    def features(self) -> frozenset[str]:
        """What this step brings, without its body."""
        return find_block(self.block).brought(dict(self.options))


def step(block: str, *reads: int, body: Sequence[Step] = (), **options: Any) -> Step:
    """Make a step.

    Args:
        block: name of a registered block.
        *reads: for each operand, how many values back it stands; those left out are the latest, in turn.
        body: the steps within, for a block that has a body.
        **options: choices other than the first.

    Raises:
        UsageError: if there is no such block, or it does not take these arguments.
    """
    found = find_block(block)
    operands = len(found.takes)
    if len(reads) > operands or any(read < 0 for read in reads):
        raise UsageError(
            f"block {block!r}: expected at most {operands} numbers from 0 to read, got {reads!r}"
        )
    _check_options(found, options)
    _check_body(found, body)
    chosen = tuple((name, options.get(name, next(iter(choices)))) for name, choices in found.options.items())
    return Step(block, (*reads, *range(len(reads), operands)), chosen, tuple(body))


def _check_options(block: Block, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in block.options:
            known = ", ".join(block.options) or "none"
            raise UsageError(f"block {block.name!r}: expected an option of its own ({known}), got {name!r}")
        choices = block.options[name]
        if value not in choices:
            listed = ", ".join(map(repr, choices))
            raise UsageError(f"block {block.name!r}: expected {name} to be one of {listed}, got {value!r}")


def _check_body(block: Block, body: Sequence[Step]) -> None:
    if body and not block.body:
        raise UsageError(f"block {block.name!r}: expected no body, got {body!r}")
    for inner in (inner for outer in body for inner in outer.all()):
        if find_block(inner.block).place != "step":
            raise UsageError(f"block {block.name!r}: expected steps in its body, got the output {inner!r}")
        if block.body == "pure" and not find_block(inner.block).pure:
            raise UsageError(
                f"block {block.name!r}: expected steps that may run twice in its body, got {inner!r}"
            )
        if block.body == "unbroken" and find_block(inner.block).breaks:
            raise UsageError(
                f"block {block.name!r}: expected steps that break no graph in its body, got {inner!r}"
            )
