"""Forwards that change modes, branch or break: autocast, no_grad, checkpoint, cond, graph breaks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.attention import FeedForward
from ddpopt.cases.corpus.draws import rows, seeded
from ddpopt.cases.report_of_case import Report


class Blocks(nn.Module):
    """Feed-forward blocks; what derives from it says under which mode they run."""

    def __init__(self, dim: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(dim, hidden) for _ in range(blocks))


class AutocastSpan(Blocks):
    """All blocks but the first and last run under bfloat16 autocast, of which one switches it off again."""

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
    """Scales are taken from the blocks' weights without a gradient, before and between their real use."""

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
    """The forward has a graph break of its own in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index, block in enumerate(self.blocks):
            if index == len(self.blocks) // 2:
                torch._dynamo.graph_break()
            x = x + block(x)
        return x


class ViewAcrossBreak(Blocks):
    """A view of a weight is made in front of a graph break and read behind it."""

    def __init__(self, dim: int, hidden: int, blocks: int) -> None:
        super().__init__(dim, hidden, blocks)
        self.head = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to ``(batch, hidden)``."""
        weight = self.head.weight.t()
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = x + block(x)
        torch._dynamo.graph_break()
        for block in self.blocks[half:]:
            x = x + block(x)
        return x @ weight


class Checkpointed(Blocks):
    """Every block is recomputed in backward; a context function may say what is saved all the same."""

    def __init__(
        self, dim: int, hidden: int, blocks: int, context_fn: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(dim, hidden, blocks)
        self.options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.options)
        return x


def save_products(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Save matrix products, recompute all else."""
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Conditional(Blocks):
    """Pairs of blocks of which the data choose one, both in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index in range(0, len(self.blocks), 2):
            left, right = self.blocks[index], self.blocks[index + 1]
            x = x + torch.cond(x.sum() > 0, left, right, (x,))
        return x


class ScaledTanh(torch.autograd.Function):
    """``tanh(x) * scale`` with a backward of its own."""

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


class CustomFunction(nn.Module):
    """Every layer ends in an autograd function that takes a parameter."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.scales = nn.ParameterList(torch.full((dim,), 0.5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + ScaledTanh.apply(layer(x), scale)  # type: ignore[no-untyped-call]  # as in torch
        return x


CASES = (
    Case(
        name="autocast",
        model=partial(seeded, AutocastSpan, dim=160, hidden=640, blocks=5),
        inputs=partial(rows, batch=64, width=160),
        about="a nested autocast span inside forward, longer than a bucket, so that cuts fall into it",
        report=Report(
            number=111794,
            upstream="a cut inside an autocast span left its end without its beginning: NotImplementedError",
            torch_passes=True,
            torch_says="compiles 4 pieces, sends 3 of 4 buckets during backward, gradients as eager",
        ),
    ),
    Case(
        name="no_grad",
        model=partial(seeded, NoGradSpan, dim=160, hidden=640, blocks=5),
        inputs=partial(rows, batch=64, width=160),
        about="parameters read under no_grad before the reader that gives them their gradient",
    ),
    Case(
        name="graph_break",
        model=partial(seeded, OwnBreak, dim=160, hidden=640, blocks=6),
        inputs=partial(rows, batch=64, width=160),
        about="a graph break of its own: each region is planned for its own parameters",
        tags=("breaks",),
        graphs=2,
    ),
    Case(
        name="view_across_break",
        model=partial(seeded, ViewAcrossBreak, dim=160, hidden=640, blocks=6),
        inputs=partial(rows, batch=64, width=160),
        about="a view of a weight crosses a graph break: autograd must find its way to the weight",
        tags=("breaks",),
        graphs=2,
    ),
    Case(
        name="checkpoint",
        model=partial(seeded, Checkpointed, dim=160, hidden=640, blocks=6),
        inputs=partial(rows, batch=64, width=160),
        about="activation checkpointing of every block, whose parameters are operands of a higher-order op",
        tags=("higher_order",),
        report=Report(
            number=104674,
            upstream="checkpointing is a higher-order operator, which the optimizer refused, or put into "
            "one bucket",
            torch_passes=False,
            torch_says="compiles 3 pieces, sends 2 of 5 buckets during backward, gradients as eager",
            asks=("overlap",),
        ),
    ),
    Case(
        name="selective_checkpoint",
        model=partial(
            seeded,
            Checkpointed,
            dim=160,
            hidden=640,
            blocks=6,
            context_fn=partial(create_selective_checkpoint_contexts, save_products),
        ),
        inputs=partial(rows, batch=64, width=160),
        about="checkpointing that saves matrix products: policies in node metadata must survive a cut",
        tags=("higher_order",),
        report=Report(
            number=178765,
            upstream="copied metadata replaced the checkpoint's policy, which was then never asked",
            torch_passes=True,
            torch_says="compiles 3 pieces, sends 2 of 5 buckets during backward, gradients as eager, 0 "
            "matrix products more than eager",
            asks=("products",),
        ),
    ),
    Case(
        name="cond",
        model=partial(seeded, Conditional, dim=160, hidden=640, blocks=6),
        inputs=partial(rows, batch=64, width=160),
        about="torch.cond over blocks: the parameters of both branches are operands of one node",
        tags=("higher_order",),
    ),
    Case(
        name="autograd_function",
        model=partial(seeded, CustomFunction, dim=384, layers=8),
        inputs=partial(rows, batch=32, width=384),
        about="an autograd function with a parameter among its arguments",
        tags=("higher_order",),
    ),
)
