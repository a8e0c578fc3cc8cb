"""The text of a self-test: who found which fault, how many of each layer, and the clean runs.

What each level had to find is in the JSON; what it overlooked stands here too, below the fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddpopt.explanation.tables import Column, Noted, paragraph, table
from ddpopt.judge.report.wording import count_of
from tests.selftest.self_test import SelfTest
from tests.selftest.trials import Found

NOBODY = "NOBODY"
NOT_INJECTED = "NOT INJECTED"


def self_test_text(result: SelfTest) -> str:
    """Write what a self-test found.

    Args:
        result: the self-test.

    Returns:
        Lines of at most 80 columns: each fault, how many were found, and the clean runs.
    """
    return "\n".join(_lines(result))


def _lines(result: SelfTest) -> Iterator[str]:
    columns = [Column("layer"), Column("fault", fills=True), Column("found by")]
    yield table(columns, [(found.layer, _fault(found), _finders(found)) for found in result.found])
    yield ""
    layers = Counter(found.layer for found in result.found)
    caught = Counter(found.layer for found in result.found if found.by)
    of_layers = ", ".join(f"{caught[layer]} of {count} in {layer}" for layer, count in layers.items())
    total = f"{caught.total()} of {count_of(layers.total(), 'fault')}"
    yield paragraph(f"{total} found on {result.world_size} ranks: {of_layers}")
    if result.left_out:
        yield paragraph(
            f"left out, for on {result.world_size} ranks it is rounding: {'; '.join(result.left_out)}"
        )
    backends = Counter(trial.backend or "not run" for trial in result.clean.trials)
    kinds = ", ".join(f"{count} {backend}" for backend, count in backends.items())
    yield paragraph(
        f"{result.clean_runs} of {count_of(len(result.clean.trials), 'clean run')} raised nothing"
        f"{f' ({kinds})' if kinds else ''}"
    )
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
