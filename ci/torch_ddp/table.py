"""The results of torch's tests: which pass, which fail, and which only ddpopt fails.

Invariant: a test counts for a compiled mode only if eager passes it with the same caps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

EAGER, WHOLE, OPTIMIZER, SPLIT, INLINE = "eager", "whole graph", "DDPOptimizer", "split", "inline"
THEIRS, OURS = (WHOLE, OPTIMIZER), (SPLIT, INLINE)
MODES = (EAGER, *THEIRS, *OURS)
SHOWN_CHARACTERS = 160

Ending = Literal["passed", "failed", "skipped", "timed out"]


@dataclass(frozen=True)
class Job:
    """One run of a test.

    Attributes:
        test: its name.
        mode: how its DDP modules are compiled.
        small: whether they have the small cap instead of the test's own.
    """

    test: str
    mode: str
    small: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        ending: the ending, in a word.
        builds: whether a DDP module was built.
        graphs: whether Dynamo compiled a graph.
        seconds: how long it took.
        message: why it did not pass; empty if it did.
    """

    ending: Ending
    builds: bool = True
    graphs: bool = True
    seconds: float = 0.0
    message: str = ""

    @property
    def judges(self) -> bool:
        """Whether a test with this ending in eager says anything about compiled modes."""
        return self.builds and self.ending == "passed"


@dataclass(frozen=True)
class Accepted:
    """The reason why a test may fail only under ddpopt.

    Attributes:
        where: a part of the failure's message; other failures of the test are not accepted.
        reason: the behavior of eager there, and why it is not wanted.
    """

    where: str
    reason: str


Outcomes = Mapping[Job, Outcome]
Reasons = Mapping[str, Accepted]


def judged(outcomes: Outcomes, small: bool) -> list[str]:
    """The tests that build a DDP module and pass in eager, with these caps."""
    eager = {job.test: run for job, run in outcomes.items() if job.mode == EAGER and job.small == small}
    return sorted(test for test, outcome in eager.items() if outcome.judges)


def only_by_us(outcomes: Outcomes, small: bool) -> dict[str, list[str]]:
    """The tests that eager and one of torch's modes pass, with the ddpopt strategies that fail."""

    def endings(test: str, modes: tuple[str, ...]) -> dict[str, bool]:
        runs = {mode: outcomes.get(Job(test, mode, small)) for mode in modes}
        return {mode: run.ending == "passed" for mode, run in runs.items() if run is not None}

    found = {}
    for test in judged(outcomes, small):
        ours = [mode for mode, passed in endings(test, OURS).items() if not passed]
        if ours and any(endings(test, THEIRS).values()):
            found[test] = ours
    return found


def unaccepted(outcomes: Outcomes, accepted: Reasons) -> list[str]:
    """The tests that only ddpopt fails, without an accepted reason."""
    return sorted(
        {
            test
            for small in (False, True)
            for test, modes in only_by_us(outcomes, small).items()
            if not _is_accepted(outcomes, small, test, modes, accepted)
        }
    )


def _is_accepted(outcomes: Outcomes, small: bool, test: str, modes: list[str], accepted: Reasons) -> bool:
    messages = [outcomes[Job(test, mode, small)].message for mode in modes]
    return test in accepted and all(accepted[test].where in message for message in messages)


def table(outcomes: Outcomes, accepted: Reasons, small_cap_mb: float) -> str:
    """The results in Markdown: counts for each mode, tests that a compiled mode fails, and the reasons."""
    caps = {False: "the test's", True: f"{small_cap_mb:g} MiB"}
    parts = [_counts(outcomes, caps), _failures(outcomes, accepted, caps), _reasons(outcomes, accepted)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _counts(outcomes: Outcomes, caps: Mapping[bool, str]) -> Iterator[str]:
    yield "| caps | mode | passed | failed | failed only with ddpopt | passed, but nothing was compiled |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for small, name in caps.items():
        tests, alone = judged(outcomes, small), only_by_us(outcomes, small)
        for mode in MODES:
            runs = [outcomes[job] for test in tests if (job := Job(test, mode, small)) in outcomes]
            passed = [run for run in runs if run.ending == "passed"]
            ours = sum(mode in modes for modes in alone.values()) if mode in OURS else ""
            plain = sum(not run.graphs for run in passed) if mode != EAGER else ""
            if runs:
                yield f"| {name} | {mode} | {len(passed)} | {len(runs) - len(passed)} | {ours} | {plain} |"


def _failures(outcomes: Outcomes, accepted: Reasons, caps: Mapping[bool, str]) -> Iterator[str]:
    rows = []
    for small, name in caps.items():
        alone = only_by_us(outcomes, small)
        for test in judged(outcomes, small):
            runs = {mode: outcomes.get(Job(test, mode, small)) for mode in MODES}
            bad = {mode: run for mode, run in runs.items() if run and run.ending != "passed"}
            if bad:
                modes = alone.get(test, [])
                fine = _is_accepted(outcomes, small, test, modes, accepted)
                ours = "" if not modes else "accepted" if fine else "**yes**"
                shown = [*modes, *bad][0]
                why = f"{shown}: {_last_line(bad[shown].message)}"
                rows.append(f"| {name} | `{test}` | {', '.join(bad)} | {ours} | {why} |")
    if rows:
        yield from ("| caps | failed | by | only by ddpopt | why |", "| --- | --- | --- | --- | --- |", *rows)


def _last_line(message: str) -> str:
    lines = message.strip().splitlines() or [""]
    return lines[-1].replace("|", "\\|")[:SHOWN_CHARACTERS]


def _reasons(outcomes: Outcomes, accepted: Reasons) -> Iterator[str]:
    found = {test for small in (False, True) for test in only_by_us(outcomes, small)}
    for test in sorted(found & accepted.keys()):
        yield f"- `{test}` fails only with ddpopt because {accepted[test].reason}"
