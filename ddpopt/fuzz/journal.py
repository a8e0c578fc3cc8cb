"""What a campaign writes down as it goes, so that an interrupted one loses nothing, and its counts.

One line of JSON for each model, written as soon as it is judged. Invariant: a campaign's summary is a
function of its journal; a last line that was cut short is as if it were not there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from ddpopt.errors import UsageError
from ddpopt.fuzz.cases import write_whole
from ddpopt.fuzz.questions import Answer, Outcome
from ddpopt.fuzz.signatures import FailureSignature

LINES = "journal.jsonl"
PLAN = "campaign.json"


@dataclass(frozen=True)
class CampaignPlan:
    """What makes two campaigns the same, but for how long they run.

    Attributes:
        seed: of all draws.
        shard: which process of several.
        modes: names of modes.
        backend: of Dynamo.
        nproc: how many ranks.
        without: features that are not drawn.
        torch: release of torch.
        draws: digest of the first models; another release of Hypothesis, or of the blocks, draws others.
    """

    seed: int
    shard: int
    modes: tuple[str, ...]
    backend: str
    nproc: int
    without: tuple[str, ...]
    torch: str
    draws: str


@dataclass(frozen=True)
class Entry:
    """One model that was judged.

    Attributes:
        place: in the sequence of models.
        seconds: how long it took.
        features: of the model.
        answers: what came of it.
    """

    place: int
    seconds: float
    features: tuple[str, ...]
    answers: tuple[Answer, ...]

    def to_line(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(replace(self, answers=tuple(replace(a, detail="") for a in self.answers))))

    @staticmethod
    def from_line(line: str) -> Entry:
        """Read what `to_line` wrote."""
        data: dict[str, Any] = json.loads(line)
        answers = tuple(
            Answer(a["mode"], Outcome(a["kind"]), a["signature"] and FailureSignature(**a["signature"]))
            for a in data["answers"]
        )
        return Entry(**{**data, "features": tuple(data["features"]), "answers": answers})


class Journal:
    """The folder of a campaign.

    Args:
        folder: made if it is not there.
        plan: of the campaign; the folder's own, if it has one, must be equal.

    Attributes:
        entries: all that was judged, in earlier runs too.

    Raises:
        UsageError: the folder belongs to another campaign, or cannot be written.
    """

    def __init__(self, folder: Path, plan: CampaignPlan) -> None:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def next_place(self) -> int:
        """The place from which the campaign resumes."""
        return max((entry.place for entry in self.entries), default=-1) + 1

    def add(self, entry: Entry) -> None:
        """Write an entry, so that it stays whatever happens next."""
        self.entries.append(entry)
        self._file.write(f"{entry.to_line()}\n")
        self._file.flush()

    def _adopt(self, plan: CampaignPlan) -> None:
        file = self.folder / PLAN
        text = json.dumps(asdict(plan), indent=2)
        if not file.exists():
            write_whole(file, text)
        try:
            theirs = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            theirs = {}  # of no campaign
        differing = [
            f"{name}: {theirs.get(name)!r} there, {ours!r} here"
            for name, ours in json.loads(text).items()
            if theirs.get(name) != ours
        ]
        if differing:
            raise UsageError(
                f"--out: {str(self.folder)!r} has another campaign ({'; '.join(differing)}); repeat its "
                "options to resume it, or name another folder"
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


@dataclass(frozen=True)
class CountedFailure:
    """A failure, and how often it was seen.

    Attributes:
        owner: the mode that it counts against, or ``"backend NAME"``.
        signature: in words.
        times: in how many models.
        first: place of the first.
    """

    owner: str
    signature: str
    times: int
    first: int


@dataclass(frozen=True)
class Summary:
    """What a campaign came to.

    Attributes:
        plan: what was run.
        models: how many were judged.
        seconds: how long, over all runs.
        kinds: for each mode how many models ended how.
        features: for each feature in how many models it was.
        failures: those of modes and of backends, the most frequent first.
        refused: what was not judged, and why: ddpopt refused, eager failed, or the judge.
    """

    plan: CampaignPlan
    models: int
    seconds: float
    kinds: Mapping[str, Mapping[str, int]]
    features: Mapping[str, int]
    failures: tuple[CountedFailure, ...]
    refused: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Models in a second."""
        return self.models / self.seconds if self.seconds else 0.0

    @property
    def distinct(self) -> int:
        """Failures that count against a mode."""
        return sum(not failure.owner.startswith("backend ") for failure in self.failures)

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return json.dumps({**asdict(self), "rate": round(self.rate, 3), "distinct": self.distinct}, indent=2)


def summarized(plan: CampaignPlan, entries: Sequence[Entry]) -> Summary:
    """Count what a journal has.

    Args:
        plan: of the campaign.
        entries: in the order in which they were written.
    """
    kinds: dict[str, Counter[str]] = {mode: Counter() for mode in plan.modes}
    times: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], int] = {}
    refused: Counter[str] = Counter()
    for entry in entries:
        failures = set()
        for answer in entry.answers:
            kinds.setdefault(answer.mode, Counter())[answer.kind] += 1
            if answer.kind in (Outcome.WRONG, Outcome.BACKEND):
                owner = f"backend {plan.backend}" if answer.kind is Outcome.BACKEND else answer.mode
                failures.add((owner, str(answer.signature)))
            elif answer.kind is not Outcome.OK:
                refused[f"{answer.mode}: {answer}"] += 1
        for failure in sorted(failures):
            times[failure] += 1
            first.setdefault(failure, entry.place)
    return Summary(
        plan=plan,
        models=len(entries),
        seconds=round(sum(entry.seconds for entry in entries), 1),
        kinds={mode: dict(counts) for mode, counts in kinds.items()},
        features=dict(Counter(feature for entry in entries for feature in entry.features).most_common()),
        failures=tuple(CountedFailure(*key, count, first[key]) for key, count in times.most_common()),
        refused=dict(refused.most_common()),
    )
