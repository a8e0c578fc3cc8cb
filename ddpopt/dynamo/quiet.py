"""The quiet in which a graph is planned and compiled, apart from what runs.

Touches private names of torch 2.11 to 2.13: those by which AOTAutograd remembers views.
Invariant: afterwards the collector runs, or rests, as before, and torch is as it was.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

_DAMAGED = ("_unsafe_view_ViewMeta", "resize__ViewMeta")
"""Ways to take a view whose sizes AOTAutograd's cache damages: they refer to what is gone by then."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector: what compiling makes stays, and each collection would walk all of it.

    On a graph of 6000 nodes collections take as long as planning itself, and grow as its square; of the time
    to compile a GPT of 24 layers they are 6 %. Without them it takes a fifth more of the host's memory.
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
    """Compile a graph: without collections, and without a memory of views that torch would damage.

    Up to torch 2.13 AOTAutograd's cache keeps garbage for a view of what a matrix product without bias
    returns (pytorch#185630): writing it may crash, and the next start fails on what it reads. Cuts let such
    views leave a graph. They are made from sizes and strides then, as are those of dynamic shapes.
    """
    # imported here: who plans alone needs no AOTAutograd
    from torch._functorch._aot_autograd import collect_metadata_analysis

    remembered: Any = collect_metadata_analysis
    with gc_paused(), contextlib.ExitStack() as stack:
        if hasattr(remembered, "ViewMetaSequence"):
            stack.enter_context(patch.object(remembered, "ViewMetaSequence", _undamaged(remembered)))
        yield


def _undamaged(remembered: Any) -> Any:
    make = remembered.ViewMetaSequence

    def made(tensor: torch.Tensor) -> Any:
        sequence = make(tensor)
        return None if any(type(meta).__name__ in _DAMAGED for meta in sequence.sequence) else sequence

    return made


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep what is planned and cut apart from what runs: the collector, and hooks on saved tensors.

    Such hooks, those of a checkpoint around the forward for instance, are not to see example values. Where
    torch forbids such hooks, there are none.
    """
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    with gc_paused(), contextlib.nullcontext() if forbidden else hooks:
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
