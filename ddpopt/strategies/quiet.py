"""Contexts that isolate planning and compiling a graph from the running program.

Uses private names of torch: those that AOTAutograd uses to record views.
Invariant: afterwards the garbage collector and torch are in the same state as before.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

_DAMAGED = ("_unsafe_view_ViewMeta", "resize__ViewMeta")
"""View operations whose sizes AOTAutograd's cache corrupts: they refer to freed memory."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector: compilation keeps its objects, and collections would walk them all.

    On a graph of 6000 nodes, collections take as long as planning itself and grow quadratically; they are 6 %
    of the time to compile a GPT of 24 layers. Without them, compilation takes a fifth more host memory.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile a graph without garbage collections, and without view records that torch would corrupt.

    Up to torch 2.13, AOTAutograd's cache stores garbage for a view of the result of a matrix product without
    bias (pytorch#185630): writing it may crash, and the next process fails when it reads it. With cuts, such
    views leave a graph. They are then recreated from sizes and strides, like views with dynamic shapes.
    """
    # imported here: planning alone needs no AOTAutograd
    from torch._functorch._aot_autograd import collect_metadata_analysis

    name = "ViewMetaSequence"  # some releases of torch do not have it, and do not miss it
    made = _undamaged(getattr(collect_metadata_analysis, name, None))
    with gc_paused(), patch.object(collect_metadata_analysis, name, made, create=True):
        yield


def _undamaged(make: Any) -> Any:
    def made(tensor: torch.Tensor) -> Any:
        sequence = make(tensor)
        return None if any(type(meta).__name__ in _DAMAGED for meta in sequence.sequence) else sequence

    return made


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Isolate planning and cutting from the running program: the garbage collector and saved tensor hooks.

    Saved tensor hooks, for instance those of a checkpoint around the forward, must not see example values.
    Where torch disables such hooks, there are none.
    """
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with gc_paused(), contextlib.nullcontext() if forbidden else hooks:
        yield
