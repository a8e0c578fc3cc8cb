"""What `benchmarks.step` prints of one model: a table, and the parts of its limit in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.step_figures import Figures
from benchmarks.step_modes import INLINE
from benchmarks.step_rows import ASKED_TO_LIMIT, Row, fastest_parts, limit
from benchmarks.step_workloads import MIB, WORKLOADS

TITLES = (
    "fastest\nstep, ms",
    "median\n(quartiles)",
    "to eager",
    "to torch's",
    f"to the limit\n(asked {ASKED_TO_LIMIT:g})",
    "graphs",
    "exposed",
    "peak,\nMiB",
    "to whole's",
    "first 3\nsteps, s",
)


def table(figures: Figures, found: Sequence[Row], network: str) -> Table:
    """The table of one model.

    Args:
        figures: what was measured.
        found: its `benchmarks.step_rows.rows`.
        network: what the ranks talk over, in words.

    Returns:
        A table for the console.
    """
    result = Table(title=f"{WORKLOADS[figures.model].about}; {network}")
    result.add_column("mode", no_wrap=True)
    for title in TITLES:
        result.add_column(title, justify="right", no_wrap=True)
    for row in found:
        result.add_row(row.mode, *_cells(row))
    return result


def _cells(row: Row) -> list[str | Text]:
    missed = row.mode == INLINE and row.to_limit > ASKED_TO_LIMIT
    return [
        milliseconds(row.fastest_s),
        f"{milliseconds(row.step_s)} ({'–'.join(map(milliseconds, row.spread_s))})",
        ratio(row.to_eager),
        ratio(row.to_torch),
        Text(ratio(row.to_limit), style="red" if missed else ""),
        "–" if row.graphs is None else str(row.graphs),
        percent(row.exposed),
        f"{row.peak_bytes / MIB:.1f}",
        ratio(row.to_whole_peak),
        f"{row.first_steps_s:.1f}",
    ]


def parts_line(figures: Figures) -> str:
    """The limit and its parts, in words."""
    parts = fastest_parts(figures)
    sent = sum(figures.bucket_bytes) / MIB
    return (
        f"physical limit {milliseconds(limit(parts))} ms: forward {milliseconds(parts['forward'])}, "
        f"backward {milliseconds(parts['backward'])}, "
        f"first bucket after {percent(parts['first_bucket'])} of it, "
        f"all-reduce of {sent:.1f} MiB in {len(figures.bucket_bytes)} buckets {milliseconds(parts['comm'])}, "
        f"of the last one {milliseconds(parts['last_bucket'])}, update {milliseconds(parts['update'])}"
    )


def milliseconds(value_s: float) -> str:
    """Seconds as whole milliseconds."""
    return f"{1000 * value_s:.0f}"


def ratio(value: float | None) -> str:
    """A ratio, or a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    """A share, or a dash where there is none.

    >>> percent(0.256)
    '26 %'
    """
    return "–" if share is None else f"{100 * share:.0f} %"
