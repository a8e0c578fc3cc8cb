"""How a drawn model gets its inputs, returns its outputs, and is trained: a row of a table for each form."""

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

_HALVE = """\
def halve(leaf):
    leaf.grad.mul_(0.5)"""
_GIVEN = """\
GIVEN = {}


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf):
        ctx.key = leaf.shape, leaf.dtype
        return leaf.detach().abs().double().sum()

    @staticmethod
    def backward(ctx, _):
        shape, dtype = ctx.key
        return GIVEN.setdefault(ctx.key, torch.full(shape, 0.25, dtype=dtype))"""


class Form(NamedTuple):
    """What a choice adds to the text of a model.

    Attributes:
        feature: what it brings.
        code: lines, or an expression.
        definition: what they need at module level; empty for nothing.
    """

    feature: Feature
    code: str = ""
    definition: str = ""


LEAVES: Mapping[str, Form] = {
    "data": Form(None),
    "trained": Form("input-gradient", "x.requires_grad_()"),
    "hooked": Form("input-hook", "x.requires_grad_().register_post_accumulate_grad_hook(halve)", _HALVE),
}
"""Whether the input gets a gradient, and a hook that changes it."""
LOSSES: Mapping[str, Form] = {
    "squares": Form(None, "leaf.abs().double().square().sum()"),
    "given": Form("given-gradient", "Given.apply(leaf)", _GIVEN),
}
"""The loss of each tensor that a model returns; one is a gradient that is given, and used again."""
TRAININGS: Mapping[str, Feature] = {
    "default": None,
    "accumulation": "accumulation",
    "two_forwards": "several-forwards",
    "forward_in_no_sync": "several-forwards",
    "zero_in_place": "kept-gradients",
    "bucket_view_kept": "kept-gradients",
    "clipping": "clipping",
    "stepping_hook": "communication-hook",
    "saved_tensors": "saved-tensor-hook",
}
"""Options of `ddpopt.judge.options` under which a model may be trained, with what each brings."""
PLAIN = 3
"""How many times as often as others the first choice is drawn."""
CHOICES: Mapping[str, Mapping[str, Feature]] = {
    **{
        name: {choice: form.feature for choice, form in forms.items()}
        for name, forms in (("takes", TAKES), ("returns", RETURNS), ("leaves", LEAVES), ("loss", LOSSES))
    },
    "training": TRAININGS,
}
"""For each field that names a form its choices, the simplest first, with the feature that each brings."""
