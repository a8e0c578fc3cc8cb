"""Inductor settings of the inline strategy, because Inductor reorders a backward freely.

Gradients must leave in the order in which autograd completes them, in their own memory
(`ddpopt.inline.lowering`); and the next process must find compiled code in the caches, including traces.
A backend of the user's may call Inductor, so it gets the settings, too: around its call, in which the
backward is then compiled as well.

Uses private parts of torch: the options ``reorder_for_peak_memory``, ``unsafe_marked_cacheable_functions``
and ``force_non_lazy_backward_lowering``, and the registry of backends.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import registry

from ddpopt.graph.nodes import CompilerFn
from ddpopt.inline import handover
from ddpopt.inline.handover import lend


def is_inductor(compiler: CompilerFn) -> bool:
    """Whether a Dynamo backend is Inductor as torch registers it."""
    return bool(compiler is torch._dynamo.lookup_backend("inductor"))


def may_call_inductor(compiler: CompilerFn) -> bool:
    """Whether a Dynamo backend is Inductor, or a function of the user's, which may call it."""
    return is_inductor(compiler) or compiler not in registry._COMPILER_FNS.values()


def in_order(compiler: CompilerFn, backend: CompilerFn) -> CompilerFn:
    """Make Inductor, where a backend calls it, hand gradients over in order, in their own memory.

    Args:
        compiler: the backend, with the mode and the options of ``torch.compile``.
        backend: the same backend without them.

    Returns:
        A Dynamo backend.
    """
    if not may_call_inductor(backend):
        return compiler
    _register_lowering()
    cacheable = torch._inductor.config.unsafe_marked_cacheable_functions
    own = {f"{lend.__module__}.{lend.__name__}": _traced_code()}
    patches = {
        # reordering delays any node that frees no memory immediately, such as a weight's gradient
        "reorder_for_peak_memory": False,
        "unsafe_marked_cacheable_functions": {**cacheable, **own},
    }
    if is_inductor(backend):
        given = getattr(compiler, "keywords", {}).get("config_patches", {})
        return functools.partial(compiler, config_patches={**given, **patches})
    return _with_settings(compiler, patches)


def _with_settings(compiler: CompilerFn, patches: dict[str, Any]) -> CompilerFn:
    """A backend that calls another one under these settings of Inductor."""

    @functools.wraps(compiler)  # with its attributes: `compile_inline` asks how it calls AOTAutograd
    def compile_in_order(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # otherwise, the backward would be compiled when it first runs, without the settings
        with (
            torch._inductor.config.patch(patches),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        ):
            compiled: Callable[..., Any] = compiler(gm, inputs)
            return compiled

    return compile_in_order


@functools.cache
def _register_lowering() -> None:
    # imported here: importing Inductor takes a second, and many users never compile with it
    from torch._inductor.lowering import register_lowering

    from ddpopt.inline import lowering

    register_lowering(lowering.TARGET, type_promotion_kind=None)(lowering.lower)


@functools.cache
def _traced_code() -> str:
    """A hash of the code that a trace of `lend` depends on; part of the key of the cache on disk."""
    modules = (handover, sys.modules["ddpopt.inline.lowering"], sys.modules[__name__])
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()
