"""What pytest prints on torchrun's other ranks: nothing, unless the first rank does not know it.

The first rank reports the tests that run on ranks for all of them. Another rank has something to say only of
a test that each rank runs alone, of an error of pytest itself, or once a rank was lost.

Invariant: no failure is lost, and no exit code changes.
"""

import io
from collections.abc import Callable

import pytest


class QuietRank:
    """Keeps back what pytest prints, from its construction on, until `end`.

    Args:
        config: pytest's own.
        rank: of this process.
        is_alone: whether a rank was lost, so that the first may not report for this one.
    """

    def __init__(self, config: pytest.Config, rank: int, is_alone: Callable[[], bool]) -> None:
        self._writer = config.get_terminal_writer()
        self._shown = self._writer._file  # pytest has no public way to redirect it
        self._kept = io.StringIO()
        self._writer._file = self._kept
        self._rank = rank
        self._is_alone = is_alone
        self._is_told: set[str] = set()
        self._has_news = False

    def told(self, nodeid: str) -> None:
        """Note that the first rank reports a test for all."""
        self._is_told.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure of a test that this rank ran alone."""
        self._has_news |= report.failed and report.nodeid not in self._is_told

    def pytest_internalerror(self) -> None:
        """Note an error of pytest or of a plugin."""
        self._has_news = True

    def pytest_keyboard_interrupt(self) -> None:
        """Note that this rank was interrupted."""
        self._has_news = True

    def end(self) -> None:
        """Print what was kept back, if the first rank does not know it."""
        self._writer._file = self._shown
        if self._has_news or self._is_alone():
            self._shown.write(f"\n[rank {self._rank}] printed:\n{self._kept.getvalue()}")
            self._shown.flush()
