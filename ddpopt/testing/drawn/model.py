"""A drawn model as a value, which is printed, run and turned into a case.

Invariant: every value that can be built is a valid model; equal values are equal programs; and
``eval(repr(value)) == value``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError
from ddpopt.testing.drawn.forms import CHOICES, FORMS
from ddpopt.testing.drawn.printing import write_model
from ddpopt.testing.drawn.program import Program
from ddpopt.testing.drawn.registry import BLOCKS, Step, find_block


@dataclass(frozen=True, repr=False)
class DrawnModel:
    """A model, its inputs and its loss, as a value.

    Attributes:
        steps: what the model does, in order; it begins with one value, the input.
        outputs: what it returns besides its last value, each a step whose block is an output.
        takes: how forward receives its inputs.
        returns: how it returns several outputs.
        leaves: whether the input gets a gradient.
        loss: of what it returns.
        training: under which option of verification it is trained.
        width: elements of each sample, a multiple of four.
        batches: samples in each training step, in turn.
        cap_bytes: the bucket cap that DDP is given.
        joined: whether values that nothing reads are added to the last one. If not, their parameters get no
            gradient.
        seed: of the weights.
    """

    steps: tuple[Step, ...] = ()
    outputs: tuple[Step, ...] = ()
    takes: str = "positional"
    returns: str = "tuple"
    leaves: str = "data"
    loss: str = "squares"
    training: str = "default"
    width: int = 8
    batches: tuple[int, ...] = (2,)
    cap_bytes: int = 256
    joined: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind:
                raise UsageError(f"expected {field.name} to be of type {kind.__name__}, got {value!r}")
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")
        for name, place in (("steps", "step"), ("outputs", "output")):
            row = getattr(self, name)
            if any(type(each) is not Step or find_block(each.block).place != place for each in row):
                raise UsageError(f"expected {name} to be steps whose blocks are {name}, got {row!r}")
        if not self.batches or any(type(n) is not int or n < 2 for n in self.batches):
            raise UsageError(f"expected batches to be numbers from 2 on, got {self.batches!r}")
        if self.width < 4 or self.width % 4 or self.cap_bytes < 1:
            raise UsageError(
                "expected a width that is a multiple of 4 and a cap of at least one byte, "
                f"got width={self.width!r}, cap_bytes={self.cap_bytes!r}"
            )

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"DrawnModel({', '.join(f'{name}={v!r}' for name, v, default in given if v != default)})"

    @cached_property
    def _written(self) -> tuple[str, frozenset[str]]:
        return write_model(self)

    @property
    def source(self) -> str:
        """The model as a Python module that needs only torch."""
        return self._written[0]

    @property
    def features(self) -> frozenset[str]:
        """What the model brings to those who compile it, as :func:`known_features` names it."""
        return self._written[1]

    @property
    def program(self) -> Program:
        """The source, ready to run."""
        return Program(self.source)

    def case(self) -> Case:
        """Make a case."""
        return self.program.case()

    def all_steps(self) -> Iterator[Step]:
        """Every step, with those in bodies, and every output."""
        for outer in (*self.steps, *self.outputs):
            yield from outer.all()


def known_features() -> frozenset[str]:
    """Every feature that a model can have, those of blocks that users registered included."""
    brought = (block.features | block.optional for block in BLOCKS.values())
    return FORMS.union(*brought)
