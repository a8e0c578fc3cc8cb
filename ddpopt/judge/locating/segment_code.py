"""A part of a graph as source code that needs torch alone, and what was put into it.

Invariant: what cannot be written as code is refused by `NotWritable`, never left out.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ddpopt.graph.nodes import body_nodes, fetch
from ddpopt.judge.locating.pieces import WHOLE, Piece, cut_before, pieces_of, runs_of, source_line

FREED = re.compile(r";( +[A-Za-z_]\w* =)+ None\b")
INDENT = "    "


class NotWritable(Exception):
    """Something has no source code that would stand for itself."""


@dataclass(frozen=True)
class Given:
    """An argument of a segment, as it was in the run that differed.

    Attributes:
        name: of the parameter of ``forward``.
        value: a tensor, detached and cloned, or a number.
        requires_grad: of the tensor that was there.
    """

    name: str
    value: Any
    requires_grad: bool = False

    def code(self) -> str | None:
        """An expression that makes a value like this one; None where only the value itself will do."""
        tensor = self.value
        if not isinstance(tensor, Tensor):
            return repr(tensor) if isinstance(tensor, (bool, int, float, type(None))) else None
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        shape = tuple(tensor.shape)
        layout = f", dtype={tensor.dtype}, device={str(tensor.device)!r}"
        code = _drawn(tensor, shape, layout)
        if not tensor.is_contiguous():
            code = f"strided({code}, {tuple(tensor.stride())})"
        return f"{code}.requires_grad_()" if self.requires_grad else code

    def loading(self) -> str:
        """An expression of the value itself, as it is saved next to the script."""
        if not isinstance(self.value, Tensor):
            return repr(self.value)
        return f"SAVED[{'input ' + self.name!r}].requires_grad_({self.requires_grad})"


def _drawn(tensor: Tensor, shape: tuple[int, ...], layout: str) -> str:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
        return f"torch.randint({low}, {high + 1}, {shape}{layout})"
    size = float(tensor.detach().abs().double().square().mean().sqrt()) if tensor.numel() else 1.0
    scale = f"{size:.2g}" if math.isfinite(size) and size > 0 else "0.0"
    return f"torch.randn({shape}{layout}).mul_({scale})"


@dataclass
class Code:
    """Source code of a module.

    Attributes:
        classes: one for each module in it, the outer one last.
        imports: lines without which it does not run.
        tensors: what it holds, by the dotted name of the attribute.
        chosen: names of the submodules to compile; empty for the whole.
        given: the arguments it had.
        lines: of the user's, that it comes from.
    """

    classes: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Recorder:
    """A Dynamo backend that compiles nothing and keeps what goes into a part of one graph.

    Args:
        chosen: pieces of one graph; the part reaches from the first to the last of them.
        cuts: as for `ddpopt.judge.locating.pieces.ChosenPieces`.
    """

    def __init__(self, chosen: Sequence[Piece], *, cuts: bool) -> None:
        self.chosen = sorted(chosen)
        self.cuts = cuts
        self.given: list[Given] = []
        self.part: fx.GraphModule | None = None
        self._openers: list[str] = []
        self._first_is_chosen = True
        self._seen = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
        """Cut the part out of its graph; all others run as they are."""
        del example_inputs
        number, self._seen = self._seen, self._seen + 1
        if number != self.chosen[0].graph:
            return gm.forward
        pieces = pieces_of(gm, cuts=self.cuts)
        if self.chosen[0].place == WHOLE:
            self.chosen = [Piece(number, place) for place in range(len(pieces))]
        first, last = self.chosen[0].place, self.chosen[-1].place
        runs = runs_of(self.chosen)
        bounds = [bound for run in runs for bound in (run.first, run.last + 1)][1:-1]
        self._openers = [pieces[bound][0].name for bound in bounds]
        openers = [pieces[i][0] for i in (first, last + 1) if 0 < i < len(pieces)]
        stitched = cut_before(gm, openers)
        name = f"segment_{1 if first else 0}" if openers else ""
        part = getattr(stitched, name) if name else gm
        if not isinstance(part, fx.GraphModule):
            raise NotWritable(f"{name} of graph {number} is no graph")
        self.part = part
        if not name:
            return self._run
        delattr(stitched, name)
        setattr(stitched, name, self._run)
        return stitched.forward

    def _run(self, *arguments: Any) -> Any:
        part = self.part
        assert part is not None  # set before anything runs
        names = [str(node.target) for node in part.graph.find_nodes(op="placeholder")]
        self.given = [_given(name, value) for name, value in zip(names, arguments, strict=True)]
        return part(*arguments)

    def code(self) -> Code:
        """Write the part down.

        Returns:
            Its code; with several runs of pieces, one class for each of them and each gap.

        Raises:
            NotWritable: it has no source code.
        """
        if len({piece.graph for piece in self.chosen}) > 1:
            raise NotWritable("its pieces are in several graphs")
        if self.part is None:
            raise NotWritable("it could not be cut out of its graph")
        code = Code(given=self.given, lines=_lines(self.part))
        part = self.part
        if self._openers:
            named = {node.name: node for node in body_nodes(part.graph)}
            if not named.keys() >= set(self._openers):
                raise NotWritable("the pieces are not found again in what was cut out")
            part = cut_before(part, [named[name] for name in self._openers])
            code.chosen = [f"segment_{index}" for index in range(0, len(self._openers) + 1, 2)]
        _write(part, "Segment", "", code)
        code.imports = list(dict.fromkeys(code.imports))
        return code


def _given(name: str, value: Any) -> Given:
    if not isinstance(value, Tensor):
        return Given(name, value)
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    dense = value.layout == torch.strided and type(value) in (Tensor, nn.Parameter)
    return Given(name, copy.copy_(value.detach()) if dense else value.detach().clone(), value.requires_grad)


def _lines(part: fx.GraphModule) -> list[str]:
    return list(dict.fromkeys(filter(None, map(source_line, part.graph.nodes))))


def _write(gm: fx.GraphModule, name: str, path: str, code: Code) -> None:
    """Append the class of a module, after those of its submodules."""
    made: list[str] = []
    for node in gm.graph.nodes:
        target = str(node.target)
        if node.op not in ("get_attr", "call_module") or any(
            line.startswith(f"self.{target} ") for line in made
        ):
            continue
        if "." in target:
            raise NotWritable(f"{target} is an attribute of an attribute")
        held = fetch(gm, target)
        if isinstance(held, fx.GraphModule):
            inner = f"{name}_{target}"
            _write(held, inner, f"{path}{target}.", code)
            # the body of a higher-order operator has to be a graph
            made.append(
                f"self.{target} = "
                + (f"{inner}()" if node.op == "call_module" else f"torch.fx.symbolic_trace({inner}())")
            )
        elif isinstance(held, Tensor):
            code.tensors[f"{path}{target}"] = held.detach().clone()
            made.append(f"self.{target} = SAVED[{path + target!r}].requires_grad_({held.requires_grad})")
        else:
            raise NotWritable(f"{target} is a {type(held).__name__}")
    written = gm.graph.python_code("self")
    source = FREED.sub("", written.src).strip()
    code.imports += [
        _import(alias, value)
        for alias, value in written.globals.items()
        if re.search(rf"(?<![\w.]){re.escape(alias)}\b", source)
    ]
    init = [
        f"{INDENT}def __init__(self):",
        f"{INDENT * 2}super().__init__()",
        *(INDENT * 2 + m for m in made),
        "",
    ]
    forward = [INDENT + line if line.strip() else "" for line in source.splitlines()]
    code.classes.append("\n".join([f"class {name}(torch.nn.Module):", *(init if made else []), *forward]))


def _import(alias: str, value: object) -> str:
    """A line that brings a global of generated code into scope."""
    if isinstance(value, ModuleType):
        return (
            f"import {value.__name__}" if value.__name__ == alias else f"import {value.__name__} as {alias}"
        )
    if isinstance(value, float):
        return f'{alias} = float("{value}")'
    if value is type(None):
        return f"{alias} = type(None)"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if str(module).startswith("ddpopt."):
        raise NotWritable(f"{alias} is ddpopt's own")
    if module is None or name is None or "." in name:
        raise NotWritable(f"{alias} is {value!r}, which no import finds")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    if found is not value:
        raise NotWritable(f"{alias} is {value!r}, which no import finds")
    return f"from {module} import {name}" if name == alias else f"from {module} import {name} as {alias}"
