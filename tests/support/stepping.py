"""Drawn models under DDP in this process alone, step by step, and what must be equal of two of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import ddpopt
from ddpopt.cases.case import step_seed
from ddpopt.judge.rules.arithmetic import arithmetic, arithmetic_of
from ddpopt.judge.rules.rounding import neighbor, perturbed_state
from ddpopt.testing.drawn import DrawnModel

MARKS = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),
]
"""Of tests that train under DDP: what torch warns of is not what they are about."""
Wrap = Callable[[DistributedDataParallel], Any]
Seen = dict[str, Any]
Strategy = Literal["split", "inline"]
STRATEGIES: tuple[Strategy, ...] = ("split", "inline")


def eager(ddp: DistributedDataParallel) -> Any:
    return ddp


def compiled(strategy: Strategy) -> Wrap:
    return partial(ddpopt.compile, backend="aot_eager", strategy=strategy)


class Run:
    """A drawn model under DDP.

    Attributes:
        wrap: eager, or what compiles it.
        model: the module itself.
        loss: of a forward whose backward is still to come.
        seen: what the last forward returned.
        nudge: another number has parameters, buffers and inputs replaced by other neighboring numbers.
    """

    def __init__(self, drawn: DrawnModel, wrap: Wrap, nudge: int = 0, **options: bool) -> None:
        self.wrap = wrap
        self._options = options
        self._program = drawn.program
        self.nudge = nudge
        self.model = self._program.model()
        if nudge:
            state = dict((*self.model.named_parameters(), *self.model.named_buffers()))
            for name, moved in perturbed_state(state, nudge, None).items():
                state[name].data = moved.detach()
        self.loss: Tensor | None = None
        self.seen: Seen = {}
        self.rewrap()

    def rewrap(self) -> None:
        """Wrap the module anew, as after a change of what is trained."""
        arguments = self._program.module.DDP_KWARGS | self._options
        self.ddp = DistributedDataParallel(self.model, **arguments)
        self._call = self.wrap(self.ddp)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, 0.05, momentum=0.5)

    def forward(self, step: int) -> None:
        args, kwargs = self._program.inputs(0, step)
        if self.nudge:
            generator = torch.Generator().manual_seed(self.nudge * 64 + step)
            args, kwargs = pytree.tree_map(lambda leaf: neighbor(leaf, generator, data=True), (args, kwargs))
        torch.manual_seed(step_seed(0, step))
        output = self._call(*args, **kwargs)
        self.loss = self._program.loss(output)
        leaves = pytree.tree_leaves((output, args, kwargs))
        self.seen = {f"value {place}": copied(leaf) for place, leaf in enumerate(leaves)}
        self.seen["generator"] = torch.random.get_rng_state()

    def backward(self) -> None:
        assert self.loss is not None
        if self.loss.requires_grad:
            self.loss.backward()  # type: ignore[no-untyped-call]  # of torch
        self.seen["generator after backward"] = torch.random.get_rng_state()
        self.loss = None

    def state(self) -> Seen:
        """All that two runs of one model must agree on."""
        params = dict(self.model.named_parameters())
        return {
            **self.seen,
            **{f"gradient of {name}": copied(param.grad) for name, param in params.items()},
            **{f"parameter {name}": copied(param) for name, param in params.items()},
            **{f"buffer {name}": copied(buffer) for name, buffer in self.model.named_buffers()},
        }


def copied(value: object) -> object:
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float, bool, str, type(None))) else str(type(value))
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    return dense.resolve_conj().clone()


def differing(first: Seen, second: Seen) -> list[str]:
    """The names of what two runs do not have in common, bit for bit."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not same(value, second[name])]


def same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = (first.shape, first.dtype) == (second.shape, second.dtype)
        return alike and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return type(first) is type(second) and first == second


def is_rounding(got: object, samples: list[object]) -> bool:
    """Whether a value differs from others, of runs on neighboring data, by no more than rounding does."""
    tensors = [sample for sample in samples if isinstance(sample, Tensor)]
    if not isinstance(got, Tensor) or len(tensors) < len(samples) or got.shape != tensors[0].shape:
        return False
    return arithmetic(got, arithmetic_of(tensors, None)).right
