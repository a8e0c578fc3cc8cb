"""How a drawn model takes inputs, returns outputs and is trained: the choices, and the source of each."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpopt.testing.drawn.registry import Feature

Names = Sequence[str]

CHOICES: Mapping[str, Mapping[str, Feature]] = {
    "takes": {"positional": None}
    | {form: f"{form}-input" for form in ("keyword", "nested", "dict", "dataclass")},
    "returns": {"tuple": None} | {form: f"{form}-output" for form in ("nested", "dict", "dataclass")},
    "leaves": {"data": None, "trained": "input-gradient", "hooked": "input-hook"},
    "loss": {"squares": None, "given": "given-gradient"},
    "training": {
        "default": None,
        "accumulation": "accumulation",
        "two_forwards": "several-forwards",
        "forward_in_no_sync": "several-forwards",
        "zero_in_place": "kept-gradients",
        "bucket_view_kept": "kept-gradients",
        "clipping": "clipping",
        "stepping_hook": "communication-hook",
        "saved_tensors": "saved-tensor-hook",
    },
}
"""For each field that names a form, its choices, simplest first, with the feature that each adds.

How forward receives its inputs; how it returns several outputs; whether the input gets a gradient, and a hook
that changes it; the loss of each returned tensor, one of whose choices is a given gradient that is used
again; and the option of `ddpopt.judge.training.options` under which a model is trained.
"""
_BROUGHT = (feature for choices in CHOICES.values() for feature in choices.values() if feature)
FORMS = frozenset({"dynamic-batch", "several-outputs", *_BROUGHT})
"""The features of models that no block adds."""
PLAIN = 3
"""How many times more often the first choice is drawn than others."""
LEAF_CODE = {
    "trained": "x.requires_grad_()",
    "hooked": "x.requires_grad_().register_post_accumulate_grad_hook(halve)",
}
LOSS_CODE = {"squares": "leaf.abs().double().square().sum()", "given": "Given.apply(leaf)"}


class InputText(NamedTuple):
    """How forward receives its inputs: its signature, its first lines, and the arguments of a call."""

    signature: str
    opening: list[str]
    call: str
    definition: str = ""


def inputs_as(form: str, names: Names) -> InputText:
    """Write how forward receives inputs, the first of which is ``x``.

    Args:
        form: a value of ``takes``.
        names: the names of the inputs.
    """
    match form:
        case "keyword":
            return InputText(f"*, {', '.join(names)}", [], f"(), {_dict(names)}")
        case "nested":
            rest = _tuple(names[1:])
            opening = f"x, {rest if names[1:] else '_'} = inputs"
            return InputText("inputs", [opening], f"((x, {rest}),), {{}}")
        case "dict":
            return InputText("inputs", [f'{n} = inputs["{n}"]' for n in names], f"({_dict(names)},), {{}}")
        case "dataclass":
            call = f"(Inputs({', '.join(names)}),), {{}}"
            opened = [f"{name} = inputs.{name}" for name in names]
            return InputText("inputs", opened, call, _dataclass("Inputs", names))
    return InputText(", ".join(names), [], f"{_tuple(names)}, {{}}")


class OutputText(NamedTuple):
    """How forward returns its outputs: the expression, and where the loss finds the tensors of ``output``."""

    result: str
    leaves: str = "output"
    definition: str = ""


def outputs_as(form: str, outputs: Names) -> OutputText:
    """Write how forward returns outputs.

    Args:
        form: a value of ``returns``.
        outputs: an expression for each.
    """
    names = [f"out{place}" for place in range(len(outputs))]
    match form:
        case "nested":
            return OutputText(f"[{outputs[0]}, {{'more': {_tuple(outputs[1:])}}}]")
        case "dict":
            return OutputText(f"dict({', '.join(map('='.join, zip(names, outputs, strict=True)))})")
        case "dataclass":
            return OutputText(f"Outputs({', '.join(outputs)})", "vars(output)", _dataclass("Outputs", names))
    return OutputText(", ".join(outputs))


def _tuple(names: Names) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _dict(names: Names) -> str:
    return "{" + ", ".join(f'"{name}": {name}' for name in names) + "}"


def _dataclass(name: str, attributes: Names) -> str:
    lines = (f"    {attribute}: object" for attribute in attributes)
    return "\n".join(["@dataclass", f"class {name}:", *lines])
