"""The text of a self-test: which level found which fault, and how many clean runs there were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpopt.report.tables import Column, paragraph, table
from ddpopt.report.wording import count_of

if TYPE_CHECKING:
    from ddpopt.verify.self_test import SelfTest

LEVELS = ("certificate", "agreement", "L3", "L0", "L1", "L2", "run", "refused", "ranks")
"""What may find a fault, in the order in which it would."""


def self_test_text(result: SelfTest) -> str:
    """Write what a self-test found.

    Args:
        result: the self-test.

    Returns:
        Lines of at most 80 columns: each fault, the rate of each level, and the clean runs.
    """
    return "\n".join(_lines(result))


def _lines(result: SelfTest) -> Iterator[str]:
    columns = [Column("layer"), Column("fault", fills=True), Column("found by")]
    yield table(columns, [(f.layer, f.fault, ", ".join(f.by) or "NOTHING") for f in result.found])
    yield ""
    yield _rates(result)
    yield ""
    caught = len(result.found) - len(result.missed)
    yield paragraph(
        f"{caught} of {count_of(len(result.found), 'fault')} found on {result.world_size} ranks; "
        f"{result.clean_runs} of {count_of(result.clean_asked, 'clean run')} raised nothing"
    )
    for trial in result.clean.trials:
        if trial.status != "ok":
            said = trial.reason or "; ".join(finding.message for finding in trial.findings[:2])
            yield paragraph(f"  {trial.name}: {trial.status}: {said}", "    ")


def _rates(result: SelfTest) -> str:
    """For each layer, how many of its faults each level found."""
    layers = list(dict.fromkeys(found.layer for found in result.found))
    used = [level for level in LEVELS if any(level in found.by for found in result.found)]
    rows = []
    for layer in layers:
        own = [found for found in result.found if found.layer == layer]
        counts = [sum(level in found.by for found in own) for level in used]
        rows.append((layer, f"{sum(bool(found.by) for found in own)}/{len(own)}", *counts))
    columns = [Column("layer"), Column("found", "right"), *(Column(level, "right") for level in used)]
    return table(columns, rows)
