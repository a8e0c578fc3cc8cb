"""Recording which graphs Dynamo compiles, through its own callbacks.

Invariant: after ``stop`` none of our callbacks is left.
"""

from contextlib import suppress
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters  # private, like the callbacks

LIMIT_REACHED = "Dynamo recompile limit exceeded"
"""How Dynamo's reason begins for leaving a function uncompiled that it compiled too often."""


class Compilations:
    """The graphs that Dynamo compiles between :meth:`start` and :meth:`stop`.

    Attributes:
        graphs: Dynamo's compile id of each (for instance ``"0/0"``), in order.
        given_up: how many functions Dynamo stopped compiling because it had compiled them too often; from
            then on they run uncompiled.
    """

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.given_up = 0
        self._given_up_at_start = 0
        self._count_at_start = 0

    def start(self) -> None:
        """Start recording."""
        self._given_up_at_start = _given_up()
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Stop recording; Dynamo's callbacks are as before :meth:`start`."""
        self.given_up += _given_up() - self._given_up_at_start
        with suppress(ValueError):  # torch._dynamo.reset() removes every callback
            callback_handler.remove_start_callback(self._started)
            callback_handler.remove_end_callback(self._ended)

    def _started(self, _: Any) -> None:
        self._count_at_start = self._count()

    def _ended(self, arguments: Any) -> None:
        # Dynamo also calls back for frames in which it finds nothing to compile.
        if self._count() > self._count_at_start:
            self.graphs.append(arguments.compile_id)

    @staticmethod
    def _count() -> int:
        return int(counters["stats"]["unique_graphs"])


def _given_up() -> int:
    reasons = counters["unimplemented"].items()
    return sum(count for reason, count in reasons if reason.startswith(LIMIT_REACHED))
