"""Recording which graphs Dynamo compiles, through its own callbacks.

Invariant: after ``stop`` none of our callbacks is left.
"""

from contextlib import suppress
from typing import Any


class Compilations:
    """The graphs that Dynamo compiles between :meth:`start` and :meth:`stop`.

    Attributes:
        graphs: Dynamo's compile id of each (for instance ``"0/0"``), in order.
    """

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self._count_at_start = 0

    def start(self) -> None:
        """Start recording."""
        handler = _dynamo().callback_handler
        handler.register_start_callback(self._started)
        handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Stop recording; Dynamo's callbacks are as before :meth:`start`."""
        handler = _dynamo().callback_handler
        with suppress(ValueError):  # torch._dynamo.reset() removes every callback
            handler.remove_start_callback(self._started)
            handler.remove_end_callback(self._ended)

    def _started(self, _: Any) -> None:
        self._count_at_start = self._count()

    def _ended(self, arguments: Any) -> None:
        # Dynamo also calls back for frames in which it finds nothing to compile.
        if self._count() > self._count_at_start:
            self.graphs.append(arguments.compile_id)

    def _count(self) -> int:
        return int(_dynamo().utils.counters["stats"]["unique_graphs"])


def _dynamo() -> Any:
    # Imported when needed: this takes a second. Its callbacks and counters are private.
    import torch._dynamo

    return torch._dynamo
