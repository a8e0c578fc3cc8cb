"""Does the compiled backward keep what eager DDP hides? ``python -m benchmarks.alignment``.

For every case of the corpus at several bucket caps: the overlap potential (`ddpopt.gate.potential`) of ddpopt
and of torch's own DDPOptimizer as a ratio to eager DDP on the same case and cap, and whether DDP reduced
exactly the planned buckets in every iteration.

Exit code 1 where a run of ddpopt crashes, keeps less than 0.98 of eager's potential (except in the cases of
`benchmarks.alignment_rows.EXPECTED`), or reduces other buckets than planned; 2 for invalid arguments.
No clock is read, so concurrent runs do not disturb each other.
"""

import argparse
import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.alignment_rows import ASKED, JUDGED, Cell, Row, row, section
from benchmarks.alignment_run import MODES, Outcome, Run, caps_of
from benchmarks.report import conditions, finish, parser_of, show_grid, state, wide_console
from ddpopt.cases.corpus import cases
from ddpopt.errors import UsageError
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.pool import Pool
from ddpopt.testing import resolve

CAPS = "0.3,1,2.5,default"


def main() -> int:
    """Measure, print, store.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args()
    console = wide_console()
    try:
        names = arguments.cases or tuple(case.name for case in cases())
        runs = [(name, cap) for name in names for cap in caps_of(resolve(name), arguments.caps)]
    except UsageError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    facts = conditions("benchmarks.alignment")
    state(console, facts)
    rows = _measure_all(runs, arguments, console)
    console.print(_table(rows, arguments.modes))
    for line in _closing(rows):
        console.print(line, markup=False)
    report = section(rows, facts)
    show_grid(console, report.grids[0])
    return finish(console, report, arguments, [asdict(found) for found in rows], {})


def _measure_all(
    runs: Sequence[tuple[str, str]], arguments: argparse.Namespace, console: Console
) -> list[Row]:
    """All rows, in the order of `runs`; one row at a time for each pool of ranks."""
    pools: queue.SimpleQueue[Pool] = queue.SimpleQueue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as opened:
        count = max(1, arguments.jobs // arguments.nproc)
        for _ in range(count):
            pools.put(opened.enter_context(Pool(arguments.nproc)))
        threads = opened.enter_context(ThreadPoolExecutor(count))
        progress = opened.enter_context(Progress(*columns, console=console))
        task = progress.add_task("cases x caps", total=len(runs))
        futures = [threads.submit(_row_in_a_pool, pools, arguments, case, cap) for case, cap in runs]
        for future in as_completed(futures):
            progress.console.print(_line(future.result()), markup=False, highlight=False)
            progress.advance(task)
        return [future.result() for future in futures]


def _row_in_a_pool(pools: queue.SimpleQueue[Pool], arguments: argparse.Namespace, case: str, cap: str) -> Row:
    pool = pools.get()
    try:
        runs = {mode: Run(case, cap, mode, arguments.backend) for mode in ("eager", *arguments.modes)}
        return row(case, cap, {mode: _outcomes(pool, run, arguments.limit) for mode, run in runs.items()})
    finally:
        pools.put(pool)


def _outcomes(pool: Pool, run: Run, limit_s: float) -> list[Outcome]:
    """The outcome on each rank; a rank that dies or hangs is a crash of the mode."""
    try:
        return pool.run(run, limit_s=limit_s)
    except RanksFailed as failed:
        return [Outcome(None, crash=_in_short(failed), message=str(failed))] * pool.size


def _in_short(failed: RanksFailed) -> str:
    one = failed.culprits[0]
    return f"rank {one.rank} {one.kind}" + (f" of {one.signal}" if one.signal else "")


def _line(found: Row) -> str:
    """One finished row, for the progress display."""
    cells = (f"{mode} {_ratio(cell)}{' !' if cell.problems else ''}" for mode, cell in found.cells.items())
    return f"{found.case} at {found.cap}: {', '.join(cells)}"


def _table(rows: Sequence[Row], modes: Sequence[str]) -> Table:
    table = Table(title="Overlap potential as a share of eager DDP's")
    table.add_column("case", no_wrap=True)
    table.add_column("cap, MiB", no_wrap=True)
    table.add_column("eager's own", justify="right")
    for mode in modes:
        table.add_column(mode, justify="right")
        table.add_column("segments", justify="right")
        table.add_column("planned = observed" if mode in JUDGED else "buckets", justify="right")
    for found in rows:
        eager = "failed" if found.eager is None else f"{found.eager:.3f}"
        cells = (text for mode in modes for text in _texts(mode, found.cells[mode]))
        table.add_row(found.case, found.cap, eager, *cells)
    return table


def _texts(mode: str, cell: Cell) -> tuple[str, str, str]:
    style = "[red]{}[/red]" if cell.problems else "{}"
    return style.format(_ratio(cell)), _number(cell.segments), _agreement(mode, cell)


def _agreement(mode: str, cell: Cell) -> str:
    if mode not in JUDGED or cell.buckets is None:
        return _number(cell.buckets)
    differs = any("bucket" in problem for problem in cell.problems)
    return f"{_number(cell.planned)} {'≠' if differs else '='} {cell.buckets}"


def _ratio(cell: Cell) -> str:
    if cell.crash:
        return f"crash: {cell.crash}"
    return _number(None) if cell.ratio is None else f"{cell.ratio:.3f}"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _closing(rows: Sequence[Row]) -> Iterator[str]:
    """Every problem, and every ratio that is low as expected."""
    for found in rows:
        if found.eager_failure:
            yield f"{found.case} at {found.cap}, eager DDP itself failed: {found.eager_failure}"
        for mode, cell in found.cells.items():
            yield from (f"{found.case} at {found.cap}, {mode}: {problem}" for problem in cell.problems)
            if cell.expected and cell.ratio is not None and cell.ratio < ASKED:
                yield f"{found.case} at {found.cap}, {mode}: {_ratio(cell)}, as expected: {cell.expected}"
    silent = sorted({found.case for found in rows if found.eager is not None and not found.flops})
    if silent:
        yield f"no FLOP is counted in the backward of {', '.join(silent)}: the ratio is 1 by definition"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.alignment", __doc__)
    names = partial(str.split, sep=",")
    parser.add_argument("--cases", type=names, help="names or package.module:name (default: the corpus)")
    parser.add_argument("--caps", type=_caps, default=_caps(CAPS), help=f"caps: MiB, default, own ({CAPS})")
    modes = "torch,split,inline"
    parser.add_argument(
        "--modes", type=_modes, default=_modes(modes), help=f"{modes.replace(',', ', ')}, whole"
    )
    parser.add_argument("--backend", default="aot_eager", help="name of a Dynamo backend (aot_eager)")
    parser.add_argument("--nproc", type=int, default=1, choices=range(1, 9), help="ranks (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at the same time (2)")
    parser.add_argument("--limit", type=float, default=300.0, help="time limit of one run, in seconds (300)")
    return parser


def _caps(text: str) -> tuple[str, ...]:
    """Checked here, because a cap that is not a number would look like a crash of every mode."""
    caps = tuple(text.split(","))
    for cap in caps:
        if cap not in ("default", "own") and not float(cap) > 0:
            raise argparse.ArgumentTypeError(f"expected a size in MiB, 'default' or 'own', got {cap!r}")
    return caps


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    unknown = [mode for mode in modes if mode not in MODES or mode == "eager"]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of torch, split, inline, whole, got {unknown[0]!r}")
    return modes


if __name__ == "__main__":
    sys.exit(main())
