"""What the inline strategy asks of Inductor, which schedules a backward as it sees fit.

Three things: that the gradients leave in the order in which autograd completes them; that the memory of a
gradient is left alone once it was handed over, so that it need not be copied; and that what was compiled is
found again by the next process, traces and all.

Touches private parts of torch 2.11 to 2.13: ``torch._inductor.lowering`` (an entry for our own operator),
``V.graph.never_reuse_buffers``, and the option ``unsafe_marked_cacheable_functions``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ddpopt import handover
from ddpopt.handover import GIVEN, lend
from ddpopt.segments import CompilerFn


def is_inductor(compiler: CompilerFn) -> bool:
    """Whether a Dynamo backend is Inductor as torch registers it."""
    return bool(compiler is torch._dynamo.lookup_backend("inductor"))


def in_order(compiler: CompilerFn) -> CompilerFn:
    """Inductor, made to hand gradients over in order, and for good."""
    _register_lowering()
    given = getattr(compiler, "keywords", {}).get("config_patches", {})
    patches = {
        **given,
        # its search for a better order puts off whatever frees no memory at once, such as a weight's gradient
        "reorder_for_peak_memory": False,
        "unsafe_marked_cacheable_functions": {
            **torch._inductor.config.unsafe_marked_cacheable_functions,
            f"{lend.__module__}.{lend.__name__}": _traced_code(),
        },
    }
    return functools.partial(compiler, config_patches=patches)


@functools.cache
def _traced_code() -> str:
    """What a trace of `lend` and its code depend on; part of the key under which they are kept on disk."""
    sources = map(inspect.getsource, (handover, sys.modules[__name__]))
    return hashlib.sha256("".join(sources).encode()).hexdigest()


@functools.cache
def _register_lowering() -> None:
    # imported here: Inductor takes a second to import, and many never compile with it
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    target = torch.ops.ddpopt.hand_over.default
    fall_back: Any = lowering.fallback_handler(target, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    def lower(gradients: Sequence[Any], ticket: Any, slots: Sequence[int], memory: Sequence[int]) -> Any:
        # what is protected is what is handed over
        handed: list[Any] = [ir.ExternKernel.realize_input(gradient) for gradient in gradients]
        given = _last_uses(V.graph.current_node)
        uses = [GIVEN if last else use for last, use in zip(given, memory, strict=True)]
        token = fall_back(handed, ticket, slots, uses)
        V.graph.never_reuse_buffers.update(gradient.get_name() for gradient in handed)
        return token

    lowering.register_lowering(target, type_promotion_kind=None)(lower)


def _last_uses(call: fx.Node) -> list[bool]:
    """For each gradient that `call` hands over: whether nothing else in the graph reads its memory."""
    gradients: Any = call.args[0]
    count = Counter(gradients)
    return [count[gradient] == 1 and _is_last_use(gradient) for gradient in gradients]


def _is_last_use(value: Any) -> bool:
    """Whether a value has one reader, and its memory none besides."""
    while isinstance(value, fx.Node) and len(value.users) == 1 and value.op == "call_function":
        maker = value.args[0] if value.target is operator.getitem else value
        if not isinstance(maker, fx.Node) or not isinstance(maker.target, torch._ops.OpOverload):
            return False
        if not any(result.alias_info for result in maker.target._schema.returns):
            return True
        value = value.args[0] if maker is value else None  # a view's base; a piece of one has its siblings
    return False
