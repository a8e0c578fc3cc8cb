"""What a step does instead where it cannot be captured: it runs in eager, around ``ddpopt.compile(model)``.

Invariant: the user's function runs as it is written; only calls of a DDP module go to its compiled form.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddpopt.dynamo.api import compile as ddpopt_compile
from ddpopt.graph.nodes import CompilerFn


class Inline:
    """Runs a step around compiled DDP modules.

    Args:
        backend: the Dynamo backend.
    """

    def __init__(self, backend: str | CompilerFn) -> None:
        self._backend = backend
        self._compiled: dict[int, Any] = {}
        self._running: list[Any] = []

    @contextlib.contextmanager
    def calls_compiled(self) -> Iterator[None]:
        """In this block calls of DDP modules go to their compiled forms."""
        with patch.object(
            DistributedDataParallel, "forward", _forward(self, DistributedDataParallel.forward)
        ):
            yield

    def run(self, ddp: Any, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the compiled form of a DDP module, which calls its own forward."""
        if ddp in self._running:
            return own(ddp, *args, **kwargs)
        if id(ddp) not in self._compiled:
            self._compiled[id(ddp)] = ddpopt_compile(ddp, backend=self._backend)
        self._running.append(ddp)
        try:
            return self._compiled[id(ddp)](*args, **kwargs)
        finally:
            self._running.remove(ddp)


def _forward(inline: Inline, own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # the backend looks for DDP as `self`
        return inline.run(self, own, args, kwargs)

    return forward
