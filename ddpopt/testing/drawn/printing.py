"""A drawn model as a Python module that stands alone: what a person would paste into a bug report.

Invariant: equal values give equal text, and the text is all that there is of the model: what runs is the
text, executed (`ddpopt.testing.drawn.program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from textwrap import fill, indent
from typing import TYPE_CHECKING

from ddpopt.testing.drawn.forms import CHOICES, LEAF_CODE, LOSS_CODE, inputs_as, outputs_as
from ddpopt.testing.drawn.writer import DEFINITIONS, INDENT, ClassText, Writer

if TYPE_CHECKING:
    from ddpopt.testing.drawn.model import DrawnModel

_MODULE = (resources.files(__package__) / "model.txt").read_text()


def write_model(model: DrawnModel) -> tuple[str, frozenset[str]]:
    """Write a model as source.

    Args:
        model: the value.

    Returns:
        The text of a module, and the features that are in it.
    """
    writer = Writer(model.width, model.batches, joined=model.joined)
    for step in model.steps:
        writer.write(step)
    more = [writer.output(step) for step in model.outputs]
    outputs = [writer.result(), *more, *writer.returned]
    writer.features |= _forms(model)
    return _module(model, writer, outputs), frozenset(writer.features)


def _forms(model: DrawnModel) -> set[str]:
    """The features of a model that no step brings."""
    found = {choices[getattr(model, name)] for name, choices in CHOICES.items()}
    found |= {"dynamic-batch"} if len(set(model.batches)) > 1 else set()
    found |= {"several-outputs"} if model.outputs else set()
    return {feature for feature in found if feature is not None}


def _module(model: DrawnModel, writer: Writer, outputs: Sequence[str]) -> str:
    takes, returned = inputs_as(model.takes, list(writer.inputs)), outputs_as(model.returns, outputs)
    root = writer.classes[0]
    if writer.ignored:
        root.init.append(f"self._ddp_params_and_buffers_to_ignore = {writer.ignored!r}")
    root.forward[:0] = takes.opening
    root.forward.append(f"return {returned.result}")
    helpers = [*writer.helpers.values(), takes.definition, returned.definition]
    helpers += [DEFINITIONS["halve"]] if model.leaves == "hooked" else []
    helpers += [DEFINITIONS["GIVEN"], DEFINITIONS["Given"]] if model.loss == "given" else []
    signatures = [takes.signature, *(", ".join(inner.arguments) for inner in writer.classes[1:])]
    classes = [_class(text, given) for text, given in zip(writer.classes, signatures, strict=True)]
    definitions = "\n\n\n".join([*filter(_is_definition, helpers), *reversed(classes)])
    batches, leaf = model.batches, LEAF_CODE.get(model.leaves)
    unused = {"find_unused_parameters": True} if "unused-parameter" in writer.features else {}
    return _MODULE.format(
        about=_filled(f"A model with {', '.join(sorted(writer.features)) or 'nothing but a layer'}."),
        value=_filled(repr(model)),
        imports="\n".join(_imports(helpers, definitions)),
        definitions=definitions,
        seed=model.seed,
        batch=batches[0] if len(batches) == 1 else f"{batches!r}[step % {len(batches)}]",
        inputs=indent("\n".join(f"{name} = {drawn}" for name, drawn in writer.inputs.items()), INDENT),
        leaf=f"\n{INDENT}{leaf}" if leaf else "",
        call=takes.call,
        of_leaf=LOSS_CODE[model.loss],
        forget=f"\n{INDENT}GIVEN.clear()" if model.loss == "given" else "",
        leaves=returned.leaves,
        ddp_kwargs={"bucket_cap_mb": model.cap_bytes / 2**20, **unused},
    )


def _filled(text: str) -> str:
    return fill(text, 100, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def _is_definition(helper: str) -> bool:
    return bool(helper) and not helper.startswith(("import ", "from "))


def _imports(helpers: Sequence[str], definitions: str) -> Iterator[str]:
    """Imports in the order of ruff's: the standard library, then torch, each sorted."""
    if "@dataclass" in definitions:
        yield "from dataclasses import dataclass\n"
    yield "import torch"
    if "F." in definitions:
        yield "import torch.nn.functional as F"
    named = {helper for helper in helpers if helper.startswith("from ")}
    yield from sorted({"from torch import nn", "from torch.utils._pytree import tree_leaves", *named})


def _class(text: ClassText, signature: str) -> str:
    init = ["super().__init__()", *text.init]
    return "\n".join(
        [
            f"class {text.name}(nn.Module):",
            f"{INDENT}def __init__(self):",
            *(indent(line, 2 * INDENT) for line in init),
            "",
            f"{INDENT}def forward(self, {signature}):",
            *(indent(line, 2 * INDENT) for line in text.forward),
        ]
    )
