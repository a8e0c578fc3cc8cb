"""What the writer of a drawn model keeps of the text so far: values, classes, and where lines go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpopt.testing.drawn.registry import KINDS


@dataclass
class Value:
    """A value that steps may read.

    Attributes:
        name: the variable.
        kind: its form.
        loose: whether autocast may have given it another dtype than its kind's.
        differentiable: whether it may require a gradient.
        read: whether a later value sends a gradient back to it.
    """

    name: str
    kind: str = "rows"
    loose: bool = False
    differentiable: bool = False
    read: bool = False

    def as_kind(self, kind: str, width: int) -> str:
        """An expression for this value in another form."""
        exact = f"{self.name}.float()" if self.loose else self.name
        if kind == self.kind:
            return exact
        sizes = {"width": width, "half": width // 2, "quarter": width // 4}
        return KINDS[kind].from_rows.format(x=KINDS[self.kind].to_rows.format(x=exact, **sizes), **sizes)


@dataclass
class ClassText:
    """A module class under construction.

    Attributes:
        name: of the class.
        path: of its instance in the model, with a dot at its end; empty for the model itself.
        arguments: of its forward.
        init: lines of its constructor.
        forward: lines of its forward.
        layers: for each expression that made a layer, the layers and whether they are trained.
    """

    name: str
    path: str = ""
    arguments: list[str] = field(default_factory=lambda: ["x"])
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    layers: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)

    def free_name(self, name: str) -> str:
        """An expression for a new layer: `name` if no layer has it yet."""
        taken = {made for layers in self.layers.values() for made, _ in layers}
        free = f"self.{name}"
        while free in taken:
            free += "b"
        return free


@dataclass(frozen=True)
class Scope:
    """Where lines go, and what they may read.

    Attributes:
        owners: the classes around, the innermost last.
        values: what steps may read.
        numbers: variables that hold Python numbers.
        depth: of indentation.
        grad: whether autograd records.
        autocast: whether autocast may change dtypes.
        frozen: whether new layers are made without gradients.
    """

    owners: tuple[ClassText, ...]
    values: list[Value]
    numbers: list[str] = field(default_factory=list)
    depth: int = 0
    grad: bool = True
    autocast: bool = False
    frozen: bool = False

    @property
    def owner(self) -> ClassText:
        """The class whose forward is being written."""
        return self.owners[-1]


def unreached(values: Sequence[Value]) -> list[Value]:
    """The values in front of the last to which no gradient comes back."""
    return [value for value in values[:-1] if value.differentiable and not value.read]


def joined(values: Sequence[Value], width: int) -> str:
    """The sum of values, as rows."""
    return " + ".join(value.as_kind("rows", width) for value in values)
