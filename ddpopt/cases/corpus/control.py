"""Forwards that change modes, branch or break: autocast, no_grad, checkpoint, cond, graph breaks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ddpopt.cases.corpus.draws import rows_case
from ddpopt.cases.corpus.layers import FeedForward, Layers


class Blocks(nn.Module):
    """Feed-forward blocks; subclasses define the mode under which they run."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(dim, 4 * dim) for _ in range(layers))


class AutocastSpan(Blocks):
    """A nested autocast span inside forward, longer than a bucket, so that cuts fall into it."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        first, second, exempt, third, last = self.blocks
        x = x + first(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = x + second(x)
            with torch.autocast(x.device.type, enabled=False):
                x = x + exempt(x)
            x = x + third(x)
        out: Tensor = x + last(x)
        return out


class NoGradSpan(Blocks):
    """Parameters read under no_grad before the reader that gives them their gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        with torch.no_grad():
            last_scale = 1 + next(self.blocks[-1].parameters()).abs().max()
        for block in self.blocks:
            with torch.no_grad():
                peek = block(x).abs().max()
            x = x + block(x) / (last_scale + peek)
        return x


class OwnBreak(Blocks):
    """A graph break of its own: each graph is planned for its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index, block in enumerate(self.blocks):
            if index == len(self.blocks) // 2:
                torch._dynamo.graph_break()
            x = x + block(x)
        return x


class ViewAcrossBreak(Blocks):
    """A view of a weight crosses a graph break: autograd must find its way to the weight."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.head = nn.Linear(dim, 4 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to ``(batch, 4 * dim)``."""
        weight = self.head.weight.t()
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = x + block(x)
        torch._dynamo.graph_break()
        for block in self.blocks[half:]:
            x = x + block(x)
        return x @ weight


class Checkpointed(Blocks):
    """Activation checkpointing of every block, whose parameters are operands of a higher-order op.

    Every block is recomputed in backward, except values that a context function saves.
    """

    def __init__(self, dim: int, layers: int, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__(dim, layers)
        self.options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.options)
        return x


def save_products(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Save matrix products, recompute everything else."""
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Conditional(Blocks):
    """Branches of torch.cond over blocks: the parameters of both are operands of one node."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index in range(0, len(self.blocks), 2):
            left = self.blocks[index]
            right = self.blocks[index + 1]
            x = x + torch.cond(x.sum() > 0, left, right, (x,))
        return x


class ScaledTanh(torch.autograd.Function):
    """``tanh(x) * scale`` with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        """Map ``(batch, dim)`` and ``(dim,)`` to ``(batch, dim)``."""
        y = x.tanh()
        ctx.save_for_backward(y, scale)
        return y * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both arguments."""
        y, scale = ctx.saved_tensors
        return gradient * scale * (1 - y * y), (gradient * y).sum(0)


class CustomFunction(Layers):
    """An autograd function with a parameter among its arguments."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.scales = nn.ParameterList(torch.full((dim,), 0.5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + ScaledTanh.apply(layer(x), scale)  # type: ignore[no-untyped-call]  # as in torch
        return x


blocks_case = partial(rows_case, dim=160, batch=64)
CASES = (
    blocks_case("autocast", AutocastSpan, layers=5),
    blocks_case("no_grad", NoGradSpan, layers=5),
    blocks_case("graph_break", OwnBreak, layers=6, graphs=2),
    blocks_case("view_across_break", ViewAcrossBreak, layers=6, graphs=2),
    blocks_case("checkpoint", Checkpointed, layers=6),
    blocks_case(
        "selective_checkpoint",
        partial(Checkpointed, context_fn=partial(create_selective_checkpoint_contexts, save_products)),
        "checkpointing that saves matrix products: policies in node metadata must survive a cut",
        layers=6,
    ),
    blocks_case("cond", Conditional, layers=6),
    rows_case("autograd_function", CustomFunction),
)
