"""Patches for one run of a torch test: compile DDP modules, and use the CPU in place of GPUs.

Most of torch's DDP tests ask for a GPU without needing one. They get the CPU wherever they name a device. The
patches apply to a process that ends with the run.
"""

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

import ddpopt
from ci.torch_ddp.table import EAGER, OPTIMIZER, OURS, Job

BUILDS, GRAPHS = "builds", "graphs"
"""Marker files: a DDP module was built; Dynamo compiled a graph."""
MANY_FRAMES = 256
"""How often Dynamo may recompile one forward for another module before it falls back to eager."""


def compile_ddp(job: Job, backend: str, small_cap_mb: float, folder: Path) -> None:
    """Compile every DDP module of this process when it is first called, and set the job's cap.

    The module itself stays DDP's own, with its attributes and methods.

    Args:
        job: how to compile, and whether with the small cap.
        backend: the Dynamo backend underneath.
        small_cap_mb: the small cap.
        folder: the folder for marker files of what happened.
    """
    torch._dynamo.config.recompile_limit = MANY_FRAMES
    own_init = DistributedDataParallel.__init__
    compiled: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(own_init)
    def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
        (folder / BUILDS).touch()
        if job.small and "bucket_cap_mb_list" not in kwargs:
            kwargs["bucket_cap_mb"] = small_cap_mb
        own_init(ddp, *args, **{**kwargs, "device_ids": None, "output_device": None})

    def call(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        # The compiled code must call the module, and any DDP module inside it, uncompiled.
        DistributedDataParallel._compiled_call_impl = None
        try:
            with _pop_mode_temporarily():
                if ddp not in compiled:
                    compiled[ddp] = _compiled(ddp, job.mode, backend)
                return compiled[ddp](*args, **kwargs)
        finally:
            DistributedDataParallel._compiled_call_impl = call
            if torch._dynamo.utils.counters["stats"]["unique_graphs"]:
                (folder / GRAPHS).touch()

    DistributedDataParallel.__init__ = init  # type: ignore[assignment,method-assign]  # the point of it
    if job.mode != EAGER:
        DistributedDataParallel._compiled_call_impl = call


def _compiled(ddp: Any, mode: str, backend: str) -> Callable[..., Any]:
    if mode in OURS:
        strategy = cast(Literal["split", "inline"], mode)
        return cast(Callable[..., Any], ddpopt.compile(ddp, backend=backend, strategy=strategy))
    torch._dynamo.config.optimize_ddp = mode == OPTIMIZER
    return torch.compile(cast(Callable[..., Any], ddp), backend=backend)


class OnCpu(TorchFunctionMode):
    """Replaces GPU arguments of torch functions by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with another device."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.to, torch.device):
            args = tuple(map(_cpu_for_gpu, args))
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_gpu(kwargs["device"])
        return func(*args, **kwargs)


def _cpu_for_gpu(value: Any) -> Any:
    """The CPU if the value names a GPU, by number or otherwise; anything else unchanged."""
    named = type(value) is int or (isinstance(value, (str, torch.device)) and str(value).startswith("cuda"))
    return "cpu" if named else value


def stand_in_for_gpus() -> None:
    """Replace GPUs by the CPU in this process."""
    own_to = nn.Module.to

    def cuda(module: nn.Module, device: object = None) -> nn.Module:
        del device
        return module

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        kwargs = {name: _cpu_for_gpu(value) for name, value in kwargs.items()}
        return own_to(module, *map(_cpu_for_gpu, args), **kwargs)

    nn.Module.cuda = cuda  # type: ignore[assignment,method-assign]  # the point of it
    nn.Module.to = to  # type: ignore[assignment,method-assign]  # the point of it
    torch.cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed"):
        # a separate function for each: Dynamo has rules by function
        setattr(torch.cuda, name, lambda *_, **__: None)
    OnCpu().__enter__()  # type: ignore[no-untyped-call]  # torch types it not
