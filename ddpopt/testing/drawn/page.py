"""The text of a drawn model under construction: lines, the variables in them, and the classes around.

Invariant: each variable belongs to one step, so that none hides another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpopt.testing.drawn.scopes import ClassText, Scope, Value

INDENT = "    "


@dataclass
class Site:
    """The step that is being written.

    Attributes:
        number: its place among all steps; names end with it.
        layer: how its parameters come about.
        differentiable: whether what it reads may require a gradient.
        missed: features that its options ask for and that are not possible.
    """

    number: int = 0
    layer: str = "new"
    differentiable: bool = False
    missed: set[str] = field(default_factory=set)


class Page:
    """What blocks write on.

    Attributes:
        width: elements of each sample.
        batches: samples in each step, in turn.
        returned: what the model returns besides its outputs.
        classes: the classes so far, the model first.
        helpers: definitions that they need at module level, by name.
        inputs: for each input of the model the expression that draws it.
    """

    def __init__(self, width: int, batches: Sequence[int] = (2,)) -> None:
        self.width = width
        self.batches = batches
        self.returned: list[str] = []
        self.classes = [ClassText("Model")]
        self.helpers: dict[str, str] = {}
        self.inputs = {"x": f"torch.randn(batch, {width}, generator=g)"}
        self._scope = Scope((self.classes[0],), [Value("x")])
        self._site = Site()

    def line(self, text: str) -> None:
        """Write a line of forward."""
        self._scope.owner.forward.append(INDENT * self._scope.depth + text)

    def local(self, prefix: str) -> str:
        """A variable that no other step uses."""
        return f"{prefix}{self._site.number}"

    def assign(self, prefix: str, expression: str) -> str:
        """Write an assignment to a variable that no other step uses; returns it."""
        name = self.local(prefix)
        self.line(f"{name} = {expression}")
        return name

    @contextlib.contextmanager
    def nested(self, header: str, **flags: Any) -> Iterator[None]:
        """Write `header`, and indent what is written in the ``with``.

        Args:
            header: a line that ends with a colon; within a ``def`` only its own values can be read.
            **flags: ``grad``, ``autocast`` or ``frozen``, as they are within.
        """
        self.line(header)
        written = len(self._scope.owner.forward)
        if header.startswith("def "):
            flags |= {"values": [], "numbers": []}
        with self._within(replace(self._scope, depth=self._scope.depth + 1, **flags)):
            yield
            if len(self._scope.owner.forward) == written:
                self.line("pass")

    @contextlib.contextmanager
    def submodule(self) -> Iterator[ClassText]:
        """Write the forward of a class of its own in the ``with``; it takes ``x``."""
        outer = self._scope.owner
        name = self.local("block")
        inner = ClassText(self.local("Block"), f"{outer.path}{name}.")
        self.classes.append(inner)
        outer.init.append(f"self.{name} = {inner.name}()")
        scope = replace(self._scope, owners=(*self._scope.owners, inner), values=[], numbers=[], depth=0)
        with self._within(scope):
            yield inner

    @property
    def half(self) -> int:
        """Columns of a token, and complex numbers in a row."""
        return self.width // 2

    @property
    def quarter(self) -> int:
        """Channels of an image."""
        return self.width // 4

    @contextlib.contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        yield
        self._scope = outer

    def helper(self, name: str, source: str) -> str:
        """Define something at module level, once; returns its name."""
        self.helpers[name] = source
        return name

    def input(self, name: str, expression: str) -> str:
        """Give the model one more input; `expression` may name ``batch``, ``step``, and generator ``g``."""
        self.inputs[name] = expression
        for owner in self._scope.owners:
            if name not in owner.arguments:
                owner.arguments.append(name)
        return name

    def number(self) -> str:
        """A Python number: the latest that a step has kept, or an input."""
        return self._scope.numbers[-1] if self._scope.numbers else self.input("scale", "0.5")

    def keep_number(self, name: str) -> None:
        """Let later steps read a variable that holds a small positive number."""
        self._scope.numbers.append(name)

    def prepared(self, prefix: str, expression: str) -> str:
        """Assign to a variable of the constructor; returns it."""
        name = self.local(prefix)
        self.prepare(f"{name} = {expression}")
        return name

    def prepare(self, text: str) -> None:
        """Write a line of the constructor."""
        self._scope.owner.init.append(text)

    def give_back(self, name: str) -> None:
        """Have the model return a variable too, unless only a part of its forward knows it."""
        if len(self._scope.owners) == 1 and not self._scope.depth:
            self.returned.append(name)

    def buffer(self, expression: str, prefix: str = "buffer") -> str:
        """Make a buffer; returns an expression for it."""
        name = self.local(prefix)
        self._scope.owner.init.append(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"
