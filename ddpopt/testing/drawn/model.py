"""A drawn model as a value, which can be written as a standalone Python module, run, and turned into a case.

The text can be pasted into a bug report and fully defines the model: the text itself is executed
(`ddpopt.testing.drawn.program`). Invariant: every value that can be built is a valid model; equal values have
equal texts; and ``eval(repr(value)) == value``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import resources
from textwrap import fill, indent

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError
from ddpopt.testing.drawn.forms import CHOICES, FORMS, LEAF_CODE, LOSS_CODE, inputs_as, outputs_as
from ddpopt.testing.drawn.program import Program
from ddpopt.testing.drawn.registry import BLOCKS, Step, find_block
from ddpopt.testing.drawn.writer import DEFINITIONS, INDENT, ClassText, Writer

_MODULE = (resources.files(__package__) / "model.txt").read_text()


@dataclass(frozen=True, repr=False)
class DrawnModel:
    """A model, its inputs and its loss, as a value.

    Attributes:
        steps: the steps of the model, in order; it begins with one value, the input.
        outputs: the values it returns besides its last one, each a step whose block is an output.
        takes: how forward receives its inputs.
        returns: how it returns several outputs.
        leaves: whether the input gets a gradient.
        loss: the loss of its output.
        training: the verification option under which it is trained.
        width: the number of elements in each sample, a multiple of four.
        batches: the numbers of samples in the training steps, in turn.
        cap_bytes: DDP's bucket cap.
        joined: whether values that nothing reads are added to the last one. If not, their parameters get no
            gradient.
        seed: the seed of the weights.
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
            value = getattr(self, field.name)
            kind = type(field.default)
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
            raise UsageError(f"expected batches to be numbers of at least 2, got {self.batches!r}")
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
        return _text_and_features(self)

    @property
    def source(self) -> str:
        """The model as a Python module that needs only torch."""
        return self._written[0]

    @property
    def features(self) -> frozenset[str]:
        """The features of the model, as named by :func:`known_features`."""
        return self._written[1]

    @property
    def program(self) -> Program:
        """The source, ready to run."""
        return Program(self.source)

    def case(self) -> Case:
        """Make a case."""
        return self.program.case()

    def all_steps(self) -> Iterator[Step]:
        """Every step, including those in bodies, and every output."""
        for outer in (*self.steps, *self.outputs):
            yield from outer.all()


def known_features() -> frozenset[str]:
    """Every feature that a model can have."""
    brought = (block.features | block.optional for block in BLOCKS.values())
    return FORMS.union(*brought)


def _text_and_features(model: DrawnModel) -> tuple[str, frozenset[str]]:
    """The text of a module, and the features it contains."""
    writer = Writer(model.width, model.batches, joined=model.joined)
    for step in model.steps:
        writer.write(step)
    more = [writer.output(step) for step in model.outputs]
    outputs = [writer.result(), *more, *writer.returned]
    writer.features |= _forms(model)
    return _module(model, writer, outputs), frozenset(writer.features)


def _forms(model: DrawnModel) -> set[str]:
    """The features of a model that do not come from steps."""
    found = {choices[getattr(model, name)] for name, choices in CHOICES.items()}
    found |= {"dynamic-batch"} if len(set(model.batches)) > 1 else set()
    found |= {"several-outputs"} if model.outputs else set()
    return {feature for feature in found if feature is not None}


def _module(model: DrawnModel, writer: Writer, outputs: Sequence[str]) -> str:
    takes = inputs_as(model.takes, list(writer.inputs))
    returned = outputs_as(model.returns, outputs)
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
    batches = model.batches
    leaf = LEAF_CODE.get(model.leaves)
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
    """Imports in ruff's order: the standard library, then torch, each sorted."""
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
