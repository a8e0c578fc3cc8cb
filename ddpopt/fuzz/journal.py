"""The journal of a campaign, written as it runs so that an interruption loses nothing, and its counts.

It has one line of JSON for each model, written as soon as it is judged. Invariant: a campaign's summary is a
function of its journal; a truncated last line is ignored.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddpopt.errors import NotJudgedError, UsageError, VerificationError
from ddpopt.fuzz.cases import write_whole
from ddpopt.fuzz.questions import WHOLE, Answer, Outcome
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.terminal.files import write

MOST_UNJUDGED = {Outcome.REFUSED: 0.5, Outcome.EAGER: 0.05, Outcome.BROKEN: 0.05}
"""The largest share of models that a campaign may leave unjudged, by the reason.

A mode that refuses most models has hardly been tried. Models are drawn so that eager can run them, and the
judge should fail at none; a machine that is busy for a moment may still cost one in twenty its time limit.
"""
LINES = "journal.jsonl"
PLAN = "campaign.json"


@dataclass(frozen=True)
class CampaignPlan:
    """The settings that identify a campaign, apart from its duration.

    Attributes:
        seed: the seed of all draws.
        shard: index of this process among several.
        modes: names of modes.
        backend: the Dynamo backend.
        nproc: the number of ranks.
        without: features that are not drawn.
        torch: release of torch.
        draws: digest of the first models; it changes with the release of Hypothesis and with the blocks.
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
        place: position in the sequence of models.
        seconds: how long it took.
        features: features of the model.
        answers: the answers for its modes.
    """

    place: int
    seconds: float
    features: tuple[str, ...]
    answers: tuple[Answer, ...]

    def to_line(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(replace(self, answers=tuple(replace(a, detail="") for a in self.answers))))

    @staticmethod
    def from_line(line: str) -> "Entry":
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
        folder: the folder; created if missing.
        plan: plan of the campaign; must equal the folder's plan, if it has one.

    Attributes:
        entries: everything that was judged, including earlier runs.

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
        except OSError as error:
            raise UsageError(
                f"--out: cannot write to {str(folder)!r}: {error.strerror}; name a writable folder"
            ) from error

    @property
    def next_place(self) -> int:
        """The place from which the campaign resumes."""
        return max((entry.place for entry in self.entries), default=-1) + 1

    def add(self, entry: Entry) -> None:
        """Write an entry at once."""
        write("--out", self.folder / LINES, f"{entry.to_line()}\n", "a")
        self.entries.append(entry)

    def _adopt(self, plan: CampaignPlan) -> None:
        file = self.folder / PLAN
        text = json.dumps(asdict(plan), indent=2)
        if not file.exists():
            write_whole(file, text)
        try:
            theirs = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            theirs = {}  # not of any campaign
        differing = [
            f"{name}: {theirs.get(name)!r} there, {ours!r} here"
            for name, ours in json.loads(text).items()
            if theirs.get(name) != ours
        ]
        if differing:
            raise UsageError(
                f"--out: {str(self.folder)!r} contains another campaign ({'; '.join(differing)}); repeat "
                "its options to resume it, or name another folder"
            )


def _read(file: Path) -> Iterator[Entry]:
    if not file.exists():
        return
    data = file.read_bytes()
    whole, _, cut = data.rpartition(b"\n")
    if cut:  # the process ended during the write
        file.write_bytes(whole + b"\n" if whole else b"")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield Entry.from_line(line.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--out: line {number} of {str(file)!r} was not written by a campaign "
                f"({type(error).__name__}: {error}); remove the line, or name another folder"
            ) from error


@dataclass(frozen=True)
class CountedFailure:
    """A failure, and how often it was seen.

    Attributes:
        owner: the mode that it counts against, or ``"backend NAME"``.
        signature: in words.
        times: the number of models with it.
        first: place of the first one.
    """

    owner: str
    signature: str
    times: int
    first: int


@dataclass(frozen=True)
class Summary:
    """The results of a campaign.

    Attributes:
        plan: what was run.
        models: the number of judged models.
        seconds: duration over all runs.
        kinds: for each mode, the number of models by outcome.
        features: for each feature, the number of models with it.
        failures: failures of modes and of backends, the most frequent first.
        refused: models that were not judged, with the reason: ddpopt refused, eager failed, or the judge
            failed.
        unjudged: why too few models were judged for a verdict; empty if enough were.
    """

    plan: CampaignPlan
    models: int
    seconds: float
    kinds: Mapping[str, Mapping[str, int]]
    features: Mapping[str, int]
    failures: tuple[CountedFailure, ...]
    refused: Mapping[str, int]
    unjudged: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Models per second."""
        return self.models / self.seconds if self.seconds else 0.0

    @property
    def distinct(self) -> int:
        """The number of distinct failures of what was asked about; of the backend only in mode ``whole``."""
        backends_too = WHOLE in self.plan.modes
        return sum(backends_too or not failure.owner.startswith("backend ") for failure in self.failures)

    @property
    def exit_code(self) -> int:
        """1 if a mode failed, 3 if too few models were judged, else 0."""
        if self.distinct:
            return VerificationError.exit_code
        return NotJudgedError.exit_code if self.unjudged else 0

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return json.dumps({**asdict(self), "rate": round(self.rate, 3), "distinct": self.distinct}, indent=2)


def summarized(plan: CampaignPlan, entries: Sequence[Entry]) -> Summary:
    """Count the entries of a journal.

    Args:
        plan: plan of the campaign.
        entries: the entries, in the order in which they were written.
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
        unjudged=tuple(_unjudged(kinds, len(entries))),
    )


def _unjudged(kinds: Mapping[str, Mapping[str, int]], models: int) -> Iterator[str]:
    """Say where more than the allowed share of models was not judged."""
    if models == 0:
        yield "no model was judged"
    for mode, counts in kinds.items():
        for kind, share in MOST_UNJUDGED.items():
            if counts.get(kind, 0) > share * models:
                yield f"{mode}: {counts[kind]} of {models} models: {kind}; at most {share:.0%} may be"
