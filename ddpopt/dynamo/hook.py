"""The one hook in Dynamo: when it would build torch's DDPOptimizer, ask first whose backend is compiling.

While a DDP module's forward runs, Dynamo wraps every backend in ``DDPOptimizer`` and would cut the graph a
second time. The hook takes the place of that class for as long as somebody wants to be asked. Inside
`replacing` it turns any backend into ddpopt's; who chooses nothing leaves a backend to torch.

Invariant: importing this changes nothing, and with the last chooser the hook is gone.

Touches a private name of torch 2.11 to 2.13: ``torch._dynamo.backends.distributed.DDPOptimizer``, looked up
and built in ``torch/_dynamo/convert_frame.py`` with ``bucket_bytes_cap`` and ``backend_compile_fn``, of which
only ``compile_fn`` is used.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._dynamo.backends import distributed
from torch._dynamo.backends.distributed import DDPOptimizer

__all__ = ["DDPOptimizer", "install", "replacing"]

Compiler = Callable[..., Any]
Chooser = Callable[[Compiler], "Compiler | None"]
"""Given a backend: what is to compile in place of torch's optimizer, or None to let torch's do it."""


_choosers: list[Chooser] = []


def _build(*args: Any, **kwargs: Any) -> object:
    """What Dynamo calls in place of the class; an object that is not built skips the checks of its caps."""
    compiler = kwargs["backend_compile_fn"] if "backend_compile_fn" in kwargs else args[1]
    for choose in _choosers[::-1]:  # a choice may make a backend, or free one
        chosen = choose(compiler)
        if chosen is not None:
            return SimpleNamespace(compile_fn=chosen)  # Dynamo only ever calls this
    return DDPOptimizer(*args, **kwargs)


_hook = patch.object(distributed, "DDPOptimizer", _build)


def install(choose: Chooser) -> Callable[[], None]:
    """Have `choose` asked, before those installed earlier, whenever Dynamo is about to build a DDPOptimizer.

    Returns:
        To be called once, when it is to be asked no longer.
    """
    if not _choosers:
        _hook.start()
    _choosers.append(choose)
    return functools.partial(_remove, choose)


def _remove(choose: Chooser) -> None:
    _choosers.remove(choose)
    if not _choosers:
        _hook.stop()


@contextlib.contextmanager
def replacing(choose: Chooser) -> Iterator[None]:
    """Like `install`, for the length of a ``with`` block."""
    remove = install(choose)
    try:
        yield
    finally:
        remove()
