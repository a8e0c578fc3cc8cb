"""The parts of drawn models: blocks that write a few lines of source, and the kinds of value they pass.

A block declares which kinds of value it reads and makes; a kind says how it is converted from rows and back
to rows. So any block can follow any other, and no search for fitting steps is needed. A model is a tree of
steps, each a block with its operands and options.

Invariant: steps may be dropped, swapped and replaced at will and the model stays valid, because a step reads
the values that exist; ``eval(repr(step)) == step``. A block is differentiable in everything it reads and in
each parameter it makes, unless it declares that it detaches; it changes in place only values that it made
itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpopt.errors import UsageError

Feature = str | None
Position = Literal["step", "output"]


@dataclass(frozen=True)
class ValueKind:
    """A form that a value takes between blocks, each a template around ``{x}``.

    The templates may name ``{width}``, ``{half}`` and ``{quarter}``, the sizes of a row and of its parts.

    Attributes:
        name: as blocks call it.
        from_rows: an expression for the value, computed from ``(batch, width)`` floats.
        to_rows: an expression for ``(batch, width)`` floats, computed from the value.
        autocast: whether autocast may change its dtype, which ``.float()`` undoes.
    """

    name: str
    from_rows: str
    to_rows: str
    autocast: bool = True


KINDS: dict[str, ValueKind] = {
    kind.name: kind
    for kind in (
        ValueKind("rows", "{x}", "{x}"),
        ValueKind("tokens", "{x}.unflatten(1, (2, {half}))", "{x}.flatten(1)"),
        ValueKind("image", "{x}.unflatten(1, ({quarter}, 2, 2))", "{x}.flatten(1)"),
        ValueKind("columns", "{x}.t()", "{x}.t()"),
        ValueKind("bfloat16", "{x}.bfloat16()", "{x}.float()", autocast=False),
        ValueKind("double", "{x}.double()", "{x}.float()", autocast=False),
        ValueKind(
            "complex",
            "torch.view_as_complex({x}.contiguous().unflatten(1, ({half}, 2)))",
            "torch.view_as_real({x}.resolve_conj()).flatten(1)",
            autocast=False,
        ),
        ValueKind("pair", "{x}.chunk(2, 1)", "torch.cat({x}, 1)", autocast=False),
    )
}


@dataclass(frozen=True)
class Block:
    """The type of a step of a model.

    Attributes:
        name: a unique name; steps are printed with it.
        write: ``(writer, *operands, **options) -> expression``: writes lines, returns the block's value. A
            block with a body gets it as the keyword ``body``.
        features: the features it adds to a model, with any options.
        takes: the kinds that it reads.
        gives: the kind that it makes.
        options: for each option its choices, simplest first, with the feature that each adds.
        body: which steps its body may have: ``"any"``, only ``"pure"`` ones, or all except those with
            ``breaks`` (``"unbroken"``); empty if it has no body.
        pure: whether running it twice is the same as once: no buffer or input is changed.
        breaks: whether Dynamo ends its graph here; inside a loop, Dynamo then skips the whole function.
        detached: whether no gradient passes.
        rate: how often it is drawn relative to other blocks.
        place: ``"output"`` for a value returned besides a model's last one.
    """

    name: str
    write: Callable[..., str]
    features: frozenset[str] = frozenset()
    takes: tuple[str, ...] = ("rows",)
    gives: str = "rows"
    options: Mapping[str, Mapping[Any, Feature]] = field(default_factory=dict)
    body: Literal["", "any", "pure", "unbroken"] = ""
    pure: bool = True
    breaks: bool = False
    detached: bool = False
    rate: int = 1
    place: Position = "step"

    def brought(self, options: Mapping[str, Any]) -> frozenset[str]:
        """The features of this block with these options."""
        chosen = (self.options[name][value] for name, value in options.items())
        return self.features | {feature for feature in chosen if feature is not None}

    @property
    def optional(self) -> frozenset[str]:
        """The features that its options may add."""
        brought = (feature for choices in self.options.values() for feature in choices.values())
        return frozenset(feature for feature in brought if feature is not None)

    def within(self, features: frozenset[str]) -> Mapping[str, tuple[Any, ...]] | None:
        """The choices of each option that add no other features; None if the block itself adds one."""
        kept = {
            name: tuple(value for value, brings in choices.items() if brings is None or brings in features)
            for name, choices in self.options.items()
        }
        return kept if self.features <= features and all(kept.values()) else None


BLOCKS: dict[str, Block] = {}
"""Every registered block by name, simplest first: draws shrink toward the front."""

Choices = Mapping[Any, Feature] | Sequence[Any]
Write = Callable[..., str]


def register_block(
    *features: str,
    name: str = "",
    takes: str | Sequence[str] = "rows",
    gives: str = "rows",
    options: Mapping[str, Choices] | None = None,
    **traits: Any,
) -> Callable[[Write], Write]:
    """Register a function as a block.

    Args:
        *features: names of the features it adds; new names become new features.
        name: name of the block; by default the function's.
        takes: the kind of value that it reads, or one for each operand.
        gives: the kind that it makes.
        options: for each option its choices, simplest first; a mapping assigns features to choices.
        **traits: the other attributes of :class:`Block`.

    Returns:
        A decorator that returns the function unchanged.

    """

    def register(write: Write) -> Write:
        block = Block(
            name=name or write.__name__,
            write=write,
            features=frozenset(features),
            takes=(takes,) if isinstance(takes, str) else tuple(takes),
            gives=gives,
            options={
                option: choices if isinstance(choices, Mapping) else dict.fromkeys(choices)
                for option, choices in (options or {}).items()
            },
            **traits,
        )
        BLOCKS[block.name] = block
        return write

    return register


def find_block(name: str) -> Block:
    """Return a block by its name.

    Raises:
        UsageError: if there is none.
    """
    if name not in BLOCKS:
        raise UsageError(f"expected the name of a block, got {name!r}. The blocks are: {', '.join(BLOCKS)}")
    return BLOCKS[name]


@dataclass(frozen=True)
class Step:
    """A block in a model; :func:`step` makes one.

    Attributes:
        block: name of the block.
        reads: for each operand, how many values back it is: 0 is the latest. Numbers wrap around, so any
            number names a value.
        options: the choice made for each option of the block.
        body: the steps in its body.
    """

    block: str
    reads: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    body: "tuple[Step, ...]"

    def __repr__(self) -> str:
        block = find_block(self.block)
        reads = () if self.reads == tuple(range(len(self.reads))) else self.reads
        options = [f"{name}={v!r}" for name, v in self.options if v != next(iter(block.options[name]))]
        body = [f"body={self.body!r}"] if self.body else []
        return f"step({', '.join([repr(self.block), *map(repr, reads), *options, *body])})"

    def all(self) -> "Iterator[Step]":
        """This step and all steps in its body."""
        yield self
        for inner in self.body:
            yield from inner.all()

    @property
    def features(self) -> frozenset[str]:
        """The features of this step, without its body."""
        return find_block(self.block).brought(dict(self.options))


def step(block: str, *reads: int, body: Sequence[Step] = (), **options: Any) -> Step:
    """Make a step.

    Args:
        block: name of a block.
        *reads: for each operand, how many values back it is; omitted ones are the latest values, in turn.
        body: the steps in the body, for a block that has one.
        **options: choices other than the first.

    Raises:
        UsageError: if there is no such block, or it does not take these arguments.
    """
    found = find_block(block)
    operands = len(found.takes)
    if len(reads) > operands or any(read < 0 for read in reads):
        raise _unfit(block, f"at most {operands} inputs, each >= 0", reads)
    for name, value in options.items():
        choices = found.options.get(name, ())
        if value not in choices:
            raise _unfit(block, f"{name} to be one of {', '.join(map(repr, choices)) or 'no options'}", value)
    if body and not found.body:
        raise _unfit(block, "no body", body)
    for inner in (inner for outer in body for inner in outer.all()):
        other = find_block(inner.block)
        if other.place != "step":
            raise _unfit(block, "steps in its body, not outputs", inner)
        if found.body == "pure" and not other.pure:
            raise _unfit(block, "steps that may run twice in its body", inner)
        if found.body == "unbroken" and other.breaks:
            raise _unfit(block, "steps without a graph break in its body", inner)
    chosen = tuple((name, options.get(name, next(iter(choices)))) for name, choices in found.options.items())
    return Step(block, (*reads, *range(len(reads), operands)), chosen, tuple(body))


def _unfit(block: str, expected: str, got: object) -> UsageError:
    return UsageError(f"block {block!r}: expected {expected}, got {got!r}")
