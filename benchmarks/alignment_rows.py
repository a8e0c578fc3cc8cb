"""Rows of `benchmarks.alignment`: the judged outcomes of the ranks.

Invariant: a mode of ddpopt is judged on every rank and every iteration; torch's modes are only reported.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.alignment_run import Buckets, Outcome
from benchmarks.report import Grid, Section, at_least, at_most, ends, number
from ddpopt.gate.overlap import Measurement, ratio_to_eager

ASKED = 0.98
JUDGED = ("split", "inline")
"""ddpopt's own modes."""
UNCUT = "all layers update one tensor, so no cut is possible between its first use and its last write"
EXPECTED: Mapping[tuple[str, str], tuple[float, str]] = {
    ("split", "buffers"): (0.14, UNCUT),
    ("split", "in_place"): (0, UNCUT),
    ("split", "views_in_place"): (0, UNCUT),
    ("split", "no_grad"): (0.38, "a hook might change what the backward of earlier layers reads"),
    ("split", "experts_per_rank"): (0, "no bucket ends within the layers that this rank reads"),
}
"""By mode and case: how little overlap potential is expected, relative to eager's, and why."""


@dataclass(frozen=True)
class Cell:
    """One mode in one row.

    Attributes:
        ratio: overlap potential as a share of eager DDP's, the lowest over ranks; None if there is none.
        segments: the number of pieces the graphs were cut into, on rank 0.
        buckets: the number of buckets of the last iteration, on rank 0.
        planned: the number of planned buckets, on rank 0; None if no plan was imposed.
        crash: type of the exception, or how the process ended; empty if neither.
        problems: the requirements that the run fails; always empty for torch's modes.
        message: the message of the crash.
        expected: why a ratio below `ASKED` is expected; empty if it is not.
    """

    ratio: float | None = None
    segments: int | None = None
    buckets: int | None = None
    planned: int | None = None
    crash: str = ""
    problems: tuple[str, ...] = ()
    message: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Row:
    """One case at one cap.

    Attributes:
        case: the case's name.
        cap: MiB as text, ``"default"`` or ``"own"``.
        eager: overlap potential of eager DDP on rank 0; None if eager failed on some rank.
        eager_failure: how and why eager failed; empty if it did not.
        flops: FLOPs of eager's backward on rank 0.
        cells: the cells by mode.
    """

    case: str
    cap: str
    eager: float | None
    eager_failure: str
    flops: int
    cells: Mapping[str, Cell]


def row(case: str, cap: str, answers: Mapping[str, Sequence[Outcome]]) -> Row:
    """Judge one case at one cap.

    Args:
        case: the case's name.
        cap: the cap's name.
        answers: the outcomes of all ranks by mode, including ``"eager"``.

    Returns:
        The row; if eager itself failed, every other mode has a problem that says so.
    """
    failure = ": ".join(part for part in _crash(answers["eager"]) if part)
    eager = [None if failure else answer.measured for answer in answers["eager"]]
    cells = {mode: _cell(mode, case, found, eager) for mode, found in answers.items() if mode != "eager"}
    first = eager[0]
    return Row(case, cap, first.potential if first else None, failure, first.flops if first else 0, cells)


def difference(planned: Buckets | None, iterations: Sequence[Buckets]) -> str:
    """Find where observed buckets differ from the planned ones; empty if they do not.

    Args:
        planned: parameter names of each bucket; None if none were imposed, which is right only if there is
            always a single bucket.
        iterations: observed buckets of each iteration.

    Returns:
        A line that names the first iteration and bucket that differ.

    >>> difference((("b",), ("a",)), [(("b",), ("a",)), (("b", "a"),)])
    'iteration 1, bucket 0: planned b, observed b a'
    """
    if planned is None:
        several = [index for index, seen in enumerate(iterations) if len(seen) != 1]
        return f"iteration {several[0]}: no plan was imposed on several buckets" if several else ""
    for iteration, seen in enumerate(iterations):
        for bucket in range(max(len(planned), len(seen))):
            want, got = _names(planned, bucket), _names(seen, bucket)
            if want != got:
                return f"iteration {iteration}, bucket {bucket}: planned {want}, observed {got}"
    return ""


def section(rows: Sequence[Row], facts: Mapping[str, str]) -> Section:
    """The requirements and the results.

    Args:
        rows: the rows of all cases and caps.
        facts: the conditions.
    """
    modes = list(dict.fromkeys(mode for row in rows for mode in row.cells))
    cells = {mode: [row.cells[mode] for row in rows] for mode in modes}
    claims, where = [], f"{len(rows)} runs"
    for mode in JUDGED:
        found = _potentials([cell for cell in cells.get(mode, ()) if not cell.expected])
        failing = sum(bool(cell.problems) for cell in cells[mode]) if mode in cells else None
        what = f"{mode}: lowest overlap potential, where no less is expected"
        claims.append(at_least(where, what, min(found, default=None), ASKED, spread=ends(found)))
        claims.append(at_most(where, f"{mode}: runs that fail", failing, 0, limit=0))
    columns = ("mode", "mean", "lowest", f"at least {ASKED:g}", "runs that crash")
    grid_rows = tuple((mode, *_cells_of(cells[mode])) for mode in modes)
    grid = Grid(f"Overlap potential relative to eager DDP's, {len(rows)} runs", columns, grid_rows)
    return Section("alignment", facts, tuple(claims), (grid,))


def _potentials(cells: Sequence[Cell]) -> list[float]:
    return [cell.ratio for cell in cells if cell.ratio is not None]


def _cells_of(cells: Sequence[Cell]) -> tuple[str, str, str, str]:
    found = _potentials(cells)
    kept = sum(value >= ASKED for value in found)
    crashed = sum(bool(cell.crash) for cell in cells)
    mean = number(statistics.fmean(found) if found else None)
    return mean, number(min(found, default=None)), f"{kept} of {len(cells)}", str(crashed)


def _names(buckets: Buckets, index: int) -> str:
    return " ".join(buckets[index]) if index < len(buckets) else "none"


def _cell(mode: str, case: str, answers: Sequence[Outcome], eager: Sequence[Measurement | None]) -> Cell:
    crash, message = _crash(answers)
    asked, expected = EXPECTED.get((mode, case), (ASKED, ""))
    ratios = [] if crash else _ratios(answers, eager)
    first = answers[0]
    problems = (f"crash: {crash}: {message}",) if crash else tuple(_problems(ratios, answers, asked))
    return Cell(
        ratio=min(ratios, default=None),
        segments=first.segments,
        buckets=len(first.measured.iterations[-1]) if first.measured else None,
        planned=None if first.planned is None else len(first.planned),
        crash=crash,
        problems=problems if mode in JUDGED else (),
        message=message,
        expected=expected,
    )


def _ratios(outcomes: Sequence[Outcome], eager: Sequence[Measurement | None]) -> list[float]:
    """The ratio on each rank; empty if eager failed."""
    return [
        ratio_to_eager(outcome.measured.potential, base.potential)
        for outcome, base in zip(outcomes, eager, strict=True)
        if outcome.measured is not None and base is not None
    ]


def _crash(answers: Sequence[Outcome]) -> tuple[str, str]:
    """Kind and message of the first failure among the ranks."""
    for answer in answers:
        if answer.crash:
            return answer.crash, answer.message
    return "", ""


def _problems(ratios: Sequence[float], outcomes: Sequence[Outcome], asked: float) -> Iterator[str]:
    if not ratios:
        yield "eager DDP failed, so there is nothing to compare with"
    for rank, ratio in enumerate(ratios):
        if ratio < asked:
            yield f"rank {rank}, ratio {ratio:.4f} is below {asked}"
    for rank, outcome in enumerate(outcomes):
        differs = difference(outcome.planned, outcome.measured.buckets) if outcome.measured else ""
        if differs:
            yield f"rank {rank}, {differs}"
