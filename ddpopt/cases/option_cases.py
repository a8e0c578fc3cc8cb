"""Change a case for an option: a parameter that is not always used, one that is frozen, a nested DDP.

Invariant: the changed case is a case: equal arguments give equal tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError

WIDTH = 8
CAPS = {"bucket_cap_mb", "bucket_cap_mb_list"}
"""DDP's arguments that replace each other."""


class WithExtra(nn.Module):
    """A model with an extra parameter that is used or not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.extra = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.uses_extra = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, and a term of the loss."""
        output = self.model(*args, **kwargs)
        term = self.extra.square().sum() if self.uses_extra else None
        return output, term


class WithExchange(nn.Module):
    """A model followed by an expert, used or not, whose rows go to the other ranks and back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.extra = nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.model = model
        self.expert = nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.uses_extra = True
        self.size = 1
        self.group_name: Any = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, and a term of the loss. Without a group, nothing is exchanged."""
        output = self.model(*args, **kwargs)
        rows = self.expert.expand(self.size, WIDTH) * (self.extra.sum() if self.uses_extra else 1.0)
        if self.group_name:
            # before torch 2.13 the one with a backward does not run in inference mode
            exchange = all_to_all_single_autograd if torch.is_grad_enabled() else all_to_all_single
            rows = exchange(rows.contiguous(), None, None, self.group_name)
        return output, rows.square().mean()


def set_extra(model: nn.Module, used: bool) -> None:
    """Set whether the extra parameter is used, if the model has one."""
    if isinstance(model, (WithExtra, WithExchange)):
        model.uses_extra = used


def exchanging_in(case: Case, group: dist.ProcessGroup) -> Case:
    """Make an expert exchange its rows in a process group."""

    def exchanging() -> nn.Module:
        model = case.model()
        if isinstance(model, WithExchange):
            model.size = dist.get_world_size(group)
            model.group_name = group.group_name
        return model

    return replace(case, model=exchanging)


def around(case: Case, kind: Callable[[nn.Module], nn.Module], *, ranks_differ: bool = False) -> Case:
    """Wrap a case's model in a module that returns its output and a term of the loss.

    Args:
        case: the case.
        kind: the module around the model.
        ranks_differ: whether only some ranks have the term in a step.
    """

    def loss(output: Any) -> Tensor:
        own, term = output
        total = case.loss(own)
        return total if term is None else total + term.to(total.dtype)

    differ = ranks_differ or case.ranks_differ
    return replace(case, model=lambda: kind(case.model()), loss=loss, ranks_differ=differ)


def _ignore(model: nn.Module, names: list[str]) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, names
    )


def _of_cases(change: Callable[[nn.Module], nn.Module]) -> Callable[[Case], Case]:
    """Turn a change of a model into a change of a case's model."""
    return lambda case: replace(case, model=lambda: change(case.model()))


@_of_cases
def freezing_first(model: nn.Module) -> nn.Module:
    """Freeze the first trainable parameter, if it is not the only one."""
    if len(trained := trainable(model)) > 1:
        trained[0][1].requires_grad_(False)
    return model


@_of_cases
def ignoring_first(model: nn.Module) -> nn.Module:
    """Have DDP ignore the first trainable parameter, if it is not the only one."""
    if len(trained := trainable(model)) > 1:
        _ignore(model, [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), trained[0][0]])
    return model


@_of_cases
def sync_batchnorm(model: nn.Module) -> nn.Module:
    """Turn BatchNorm into SyncBatchNorm."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that get gradients, by name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


class Nested(nn.Module):
    """A DDP module inside a model whose other parameters an outer DDP module reduces."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        self.inner = DistributedDataParallel(model.to(device), process_group=group)
        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=dtypes[0] if dtypes else None))
        ignored = [name for name, _ in self.named_parameters() if name.startswith("inner.")]
        ignored += [name for name, _ in self.named_buffers()]
        _ignore(self, ignored)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, and a term of the loss."""
        return self.inner(*args, **kwargs), self.scale.square().sum()


def nested(case: Case, group: dist.ProcessGroup) -> Case:
    """Put a DDP module that reduces in the same process group into the model."""
    return around(case, lambda model: Nested(model, group))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Convert a floating-point or complex tensor; return anything else unchanged.

    Complex numbers stay complex, and become wider if the dtype is wider; ``Module.to`` would drop the
    imaginary parts.
    """
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = torch.promote_types(value.dtype, dtype) if value.is_complex() else dtype
    is_leaf = value.is_leaf and value.requires_grad
    return value.detach().to(wide).requires_grad_() if is_leaf else value.to(wide)


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    """Make a case compute in another dtype: its parameters, buffers and inputs."""
    to = partial(cast, dtype=dtype)

    def model() -> nn.Module:
        made: Any = case.model()  # torch does not type `_apply`, which all conversions of Module use
        casted: nn.Module = made._apply(to)
        return casted

    def inputs(rank: int, step: int) -> Any:
        args, kwargs = case.inputs(rank, step)
        return tree_map(to, (args, dict(kwargs)))

    return replace(case, model=model, inputs=inputs)


def differing(case: Case, ddp_kwargs: Mapping[str, Any]) -> Case:
    """Override a case's arguments for DDP; a cap replaces any other cap."""
    own = dict(case.ddp_kwargs)
    if CAPS & ddp_kwargs.keys():
        own = {name: value for name, value in own.items() if name not in CAPS}
    return replace(case, ddp_kwargs=own | dict(ddp_kwargs))


def smaller_batch(given: tuple[Any, Any]) -> Any:
    """The arguments of a forward for fewer samples: two thirds, but at least one less.

    Args:
        given: positional and keyword arguments; the first dimension of their first tensor is the batch.

    Raises:
        UsageError: there is no batch of more than one sample.
    """
    sizes = [leaf.size(0) for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or sizes[0] < 2:
        raise UsageError("expected a batch of two or more samples in the first dimension of the inputs")
    fewer = sizes[0] - max(1, sizes[0] // 3)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.size(0) != sizes[0]:
            return leaf
        part = leaf.detach()[:fewer].clone()
        return part.requires_grad_(leaf.requires_grad)

    return tree_map(cut, given)
