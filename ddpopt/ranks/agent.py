"""torch's elastic agent, in a thread and in silence.

The agent installs signal handlers where it runs in the main thread, and logs what it does. In a thread it
leaves handlers alone, and its records are dropped: who reads of a failure reads our report.

Written against torch 2.11 to 2.13. Invariant: of what is global, nothing differs after the agent has ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["Agent"]

POLL_S = 0.05
LOGGERS = "torch.distributed"
# Loggers that the agent makes when it first needs them.
LATE_LOGGERS = ("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torchelastic-events-null")
# The agent notes in the environment for which signals it would install handlers in a main thread.
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class Agent(threading.Thread):
    """Starts one process for each rank, and ends when all have ended; if one fails, it ends the others.

    Attributes:
        exit_codes: by rank, of those that did not exit with 0; known at the end.
        error: why the ranks could not be started; None if they were.
        ended: set when all this is known and no rank runs any more. ``is_alive()`` would not do: in Python
            3.11 it says no as soon as Ctrl-C has interrupted a ``join()``, though the thread runs on.
    """

    def __init__(self, command: Sequence[str], size: int, logs: Path) -> None:
        """Start nothing yet.

        Args:
            command: of each rank.
            size: how many ranks.
            logs: a folder of the agent's own, which it makes.
        """
        super().__init__(name="ddpopt-ranks", daemon=True)
        self.exit_codes: Mapping[int, int] = {}
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._command = command
        self._config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
            run_id=uuid4().hex,
            # Port 0: the store of this run listens where the system finds a free port.
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=POLL_S,
            # Never read outside of a main thread; empty where the environment has none.
            signals_to_handle=os.environ.get(SIGNALS, ""),
        )

    def run(self) -> None:
        """Run the agent."""
        try:
            self._run()
        finally:
            self.ended.set()

    def _run(self) -> None:
        entry, *arguments = self._command
        with _silence():
            try:
                elastic_launch(self._config, entry)(*arguments)
            except ChildFailedError as error:
                self.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            except BaseException as error:  # reported by whoever waits for this thread
                self.error = error
        if os.environ.get(SIGNALS) == "":
            os.environ.pop(SIGNALS, None)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what this thread tells the agent's loggers; other threads' records pass."""
    this_thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != this_thread

    known = [name for name in list(logging.root.manager.loggerDict) if name.startswith(LOGGERS)]
    loggers = [logging.getLogger(name) for name in dict.fromkeys((*known, *LATE_LOGGERS))]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
