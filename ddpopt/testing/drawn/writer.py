"""Writing a drawn model step by step: what each reads, which parameters it trains, and what comes of it.

Invariant: a parameter is made in the constructor of the class whose forward reads it; and each parameter that
is trained reaches the last value, unless a step says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddpopt.testing.drawn.page import Page, Site
from ddpopt.testing.drawn.registry import KINDS, find_block
from ddpopt.testing.drawn.scopes import Value, joined, unreached
from ddpopt.testing.drawn.steps import Step

SHARING = {"again": "repeated-module", "tied": "tied-parameter"}
"""Choices that need an earlier layer of the same sort, with the feature that each brings."""
LAYER = {"new": None, **SHARING, "frozen": "frozen-parameter", "ignored": "ignored-parameter"}
"""Choices of the option ``layer``, which says how the parameters of a block come about."""

Body = Callable[[str], str]
"""Writes the steps of a body, beginning with the value of an expression; returns one for their result."""


class Writer(Page):
    """Writes one model.

    Attributes:
        features: what was brought in so far.
        ignored: paths of the parameters that DDP is to leave alone.
        reduced: whether DDP has a parameter to reduce.
    """

    def __init__(self, width: int, batches: Sequence[int] = (2,), *, joined: bool = True) -> None:
        super().__init__(width, batches)
        self._joined = joined
        self.features: set[str] = set()
        self.ignored: list[str] = []
        self.reduced = False
        self._steps = 0
        self._trained = 0

    def module(self, expression: str, weight: str = "weight") -> str:
        """Make a submodule, or take an earlier one where the step says so; returns an expression for it.

        Args:
            expression: what makes it.
            weight: which parameter of it may be tied or ignored; empty if it has none.
        """
        name = self.local(expression.partition("(")[0].rpartition(".")[2].lower())
        if weight:
            return self._layer(f"{expression}{{}}", name, f".{weight}")
        self._scope.owner.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def parameter(self, expression: str, role: str = "weight", *, ignored: bool = False) -> str:
        """Make a parameter, or take an earlier one where the step says so; returns an expression for it.

        Args:
            expression: makes its value.
            role: begins its name.
            ignored: whether DDP is to leave it alone, whatever the step says.
        """
        site, how = self._site, self._site.layer
        site.layer = "ignored" if ignored else how
        made = self._layer(f"nn.Parameter({expression}){{}}", self.local(role), "")
        site.layer = how
        return made

    def parameter_for_rows(self, value: str) -> str:
        """Make a parameter that is as large as rows; returns an expression for as much of it as they have."""
        made = self.parameter(f"torch.randn({max(self.batches)}, {self.width})", "rows")
        return made if len(set(self.batches)) == 1 else f"{made}[:{value}.shape[0]]"

    def unread_parameter(self, expression: str) -> None:
        """Make a parameter that forward is not going to read."""
        self._scope.owner.init.append(f"self.{self.local('unused')} = nn.Parameter({expression})")

    @property
    def reached(self) -> bool:
        """Whether a gradient is sure to come back to what is made here."""
        return self._joined and self._scope.grad

    def miss(self, feature: str) -> None:
        """Say that a feature of this step, which its options ask for, is not possible here."""
        self._site.missed.add(feature)

    def _layer(self, template: str, name: str, weight: str) -> str:
        """Make what `template` says, which takes a suffix; `weight` is the parameter in it, with a dot."""
        owner, how = self._scope.owner, self._site.layer
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
        """Write a step, and let later ones read what it makes."""
        expression, value = self._written(step)
        self.line(f"{value.name} = {expression}")
        self._scope.values.append(value)

    def output(self, step: Step) -> str:
        """Write an output; returns an expression for it."""
        return self._written(step)[0]

    def result(self) -> str:
        """The model's last value, in the form that it has unless others are joined to it.

        Where it does not require a gradient, or DDP has no parameter to reduce, one more layer follows.
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
        block, options, outer = find_block(step.block), dict(step.options), self._site
        operands = [self._scope.values[-1 - read % len(self._scope.values)] for read in step.reads]
        self._steps += 1
        self._site = site = Site(self._steps, options.pop("layer", "new"))
        site.differentiable = any(value.differentiable for value in operands)
        for value in operands:  # a gradient comes back only where autograd records
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
            # a body may read values from outside of it, besides those that its block reads
            self._site.differentiable |= any(value.differentiable for value in kept)
            return joined(kept, self.width)

        return write
