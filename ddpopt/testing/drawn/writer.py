"""Write a drawn model step by step: its operands, the parameters it trains, and its results.

Invariant: each variable belongs to one step, so none shadows another; a parameter is made in the constructor
of the class whose forward reads it; and each trained parameter affects the last value, unless a step says
otherwise.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from ddpopt.testing.drawn.registry import KINDS, Step, find_block

INDENT = "    "
SHARING = {"again": "repeated-module", "tied": "tied-parameter"}
"""Choices that need an earlier layer of the same sort, with the feature that each adds."""
LAYER = {"new": None, **SHARING, "frozen": "frozen-parameter", "ignored": "ignored-parameter"}
"""Choices of the option ``layer``, which says how a block's parameters are made."""
DEFINITIONS: dict[str, str] = {
    re.findall(r"^(?:class |def |.*import )?(\w+)(?=[(:]| = |$)", text, re.MULTILINE)[0]: text
    for text in (resources.files(__package__) / "definitions.txt").read_text().strip().split("\n\n\n")
}
"""Definitions and imports that blocks need at module level, by name."""

Body = Callable[[str], str]
"""Writes the steps of a body, starting from an expression; returns an expression for their result."""


@dataclass
class Value:
    """A value that steps may read.

    Attributes:
        name: the variable.
        kind: its form.
        loose: whether autocast may have changed its dtype from its kind's.
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
        name: name of the class.
        path: path of its instance in the model, with a trailing dot; empty for the model itself.
        arguments: the arguments of its forward.
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
        """An expression for a new layer: `name` if it is free."""
        taken = {made for layers in self.layers.values() for made, _ in layers}
        free = f"self.{name}"
        while free in taken:
            free += "b"
        return free


@dataclass(frozen=True)
class Scope:
    """Where lines are written, and what they may read.

    Attributes:
        owners: the enclosing classes, innermost last.
        values: the values that steps may read.
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
    """The values before the last that receive no gradient."""
    return [value for value in values[:-1] if value.differentiable and not value.read]


def joined(values: Sequence[Value], width: int) -> str:
    """The sum of values, as rows."""
    return " + ".join(value.as_kind("rows", width) for value in values)


@dataclass
class Site:
    """The step that is being written.

    Attributes:
        number: its position among all steps; names end with it.
        layer: how its parameters are made.
        differentiable: whether its operands may require a gradient.
        missed: features that its options request but that are not possible.
    """

    number: int = 0
    layer: str = "new"
    differentiable: bool = False
    missed: set[str] = field(default_factory=set)


class Writer:
    """Writes one model; blocks write through it.

    Attributes:
        width: the number of elements in each sample.
        half: the number of columns of a token, and of complex numbers in a row.
        quarter: the number of channels of an image.
        batches: the numbers of samples in the steps, in turn.
        returned: the values that the model returns besides its outputs.
        classes: the classes so far, the model first.
        helpers: definitions needed at module level, by name.
        inputs: for each input of the model, the expression that draws it.
        features: the features so far.
        ignored: paths of the parameters that DDP must ignore.
        reduced: whether DDP has a parameter to reduce.
    """

    def __init__(self, width: int, batches: Sequence[int] = (2,), *, joined: bool = True) -> None:
        self.width = width
        self.half = width // 2
        self.quarter = width // 4
        self.batches = batches
        self.returned: list[str] = []
        self.classes = [ClassText("Model")]
        self.helpers: dict[str, str] = {}
        self.inputs = {"x": f"torch.randn(batch, {width}, generator=g)"}
        self.features: set[str] = set()
        self.ignored: list[str] = []
        self.reduced = False
        self._joined = joined
        self._steps = 0
        self._trained = 0
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
        """Write `header`, and indent the lines written in the ``with`` block.

        Args:
            header: a line that ends with a colon; inside a ``def`` only its own values can be read.
            **flags: values of ``grad``, ``autocast`` or ``frozen`` inside the block.
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
        """Write the forward of a new class in the ``with`` block; it takes ``x``."""
        outer = self._scope.owner
        name = self.local("block")
        inner = ClassText(self.local("Block"), f"{outer.path}{name}.")
        self.classes.append(inner)
        outer.init.append(f"self.{name} = {inner.name}()")
        scope = replace(self._scope, owners=(*self._scope.owners, inner), values=[], numbers=[], depth=0)
        with self._within(scope):
            yield inner

    @contextlib.contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        outer = self._scope
        self._scope = scope
        yield
        self._scope = outer

    def helper(self, name: str) -> str:
        """Define or import one of `DEFINITIONS` at module level, once; returns the name."""
        self.helpers[name] = DEFINITIONS[name]
        return name

    def input(self, name: str, expression: str) -> str:
        """Add an input to the model; `expression` may use ``batch``, ``step`` and the generator ``g``."""
        self.inputs[name] = expression
        for owner in self._scope.owners:
            if name not in owner.arguments:
                owner.arguments.append(name)
        return name

    def number(self) -> str:
        """Return a Python number: the latest that a step kept, or an input."""
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
        """Make the model also return a variable, if it is in scope at the end of its forward."""
        if len(self._scope.owners) == 1 and not self._scope.depth:
            self.returned.append(name)

    def buffer(self, expression: str, prefix: str = "buffer") -> str:
        """Make a buffer; returns an expression for it."""
        name = self.local(prefix)
        self._scope.owner.init.append(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def module(self, expression: str, weight: str = "weight") -> str:
        """Make a submodule, or reuse an earlier one if the step says so; returns an expression for it.

        Args:
            expression: the constructor call.
            weight: the parameter that may be tied or ignored; empty if there is none.
        """
        name = self.local(expression.partition("(")[0].rpartition(".")[2].lower())
        if weight:
            return self._layer(f"{expression}{{}}", name, f".{weight}")
        self._scope.owner.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def parameter(self, expression: str, role: str = "weight", *, ignored: bool = False) -> str:
        """Make a parameter, or reuse an earlier one if the step says so; returns an expression for it.

        Args:
            expression: the expression of its value.
            role: the prefix of its name.
            ignored: whether DDP must ignore it, regardless of the step.
        """
        site = self._site
        how = self._site.layer
        site.layer = "ignored" if ignored else how
        made = self._layer(f"nn.Parameter({expression}){{}}", self.local(role), "")
        site.layer = how
        return made

    def parameter_for_rows(self, value: str) -> str:
        """Make a parameter with as many rows as the largest batch; returns the part that fits the value."""
        made = self.parameter(f"torch.randn({max(self.batches)}, {self.width})", "rows")
        return made if len(set(self.batches)) == 1 else f"{made}[:{value}.shape[0]]"

    @property
    def reached(self) -> bool:
        """Whether a value made here is certain to receive a gradient."""
        return self._joined and self._scope.grad

    def miss(self, feature: str) -> None:
        """Record that a feature requested by the options of this step is not possible here."""
        self._site.missed.add(feature)

    def _layer(self, template: str, name: str, weight: str) -> str:
        """Make a layer from `template`, which takes a suffix; `weight` is its parameter, with a dot."""
        owner = self._scope.owner
        how = self._site.layer
        made = owner.layers.setdefault(template, [])
        source = next((earlier for earlier, trained in reversed(made) if trained), None)
        if source and (how == "again" or (how == "tied" and not weight)):
            self._trained += self._scope.grad
            return source
        frozen = how == "frozen" or self._scope.frozen
        name = owner.free_name(name)
        owner.init.append(f"{name} = {template.format('.requires_grad_(False)' if frozen else '')}")
        if how == "tied" and source and not frozen:
            owner.init.append(f"{name}{weight} = {source}{weight}")
        elif how in SHARING:
            self.miss(SHARING[how])
        if how == "ignored":
            self.ignored.append(f"{owner.path}{name.removeprefix('self.')}{weight}")
        made.append((name, not frozen))
        self.reduced |= not frozen and how != "ignored"
        self._trained += self._scope.grad and not frozen
        return name

    def write(self, step: Step) -> None:
        """Write a step, and let later ones read its value."""
        expression, value = self._written(step)
        self.line(f"{value.name} = {expression}")
        self._scope.values.append(value)

    def output(self, step: Step) -> str:
        """Write an output; returns an expression for it."""
        return self._written(step)[0]

    def result(self) -> str:
        """The model's last value, in its own form unless other values are joined to it.

        If it does not require a gradient, or DDP has no parameter to reduce, one more layer is added.
        """
        last = self._scope.values[-1]
        left = unreached(self._scope.values)
        if left and not self._joined:
            self.features.add("unused-parameter")
        kept = [*left, last] if self._joined else [last]
        if self.reduced and any(value.differentiable for value in kept):
            return joined(kept, self.width) if kept[1:] else last.name
        self._site = Site()
        return f"{self.module(f'nn.Linear({self.width}, {self.width})')}({joined(kept, self.width)})"

    def _written(self, step: Step) -> tuple[str, Value]:
        block = find_block(step.block)
        options = dict(step.options)
        outer = self._site
        operands = [self._scope.values[-1 - read % len(self._scope.values)] for read in step.reads]
        self._steps += 1
        self._site = site = Site(self._steps, options.pop("layer", "new"))
        site.differentiable = any(value.differentiable for value in operands)
        for value in operands:  # a value receives a gradient only where autograd records
            value.read |= not block.detached and (self._scope.grad or not value.differentiable)
        trained = self._trained
        arguments = [v.as_kind(kind, self.width) for v, kind in zip(operands, block.takes, strict=True)]
        body = {"body": self._body(step.body)} if block.body else {}
        expression = block.write(self, *arguments, **options, **body)
        self._site = outer
        self.features |= step.features - site.missed
        recorded = self._scope.grad and not block.detached
        made = Value(f"h{site.number}", block.gives)
        made.loose = self._scope.autocast and KINDS[block.gives].autocast
        made.differentiable = recorded and (site.differentiable or self._trained > trained)
        return expression, made

    def _body(self, steps: Sequence[Step]) -> Body:
        def write(x: str) -> str:
            scope = self._scope
            start = Value(x, differentiable=self._site.differentiable and scope.grad)
            inner = replace(scope, values=[*scope.values, start], numbers=[*scope.numbers])
            with self._within(inner):
                for step in steps:
                    self.write(step)
            own = inner.values[len(scope.values) :]
            kept = [*unreached(own), own[-1]]
            # a body may read outside values besides those that its block reads
            self._site.differentiable |= any(value.differentiable for value in kept)
            return joined(kept, self.width)

        return write
