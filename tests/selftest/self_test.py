"""Who judges the judge: every fault must be put in and found, and clean runs must raise nothing.

Invariant: everything that was asked for is counted: a fault that could not be put in, or that took its ranks
down before it ran, is no fault found, and a clean run that was not possible is not clean.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.judge.runner import verify_all
from ddpopt.judge.trials import Settings, Started, quickly
from ddpopt.judge.verdict import Status, Verdict
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.group import Ranks, under_torchrun
from ddpopt.ranks.pool import launch
from tests.selftest.clean_runs import CleanRuns
from tests.selftest.faults import Fault
from tests.selftest.trials import BACKENDS, Found, died, try_fault

FAULT_LIMIT_S = 60.0
RUN_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Tried:
    """An event: a fault has been tried."""

    index: int
    found: Found


@dataclass(frozen=True)
class SelfTest:
    """How good the verification is.

    Attributes:
        found: one entry for each fault.
        clean: the verdict over clean runs.
        world_size: how many ranks there were.
        left_out: names of faults that so many ranks cannot show.
    """

    found: tuple[Found, ...]
    clean: Verdict
    world_size: int = 2
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        faultless = not any(found.complaint for found in self.found)
        return faultless and self.clean_runs == len(self.clean.trials)

    def to_json(self) -> str:
        """Return faults, what found them, and the clean runs as a JSON object."""
        data = asdict(self) | {"right": bool(self), "clean_runs": self.clean_runs}
        data["clean"] = json.loads(self.clean.to_json())
        return json.dumps(data, indent=2)

    def __str__(self) -> str:
        """Say who found which fault and what went wrong, and count faults and clean runs."""
        faults = [f"{f.layer}: {f.fault}: {f.complaint or ', '.join(f.by)}" for f in self.found]
        left_out = [f"left out, for it is rounding on so many ranks: {name}" for name in self.left_out]
        unclean = [trial for trial in self.clean.trials if trial.status is not Status.OK]
        caught = sum(bool(found.by) for found in self.found)
        return "\n".join(
            [
                *faults,
                *left_out,
                *(f"{t.name}: {t.status}: {t.reason or t.findings[0].message}" for t in unclean),
                f"{caught} of {len(self.found)} faults found on {self.world_size} ranks",
                f"{self.clean_runs} of {len(self.clean.trials)} clean runs raised nothing",
            ]
        )

    @property
    def clean_runs(self) -> int:
        """How many clean runs ended, with nothing found."""
        return sum(trial.status is Status.OK for trial in self.clean.trials)


def self_test(
    nproc: int,
    *,
    faults: Sequence[Fault],
    clean: CleanRuns,
    on_event: Callable[[object], None] = lambda _: None,
) -> SelfTest:
    """Put every fault in, and take clean runs.

    Args:
        nproc: how many ranks to start.
        faults: the faults.
        clean: the clean runs.
        on_event: called with an event as each trial begins and ends.

    Raises:
        UsageError: there are too few ranks to disagree, or torchrun has started some already.
        InfrastructureError: no ranks could be had.
    """
    if under_torchrun():
        raise UsageError("the self-test starts ranks of its own: run it without torchrun, with --nproc N")
    if nproc < 2:
        raise UsageError(f"nproc: expected 2 or more, for ranks to disagree, got {nproc}")
    shown = [fault for fault in faults if fault.shows_on(nproc)]
    found = _Faults(shown, nproc, on_event).run()
    left_out = tuple(fault.name for fault in faults if fault not in shown)
    return SelfTest(tuple(found), _clean(clean, nproc, on_event), nproc, left_out)


def _clean(clean: CleanRuns, nproc: int, on_event: Callable[[object], None]) -> Verdict:
    all_runs = Verdict("clean runs", nproc, ())
    for backend, asked in clean.items():
        settings = Settings(BACKENDS.get(backend, backend))
        verdict = verify_all("clean runs", asked, settings, nproc=nproc, device="cpu", on_event=on_event)
        all_runs = replace(verdict, trials=(*all_runs.trials, *verdict.trials))
    return all_runs


class _Faults:
    """All faults, one after the other, in ranks that are started again after a fault took them down."""

    def __init__(self, faults: Sequence[Fault], nproc: int, on_event: Callable[[object], None]) -> None:
        self._faults = faults
        self._nproc = nproc
        self._tell = on_event
        self._done: dict[int, Found] = {}
        self._running: Started | None = None

    def run(self) -> list[Found]:
        with tempfile.TemporaryDirectory(prefix="ddpopt-faults-") as folder:
            while len(self._done) < len(self._faults):
                self._launch(Path(folder))
        return [self._done[index] for index in range(len(self._faults))]

    def _launch(self, marks: Path) -> None:
        task = (_on_rank, self._faults, tuple(self._done), marks)
        try:
            launch(*task, nproc=self._nproc, limit_s=RUN_LIMIT_S, device="cpu", on_event=self._note)
        except RanksFailed as failed:
            if self._running is None:
                raise
            index = self._running.index
            self._running = None
            words = str(failed).splitlines()[0]
            self._done[index] = died(self._faults[index], marked_in(marks, index, self._nproc), words)

    def _note(self, event: Any) -> None:
        self._running = None if isinstance(event, Tried) else event
        if isinstance(event, Tried):
            self._done[event.index] = event.found
        self._tell(event)


def _mark(marks: Path, index: int, rank: int) -> Path:
    """The file that says that a fault has run on a rank: it is there even if the rank did not live."""
    return marks / f"{index}-{rank}"


def marked_in(marks: Path, index: int, size: int) -> list[bool]:
    """Whether a fault has run, by rank."""
    return [_mark(marks, index, rank).exists() for rank in range(size)]


def _on_rank(ranks: Ranks, faults: Sequence[Fault], done: Sequence[int], marks: Path) -> None:
    with quickly():
        for index, fault in enumerate(faults):
            if index in done:
                continue
            ranks.emit(Started(index, fault.case, fault.option, fault.name))
            with ranks.limited(FAULT_LIMIT_S, fault.name):
                _, found = try_fault(ranks, fault, _mark(marks, index, ranks.rank).touch)
            ranks.emit(Tried(index, found))
