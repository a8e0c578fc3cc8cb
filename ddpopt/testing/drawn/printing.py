"""A drawn model as a Python module that stands alone: what a person would paste into a bug report.

Invariant: equal values give equal text, and the text is all that there is of the model: what runs is the
text, executed (`ddpopt.testing.drawn.program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill, indent
from typing import TYPE_CHECKING

from ddpopt.testing.drawn.forms import CHOICES, LEAVES, LOSSES, RETURNS, TAKES
from ddpopt.testing.drawn.page import INDENT
from ddpopt.testing.drawn.scopes import ClassText
from ddpopt.testing.drawn.writer import Writer

if TYPE_CHECKING:
    from ddpopt.testing.drawn.model import DrawnModel

_MODULE = '''\
"""{about}

{value}
"""

{imports}


{definitions}


def make_model():
    torch.manual_seed({seed}){forget}
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = {batch}
{inputs}{leaf}
    return {call}


def loss(output):
    leaves = [leaf for leaf in tree_leaves({leaves}) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return sum({of_leaf} for leaf in leaves) / sum(leaf.numel() for leaf in leaves)


def run_step(model, rank=0, step=0):
    torch.manual_seed(65536 * step + rank)
    args, kwargs = make_inputs(rank, step)
    return loss(model(*args, **kwargs))


DDP_KWARGS = {ddp_kwargs}

if __name__ == "__main__":
    model = make_model()
    value = run_step(model)
    value.backward()
    print("loss", value.item())
    for name, parameter in model.named_parameters():
        print(name, parameter.grad)
'''


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
    takes, returns, names = TAKES[model.takes], RETURNS[model.returns], list(writer.inputs)
    leaf, loss = LEAVES[model.leaves], LOSSES[model.loss]
    root = writer.classes[0]
    if writer.ignored:
        root.init.append(f"self._ddp_params_and_buffers_to_ignore = {writer.ignored!r}")
    root.forward[:0] = takes.opening(names)
    root.forward.append(f"return {returns.result(outputs)}")
    forms = (takes.definition(names), returns.definition(outputs), leaf.definition, loss.definition)
    helpers = [*writer.helpers.values(), *forms]
    signatures = [takes.signature(names), *(", ".join(inner.arguments) for inner in writer.classes[1:])]
    classes = [_class(text, given) for text, given in zip(writer.classes, signatures, strict=True)]
    definitions = "\n\n\n".join([*filter(_is_definition, helpers), *reversed(classes)])
    batches = model.batches
    return _MODULE.format(
        about=_filled(f"A model with {', '.join(sorted(writer.features)) or 'nothing but a layer'}."),
        value=_filled(repr(model)),
        imports="\n".join(_imports(helpers, definitions)),
        definitions=definitions,
        seed=model.seed,
        batch=batches[0] if len(batches) == 1 else f"{batches!r}[step % {len(batches)}]",
        inputs=indent("\n".join(f"{name} = {drawn}" for name, drawn in writer.inputs.items()), INDENT),
        leaf=f"\n{INDENT}{leaf.code}" if leaf.code else "",
        call=takes.call(names),
        of_leaf=loss.code,
        forget=f"\n{INDENT}GIVEN.clear()" if model.loss == "given" else "",
        leaves=returns.leaves,
        ddp_kwargs=_ddp_kwargs(model, writer),
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


def _ddp_kwargs(model: DrawnModel, writer: Writer) -> dict[str, object]:
    unused = {"find_unused_parameters": True} if "unused-parameter" in writer.features else {}
    return {"bucket_cap_mb": model.cap_bytes / 2**20, **unused}
