"""What a campaign writes down as it goes, so that one that was interrupted goes on and loses nothing.

One line of JSON for each model, written as soon as it is judged. Invariant: a campaign's counts are a
function of its journal; a last line that was cut short is as if it were not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ddpopt.errors import UsageError
from ddpopt.fuzz.questions import Answer, Kind
from ddpopt.fuzz.signatures import Signature
from ddpopt.fuzz.storing import write_whole

LINES = "journal.jsonl"
PLAN = "campaign.json"


@dataclass(frozen=True)
class Plan:
    """What makes two campaigns the same, but for how long they run.

    Attributes:
        seed: of all draws.
        shard: which process of several.
        workers: how many workers.
        modes: names of modes.
        backend: of Dynamo.
        nproc: how many ranks.
        without: features that are not drawn.
        blocks: modules that register blocks.
        torch: release of torch.
        draws: digest of the first models; another release of Hypothesis, or of the blocks, draws others.
    """

    seed: int
    shard: int
    workers: int
    modes: tuple[str, ...]
    backend: str
    nproc: int
    without: tuple[str, ...]
    blocks: tuple[str, ...]
    torch: str
    draws: str


@dataclass(frozen=True)
class Entry:
    """One model that was judged.

    Attributes:
        worker: whose; -1 for models that another machine found.
        place: in the worker's sequence.
        run: which of the runs that make up the campaign, from 0.
        at_s: seconds since that run began.
        features: of the model.
        answers: what came of it.
        shared: digest of the case, where another machine found the model; else empty.
    """

    worker: int
    place: int
    run: int
    at_s: float
    features: tuple[str, ...]
    answers: tuple[Answer, ...]
    shared: str = ""

    def to_line(self) -> str:
        """Return it as one line."""
        answers = [
            {"mode": a.mode, "kind": a.kind, "signature": a.signature and a.signature.to_json()}
            for a in self.answers
        ]
        return json.dumps({**asdict(self), "answers": answers})

    @staticmethod
    def from_line(line: str) -> Entry:
        """Read what `to_line` wrote."""
        data: dict[str, Any] = json.loads(line)
        answers = tuple(
            Answer(a["mode"], Kind(a["kind"]), a["signature"] and Signature(**a["signature"]))
            for a in data.pop("answers")
        )
        return Entry(**{**data, "features": tuple(data["features"])}, answers=answers)


class Journal:
    """The folder of a campaign.

    Args:
        folder: made if it is not there.
        plan: of the campaign; the folder's own, if it has one, must be equal.

    Attributes:
        entries: all that was judged, in earlier runs too.
        run: number of this run.

    Raises:
        UsageError: the folder belongs to another campaign, or cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.cases = folder / "cases"
        try:
            self.cases.mkdir(parents=True, exist_ok=True)
            self._adopt(plan)
            self.entries = list(_read(folder / LINES))
            self._file = (folder / LINES).open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--out: cannot write to {str(folder)!r}: {error.strerror}; name a folder that can be"
            ) from error
        self.run = max((entry.run for entry in self.entries), default=-1) + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def next_place(self, worker: int) -> int:
        """Where a worker goes on."""
        return max((entry.place for entry in self.entries if entry.worker == worker), default=-1) + 1

    def add(self, entry: Entry) -> None:
        """Write an entry, so that it stays whatever happens next."""
        self.entries.append(entry)
        self._file.write(f"{entry.to_line()}\n")
        self._file.flush()

    def _adopt(self, plan: Plan) -> None:
        file = self.folder / PLAN
        ours = asdict(plan) | {
            name: list(value) for name, value in vars(plan).items() if type(value) is tuple
        }
        if not file.exists():
            write_whole(file, json.dumps(ours, indent=2))
            return
        try:
            theirs = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"--out: {str(file)!r} does not say which campaign it is of ({error}); remove it, or name "
                "another folder"
            ) from error
        differing = [name for name in ours if theirs.get(name) != ours[name]]
        if differing:
            words = "; ".join(
                f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here" for name in differing
            )
            raise UsageError(
                f"--out: {str(self.folder)!r} has another campaign ({words}); repeat its options to go on "
                "with it, or name another folder"
            )


def _read(file: Path) -> Iterator[Entry]:
    if not file.exists():
        return
    data = file.read_bytes()
    whole, _, cut = data.rpartition(b"\n")
    if cut:  # the process ended while it wrote
        file.write_bytes(whole + b"\n" if whole else b"")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield Entry.from_line(line.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--out: line {number} of {str(file)!r} is none that a campaign wrote "
                f"({type(error).__name__}: {error}); remove the line, or name another folder"
            ) from error
