"""Inductor settings of the inline strategy, because Inductor reorders a backward freely.

Gradients must leave in the order in which autograd completes them, in their own memory
(`ddpopt.inline.lowering`); and the next process must find compiled code in the caches, including traces.

Uses private parts of torch: the options ``reorder_for_peak_memory`` and
``unsafe_marked_cacheable_functions``.
"""

import functools
import hashlib
import inspect
import sys

import torch

from ddpopt.graph.nodes import CompilerFn
from ddpopt.inline import handover
from ddpopt.inline.handover import lend


def is_inductor(compiler: CompilerFn) -> bool:
    """Whether a Dynamo backend is Inductor as torch registers it."""
    return bool(compiler is torch._dynamo.lookup_backend("inductor"))


def in_order(compiler: CompilerFn) -> CompilerFn:
    """Make Inductor hand gradients over in order, in their own memory."""
    _register_lowering()
    given = getattr(compiler, "keywords", {}).get("config_patches", {})
    cacheable = torch._inductor.config.unsafe_marked_cacheable_functions
    own = {f"{lend.__module__}.{lend.__name__}": _traced_code()}
    patches = {
        **given,
        # reordering delays any node that frees no memory immediately, such as a weight's gradient
        "reorder_for_peak_memory": False,
        "unsafe_marked_cacheable_functions": {**cacheable, **own},
    }
    return functools.partial(compiler, config_patches=patches)


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
