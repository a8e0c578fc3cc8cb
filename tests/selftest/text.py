"""The text of a self-test: which level found which fault, what each level overlooked, and the clean runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpopt.explanation.tables import Column, Noted, paragraph, table
from ddpopt.judge.report.wording import count_of

if TYPE_CHECKING:
    from tests.selftest.self_test import SelfTest
    from tests.selftest.trials import Found

REPORTERS = {
    "certificate": "the proof that a cut graph is the same program",
    "agreement": "the ranks' exchange of plans",
    "L3": "structure",
    "L0": "equality",
    "L1": "the bound on a sum over ranks",
    "L2": "the bound on compiled arithmetic",
    "run": "the step fails",
    "ranks": "a rank dies or stalls",
}
"""Who may find a fault, in the order in which they would."""
NOBODY = "NOBODY"
NOT_INJECTED = "NOT INJECTED"


def self_test_text(result: SelfTest) -> str:
    """Write what a self-test found.

    Args:
        result: the self-test.

    Returns:
        Lines of at most 80 columns: each fault, the rates by layer and by level, and the clean runs.
    """
    return "\n".join(_lines(result))


def _lines(result: SelfTest) -> Iterator[str]:
    columns = [Column("layer"), Column("fault", fills=True), Column("found by")]
    yield table(columns, [(found.layer, _fault(found), _finders(found)) for found in result.found])
    yield ""
    yield _by_layer(result.found)
    yield ""
    yield _by_level(result.found)
    yield ""
    yield from _totals(result)
    for trial in result.clean.trials:
        if trial.status != "ok":
            said = trial.reason or "; ".join(finding.message for finding in trial.findings[:2])
            yield paragraph(f"  {trial.name}: {trial.status}: {said}", "    ")


def _fault(found: Found) -> object:
    return Noted(found.fault, found.complaint) if found.complaint else found.fault


def _finders(found: Found) -> str:
    if not found.injected:
        return NOT_INJECTED
    return ", ".join(found.by) or NOBODY


def _by_layer(found: Sequence[Found]) -> str:
    """For each layer how many of its faults were found, and by whom."""
    used = [name for name in REPORTERS if any(name in one.by for one in found)]
    rows = []
    for layer in dict.fromkeys(one.layer for one in found):
        own = [one for one in found if one.layer == layer]
        counts = (sum(name in one.by for one in own) for name in used)
        rows.append((layer, len(own), sum(bool(one.by) for one in own), *(count or "-" for count in counts)))
    numbers = (Column(title, "right") for title in ("faults", "found", *used))
    return table([Column("layer"), *numbers], rows)


def _by_level(found: Sequence[Found]) -> str:
    """For each level how many faults it had to find, and which of them it overlooked."""
    rows: list[tuple[object, ...]] = []
    for name, about in REPORTERS.items():
        due = [one for one in found if one.injected and name in one.due]
        if due:
            overlooked = [one.fault for one in due if name not in one.by]
            rate = f"{100 * (len(due) - len(overlooked)) / len(due):.0f} %"
            rows.append((name, about, len(due), len(due) - len(overlooked), rate))
    columns = [Column("level"), Column("what it is", fills=True)]
    columns += [Column(title, "right") for title in ("had to find", "found", "rate")]
    return table(columns, rows)


def _totals(result: SelfTest) -> Iterator[str]:
    caught = sum(bool(found.by) for found in result.found)
    yield paragraph(
        f"{caught} of {count_of(len(result.found), 'fault')} found on {result.world_size} ranks"
        f"{_lacking(result)}"
    )
    if result.left_out:
        yield paragraph(
            f"left out, for on {result.world_size} ranks it is rounding: {'; '.join(result.left_out)}"
        )
    backends = Counter(trial.backend or "not run" for trial in result.clean.trials)
    kinds = ", ".join(f"{count} {backend}" for backend, count in backends.items())
    yield paragraph(
        f"{result.clean_runs} of {count_of(result.clean_asked, 'clean run')} raised nothing"
        f"{f' ({kinds})' if kinds else ''}"
    )


def _lacking(result: SelfTest) -> str:
    overlooked = [found for found in result.found if found.injected and found.by and found.overlooked_by]
    parts = [
        (len(result.missed), "found by nobody"),
        (len(result.not_injected), "not injected"),
        (len(overlooked), "overlooked by a level that had to find it"),
    ]
    words = [f"{count} {what}" for count, what in parts if count]
    return f"; {', '.join(words)}" if words else ""
