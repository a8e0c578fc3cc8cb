"""A part of a graph as source code that needs torch alone.

The code is what `torch.fx.GraphModule.print_readable` writes, with the user's own lines as comments. What it
cannot write (a function of the user's, a tensor or a module that the graph holds) makes a script that fails,
and a script counts only once it has shown the difference in a fresh interpreter.
"""

from __future__ import annotations

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
        arguments: for each parameter of ``forward`` an expression that draws one of the form that it had.
    """

    text: str
    arguments: dict[str, str]


class Recorder:
    """A compiler that compiles nothing, and keeps what it is given as source code.

    Attributes:
        codes: of each graph that ran; None where torch cannot draw an argument.
    """

    def __init__(self) -> None:
        self.codes: list[Code | None] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[object], **_: object) -> Callable[..., Any]:
        """Have a graph run as it is, and write it down when it first does."""
        del inputs  # of symbolic sizes, maybe
        place = len(self.codes)
        self.codes.append(None)

        def run(*arguments: Any) -> Any:
            self.codes[place] = self.codes[place] or _code(gm, arguments)
            return gm(*arguments)

        return run


def _code(gm: fx.GraphModule, arguments: Sequence[object]) -> Code | None:
    if any(isinstance(one, Tensor) and not _is_plain(one) for one in arguments):
        return None
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    text = gm.print_readable(print_output=False).replace("class GraphModule(", "class Segment(", 1)
    return Code(text, dict(zip(names, map(_drawn, arguments), strict=True)))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _drawn(argument: object) -> str:
    """An expression that draws an argument of the same form."""
    if not isinstance(argument, Tensor):
        return repr(argument)
    form = f"{tuple(argument.shape)}, {argument.stride()}, {argument.dtype}, {str(argument.device)!r}"
    return f"rand_strided({form}).requires_grad_({argument.requires_grad})"
