"""The only hook in Dynamo: before it builds torch's DDPOptimizer, check whose backend is compiling.

While a DDP module's forward runs, Dynamo wraps every backend in ``DDPOptimizer`` and would cut the graph a
second time. The hook replaces that class as long as any chooser is installed. Inside `replacing` it turns
any backend into ddpopt's; a chooser that returns None leaves a backend to torch.

Invariant: importing this changes nothing, and the hook is removed with the last chooser.

Uses a private name of torch: ``torch._dynamo.backends.distributed.DDPOptimizer``, looked up
and built in ``torch/_dynamo/convert_frame.py`` with ``bucket_bytes_cap`` and ``backend_compile_fn``. Dynamo
uses only its ``compile_fn``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._dynamo.backends import distributed
from torch._dynamo.backends.distributed import DDPOptimizer

__all__ = ["DDPOptimizer", "add_chooser", "replacing"]

Compiler = Callable[..., Any]
Chooser = Callable[[Compiler], "Compiler | None"]
"""Given a backend, returns the compiler to use instead of torch's optimizer, or None to use torch's."""


_choosers: list[Chooser] = []


def _build(bucket_bytes_cap: int, backend_compile_fn: Compiler, *args: Any, **kwargs: Any) -> object:
    """Dynamo calls this instead of the class; without an instance, the class's checks of caps are skipped."""
    for choose in _choosers[::-1]:  # a copy: a choice may create a backend, or free one
        chosen = choose(backend_compile_fn)
        if chosen is not None:
            return SimpleNamespace(compile_fn=chosen)  # Dynamo uses nothing else
    return DDPOptimizer(bucket_bytes_cap, backend_compile_fn, *args, **kwargs)


_hook = patch.object(distributed, "DDPOptimizer", _build)


def add_chooser(choose: Chooser) -> Callable[[], None]:
    """Call `choose`, before choosers installed earlier, whenever Dynamo is about to build a DDPOptimizer.

    Returns:
        A function that removes `choose`; call it once.
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
    """Like `add_chooser`, for the duration of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        stack.callback(add_chooser(choose))
        yield
