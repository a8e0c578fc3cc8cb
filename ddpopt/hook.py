"""The one hook in Dynamo: when it would build torch's DDPOptimizer, ask first whose backend is compiling.

While a DDP module's forward runs, Dynamo wraps every backend in ``DDPOptimizer`` and would cut the graph a
second time. The hook is a ``__new__`` on that class. It is inert for every backend but ddpopt's own, and
inside `replacing` it turns any backend into ddpopt's.

Touches a private name of torch 2.11 to 2.13: ``torch._dynamo.backends.distributed.DDPOptimizer``, built in
``torch/_dynamo/convert_frame.py`` with ``bucket_bytes_cap`` and ``backend_compile_fn``, of which only
``compile_fn`` is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo.backends.distributed import DDPOptimizer

Compiler = Callable[..., Any]
Chooser = Callable[[Compiler], "Compiler | None"]
"""Given a backend: what is to compile in place of torch's optimizer, or None to let torch's do it."""


@dataclass(frozen=True)
class _Chosen:
    """Stands in for a DDPOptimizer; Dynamo only ever calls `compile_fn`."""

    compile_fn: Compiler


def install(choose: Chooser) -> None:
    """Have `choose` asked from now on whenever Dynamo is about to build a DDPOptimizer."""

    def new(cls: type, *args: Any, **kwargs: Any) -> object:
        compiler = kwargs["backend_compile_fn"] if "backend_compile_fn" in kwargs else args[1]
        chosen = choose(compiler)
        return object.__new__(cls) if chosen is None else _Chosen(chosen)

    # an object that is no DDPOptimizer skips that class's __init__, and with it its checks
    DDPOptimizer.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def replacing(choose: Chooser) -> Iterator[None]:
    """Like `install`, for the length of a ``with`` block."""
    before = DDPOptimizer.__dict__.get("__new__")
    install(choose)
    try:
        yield
    finally:
        if before is None:  # without any __new__ again, the class would refuse all arguments: a CPython quirk
            install(lambda _: None)
        else:
            DDPOptimizer.__new__ = before  # type: ignore[method-assign]
