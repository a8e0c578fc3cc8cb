"""How a drawn model receives its inputs and returns its outputs: one row of a table for each form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpopt.testing.drawn.registry import Feature

Names = Sequence[str]


class InputForm(NamedTuple):
    """How forward receives its inputs.

    Attributes:
        feature: what it brings.
        signature: the parameters of forward, after ``self``.
        opening: the first lines of forward.
        call: the positional and keyword arguments of a call.
        definition: of the class of inputs; empty if there is none.
    """

    feature: Feature
    signature: Callable[[Names], str]
    opening: Callable[[Names], list[str]]
    call: Callable[[Names], str]
    definition: Callable[[Names], str] = lambda _: ""


class OutputForm(NamedTuple):
    """How forward returns its outputs.

    Attributes:
        feature: what it brings.
        result: the expression that is returned, made of those for the outputs.
        leaves: where the loss finds the tensors of ``output``.
        definition: of the class of outputs; empty if there is none.
    """

    feature: Feature
    result: Callable[[Names], str]
    leaves: str = "output"
    definition: Callable[[Names], str] = lambda _: ""


def _tuple(names: Names) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _dict(names: Names) -> str:
    return "{" + ", ".join(f'"{name}": {name}' for name in names) + "}"


def _dataclass(name: str, attributes: Names) -> str:
    return "\n".join(
        ["@dataclass", f"class {name}:", *(f"    {attribute}: object" for attribute in attributes)]
    )


def _numbered(outputs: Names) -> list[str]:
    return [f"out{place}" for place in range(len(outputs))]


TAKES: Mapping[str, InputForm] = {
    "positional": InputForm(None, ", ".join, lambda _: [], lambda names: f"{_tuple(names)}, {{}}"),
    "keyword": InputForm(
        "keyword-input",
        lambda names: f"*, {', '.join(names)}",
        lambda _: [],
        lambda names: f"(), {_dict(names)}",
    ),
    "nested": InputForm(
        "nested-input",
        lambda _: "inputs",
        lambda names: [f"x, {_tuple(names[1:])} = inputs" if names[1:] else "x, _ = inputs"],
        lambda names: f"((x, {_tuple(names[1:])}),), {{}}",
    ),
    "dict": InputForm(
        "dict-input",
        lambda _: "inputs",
        lambda names: [f'{name} = inputs["{name}"]' for name in names],
        lambda names: f"({_dict(names)},), {{}}",
    ),
    "dataclass": InputForm(
        "dataclass-input",
        lambda _: "inputs",
        lambda names: [f"{name} = inputs.{name}" for name in names],
        lambda names: f"(Inputs({', '.join(names)}),), {{}}",
        lambda names: _dataclass("Inputs", names),
    ),
}

RETURNS: Mapping[str, OutputForm] = {
    "tuple": OutputForm(None, lambda outputs: ", ".join(outputs)),
    "nested": OutputForm(
        "nested-output", lambda outputs: f"[{outputs[0]}, {{'more': {_tuple(outputs[1:])}}}]"
    ),
    "dict": OutputForm(
        "dict-output",
        lambda outputs: f"dict({', '.join(f'out{place}={each}' for place, each in enumerate(outputs))})",
    ),
    "dataclass": OutputForm(
        "dataclass-output",
        lambda outputs: f"Outputs({', '.join(outputs)})",
        "vars(output)",
        lambda outputs: _dataclass("Outputs", _numbered(outputs)),
    ),
}
