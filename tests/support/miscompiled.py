"""Models, and Dynamo backends that get a part of them wrong, each in a way of its own.

Each backend is AOTAutograd's eager one behind an edit of the graph, so everything else is bit for bit right.
"""

import functools
import operator
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch._dynamo import lookup_backend, register_backend

from ddpopt.cases.case import Case

WIDTH = 8


class Stages(nn.Module):
    """Layers with an activation of its own behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = torch.sigmoid(self.layers[1](x))
        x = torch.tanh(self.layers[2](x))
        return torch.relu(self.layers[3](x))


class Short(nn.Module):
    """A layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def stages() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stages(), torch.randn(4, WIDTH)


def short() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Short(), torch.randn(4, WIDTH)


def _calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == name]


def _scale(gm: fx.GraphModule, node: fx.Node, factor: float) -> None:
    with gm.graph.inserting_after(node):
        scaled = gm.graph.call_function(operator.mul, (node, factor))
    scaled.meta = dict(node.meta)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def editing(edit: Callable[[fx.GraphModule], None]) -> Callable[..., Any]:
    """Make an edit of a graph a backend of Dynamo, under its name."""

    @functools.wraps(edit)
    def compiler(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        copy = fx.GraphModule(gm, fx.Graph())
        copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
        copy.meta = dict(gm.meta)
        edit(copy)
        copy.recompile()
        return lookup_backend("aot_eager")(copy, example_inputs)

    return register_backend(compiler)


@editing
def scaling_tanh(copy: fx.GraphModule) -> None:
    """Makes every tanh a little larger."""
    for node in _calls(copy, "tanh"):
        _scale(copy, node, 1.01)


@editing
def losing_bias(copy: fx.GraphModule) -> None:
    """Sends no gradient to the bias of a layer that a sigmoid follows."""
    for node in _calls(copy, "sigmoid"):
        linear: Any = node.args[0]
        if linear.op == "placeholder":
            continue
        with copy.graph.inserting_before(linear):
            bias = copy.graph.call_method("detach", (linear.args[2],))
        linear.args = (*linear.args[:2], bias)


@editing
def refusing_tanh(gm: fx.GraphModule) -> None:
    """Crashes on a tanh."""
    if _calls(gm, "tanh"):
        raise ArithmeticError("no tanh here")


@editing
def wrong_apart(copy: fx.GraphModule) -> None:
    """Gets a tanh wrong where no sigmoid stands in the same graph: only where the model is cut."""
    for node in _calls(copy, "tanh") if not _calls(copy, "sigmoid") else []:
        _scale(copy, node, 1.01)


@register_backend
def wrong_on_rank_1(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    """Gets a tanh wrong on the second rank."""
    edit = scaling_tanh if dist.is_initialized() and dist.get_rank() == 1 else lookup_backend("aot_eager")
    return edit(gm, example_inputs)


def _rows(rank: int, step: int) -> tuple[tuple[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank * 64 + step)
    return (torch.randn(4, WIDTH, generator=generator),), {}


CUT = Case(
    "cut stages",
    lambda: stages()[0],
    _rows,
    "four layers, a bucket for each",
    ddp_kwargs={"bucket_cap_mb": 0.0002},
)


@editing
def dying_on_tanh(gm: fx.GraphModule) -> None:
    """Takes the process down where a tanh is compiled."""
    if _calls(gm, "tanh"):
        os.kill(os.getpid(), signal.SIGSEGV)
