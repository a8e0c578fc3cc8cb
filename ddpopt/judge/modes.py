"""The ways to run a data-parallel step that can be verified, one small function each.

A mode turns a model into a `Parallel`: the callable, how its backward runs, and where its gradients are.
Invariant: nothing outlives the ``with`` block of a mode, neither a Dynamo setting nor a compiled frame.
Without a backend every mode runs uncompiled, so that faults of compilation can be told apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._dynamo import compiled_autograd, trace_rules
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import UsageError, did_you_mean
from ddpopt.judge import sharded
from ddpopt.judge.parallel import Parallel, Setup
from ddpopt.planning.strategy import Strategy

TRACED_FOR_GOOD = "torch.nn.parallel.distributed"
Gives = Literal["nothing", "arguments", "module"]
Wrap = Callable[[Setup], Parallel]


@dataclass(frozen=True)
class Mode:
    """One way to run a data-parallel step.

    Attributes:
        name: as in ``--mode``.
        about: one sentence.
        gives: the part of DDP it offers: ``"module"``: a DDP module; ``"arguments"``: DDP's arguments;
            ``"nothing"``.
        wrap: makes the model data-parallel.
        compiles: whether it compiles at all.
        is_sharded: whether each rank holds a part of each parameter.
        captures_backward: whether compiled autograd must capture its backward.
        observable: whether its collectives are those of DDP's C++ reducer.
        optimize_ddp: Dynamo's setting of that name while the mode runs.
    """

    name: str
    about: str
    gives: Gives
    wrap: Wrap
    compiles: bool = True
    captures_backward: bool = False
    is_sharded: bool = False
    observable: bool = False
    optimize_ddp: bool | str = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Set up Dynamo and Inductor for this mode from a clean state, and restore everything.

        Inductor draws random numbers as eager does, so that dropout can be compared.
        """
        torch._dynamo.reset()
        inductor = torch._inductor.config
        settings = {
            "fallback_random": True,
            "_fuse_ddp_bucket_size": inductor._fuse_ddp_bucket_size,  # DDP sets it
            "_fuse_ddp_communication": False,
        }
        try:
            with torch._dynamo.config.patch(optimize_ddp=self.optimize_ddp), inductor.patch(settings):
                yield
        finally:
            torch._dynamo.reset()
            # DDP with the Python reducer makes Dynamo trace DDP's frames from then on; a static graph then no
            # longer compiles.
            if TRACED_FOR_GOOD in trace_rules.LEGACY_MOD_INLINELIST:
                trace_rules.LEGACY_MOD_INLINELIST.remove(TRACED_FOR_GOOD)
                trace_rules.get_legacy_mod_inlinelist.cache_clear()


def _compiled(module: nn.Module, backend: Any) -> Any:
    return module if backend is None else torch.compile(module, backend=backend)


def local(setup: Setup) -> Parallel:
    """The model alone on each rank, with unreduced gradients."""
    return Parallel(_compiled(setup.model, setup.backend), setup.model)


def compiled_ddp(setup: Setup) -> Parallel:
    """``torch.compile(DDP(model))``, under whatever setting of ``optimize_ddp`` is in force."""
    ddp = DistributedDataParallel(setup.model, process_group=setup.group, **setup.ddp_kwargs)
    return Parallel(_compiled(ddp, setup.backend), setup.model, ddp=ddp, no_sync=ddp.no_sync)


def python_reducer(setup: Setup) -> Parallel:
    """DDP's Python reducer, with the backward captured by compiled autograd."""
    parallel = compiled_ddp(setup)
    if setup.backend is not None:
        compiler = torch.compile(backend=setup.backend)
        parallel.around_backward = lambda: compiled_autograd._enable(compiler, dynamic=False)
    return parallel


def ddpopt_with(strategy: Strategy | None, fusion: Literal["concat", "coalesced"] = "concat") -> Wrap:
    """``ddpopt.compile`` with a strategy, or ``ddpopt.train_step`` with a fusion; eager without a backend."""

    def wrap(setup: Setup) -> Parallel:
        # heavy imports that other modes do not need
        from ddpopt.dynamo.api import compile as ddpopt_compile
        from ddpopt.step.api import train_step

        parallel = compiled_ddp(replace(setup, backend=None))
        ddp: Any = parallel.ddp
        parallel.planned = setup.backend is not None
        if setup.backend is not None and strategy is not None:
            parallel.call = ddpopt_compile(ddp, backend=setup.backend, strategy=strategy)
        elif setup.backend is not None:
            parallel.whole = train_step(backend=setup.backend, fusion=fusion)
        return parallel

    return wrap


MODES: tuple[Mode, ...] = (
    Mode("eager", "eager DDP: the reference", "module", compiled_ddp, compiles=False, observable=True),
    Mode(
        "torch", "torch's DDPOptimizer", "module", compiled_ddp, observable=True, optimize_ddp="ddp_optimizer"
    ),
    Mode("whole", "no optimization: one graph under DDP", "module", compiled_ddp, observable=True),
    Mode(
        "python_reducer",
        "Python reducer under compiled autograd, fusion off",
        "module",
        python_reducer,
        captures_backward=True,
        optimize_ddp="python_reducer",
    ),
    Mode(
        "ddpopt-split", "ddpopt: one segment for each bucket", "module", ddpopt_with("split"), observable=True
    ),
    Mode("ddpopt-inline", "ddpopt: one graph", "module", ddpopt_with("auto"), observable=True),
    Mode("ddpopt-step", "ddpopt: a step in one graph", "module", ddpopt_with(None), observable=True),
    Mode(
        "ddpopt-step-coalesced",
        "ddpopt: the same, without a buffer for each bucket",
        "module",
        ddpopt_with(None, "coalesced"),
        observable=True,
    ),
    Mode("fully_shard", "FSDP2", "nothing", sharded.fully_sharded, is_sharded=True),
    Mode("replicate", "replicate()", "arguments", sharded.replicated),
)
LOCAL = Mode("local", "the model alone, nothing reduced", "nothing", local)


def mode(name: str, given_as: str = "mode") -> Mode:
    """Return a mode by its name.

    Args:
        name: one of those in `MODES`.
        given_as: the name of the caller's argument, for the error.

    Returns:
        The mode.

    Raises:
        UsageError: there is no such mode.
    """
    return named(name, {each.name: each for each in MODES}, given_as)


def mode_of(strategy: str) -> str:
    """Name the mode that runs a strategy: ``inline`` and ``auto`` differ only in what is logged."""
    modes = {
        "split": "ddpopt-split",
        "inline": "ddpopt-inline",
        "auto": "ddpopt-inline",
        "step": "ddpopt-step",
    }
    return named(strategy, modes, "strategy")


T = TypeVar("T")


def named(name: str, known: Mapping[str, T], given_as: str) -> T:
    """Look up a name.

    Args:
        name: the name.
        known: all objects, by name.
        given_as: the caller's argument, a parameter or a command-line option, for the error.

    Returns:
        The object with this name.

    Raises:
        UsageError: there is none.
    """
    if name not in known:
        raise UsageError(
            f"{given_as}: expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )
    return known[name]
