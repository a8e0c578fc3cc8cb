"""What a step does instead where it cannot be captured: it runs in eager, around ``ddpopt.compile(model)``.

Invariant: the user's function runs as it is written; only calls of a DDP module go to its compiled form.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddpopt.dynamo.api import compile as ddpopt_compile
from ddpopt.graph.nodes import CompilerFn


def inline(backend: str | CompilerFn) -> Callable[[], AbstractContextManager[object]]:
    """Prepare to run steps around compiled DDP modules.

    Args:
        backend: the Dynamo backend.

    Returns:
        Makes a block in which calls of DDP modules go to their compiled forms.
    """
    own: Any = DistributedDataParallel.forward
    compiled: dict[int, Any] = {}
    running: list[Any] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # the backend looks for DDP as `self`
        if self in running:
            return own(self, *args, **kwargs)
        if id(self) not in compiled:
            compiled[id(self)] = ddpopt_compile(self, backend=backend)
        running.append(self)
        try:
            return compiled[id(self)](*args, **kwargs)
        finally:
            running.remove(self)

    return lambda: patch.object(DistributedDataParallel, "forward", forward)
