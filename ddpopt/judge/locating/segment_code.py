"""A part of a graph as source code that needs torch alone, and what was put into it.

The code is what `torch.fx.GraphModule.print_readable` writes, with the user's own lines as comments. What it
cannot write (a function of the user's, a tensor or a module that the graph holds) makes a script that fails,
and a script counts only once it has shown the difference in a fresh interpreter.

Invariant: arguments are kept as they were before anything ran on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Code:
    """Source code of a module.

    Attributes:
        text: its class, ``Segment``; in it a class for each graph that it holds.
        arguments: what was put into it, by the name of the parameter of ``forward``.
    """

    text: str
    arguments: dict[str, Any]

    def drawn(self) -> dict[str, str]:
        """Expressions that draw arguments of the same form; empty where torch cannot."""
        found = {}
        for name, value in self.arguments.items():
            found[name] = repr(value)
            if isinstance(value, Tensor):
                if type(value) is not Tensor or value.layout is not torch.strided:
                    return {}
                form = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}, {str(value.device)!r}"
                found[name] = f"rand_strided({form}).requires_grad_({value.requires_grad})"
        return found


class Recorder:
    """A compiler that compiles nothing, and keeps what it is given and what goes into that."""

    def __init__(self) -> None:
        self.parts: list[fx.GraphModule] = []
        self.given: list[Any] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[object], **_: object) -> Callable[..., Any]:
        """Keep a graph, and have it run as it is."""
        del inputs
        self.parts.append(gm)

        def run(*arguments: Any) -> Any:
            self.given = [_copied(value) if isinstance(value, Tensor) else value for value in arguments]
            return gm(*arguments)

        return run

    def code(self) -> Code | None:
        """Write down what was kept; None if it is not one graph that ran."""
        if len(self.parts) != 1 or not self.given:
            return None
        (part,) = self.parts
        names = [str(node.target) for node in part.graph.find_nodes(op="placeholder")]
        text = part.print_readable(print_output=False).replace("class GraphModule(", "class Segment(", 1)
        return Code(text, dict(zip(names, self.given, strict=True)))


def _copied(tensor: Tensor) -> Tensor:
    """The same numbers in the same layout, as a leaf."""
    return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)
