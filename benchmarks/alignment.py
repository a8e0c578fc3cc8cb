"""Does the compiled backward keep what eager DDP hides? ``python -m benchmarks.alignment``.

For every case of the corpus at several bucket caps: the overlap potential (`ddpopt.gate.potential`) of ddpopt
and of torch's own DDPOptimizer as a ratio to eager DDP on the same case and cap, and whether DDP reduced
exactly the planned buckets in every iteration.

Exit code 1 where a run of ddpopt crashes, keeps less than 0.98 of eager's potential, or reduces other buckets
than planned; 2 for arguments that cannot be. No clock is read, so two runs at once disturb nothing.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.alignment_rows import JUDGED, Cell, Row, row, summary
from benchmarks.alignment_run import MODES, Run, caps_of
from benchmarks.lanes import Lane
from benchmarks.report import conditions, state, wide_console
from ddpopt.cases.corpus import cases
from ddpopt.errors import UsageError
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
    for line in _closing(rows, arguments.modes):
        console.print(line, markup=False)
    if arguments.json:
        document = {"conditions": facts, "rows": [asdict(found) for found in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return int(any(cell.problems for found in rows for cell in found.cells.values()))


def _measure_all(
    runs: Sequence[tuple[str, str]], arguments: argparse.Namespace, console: Console
) -> list[Row]:
    """All rows, in the order of `runs`, as many at once as there are lanes."""
    lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    opened = [
        Lane(arguments.nproc, arguments.limit) for _ in range(max(1, arguments.jobs // arguments.nproc))
    ]
    for lane in opened:
        lanes.put(lane)
    measure_row = partial(_row_in_lane, lanes, tuple(arguments.modes), arguments.backend)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with ThreadPoolExecutor(len(opened)) as pool, Progress(*columns, console=console) as progress:
            task = progress.add_task("cases x caps", total=len(runs))
            futures = [pool.submit(measure_row, case, cap) for case, cap in runs]
            for future in as_completed(futures):
                progress.console.print(_line(future.result()), markup=False, highlight=False)
                progress.advance(task)
            return [future.result() for future in futures]
    finally:
        for lane in opened:
            lane.close()


def _row_in_lane(
    lanes: queue.SimpleQueue[Lane], modes: Sequence[str], backend: str, case: str, cap: str
) -> Row:
    lane = lanes.get()
    try:
        answers = {mode: lane.run(Run(case, cap, mode, backend)) for mode in ("eager", *modes)}
    finally:
        lanes.put(lane)
    return row(case, cap, answers)


def _line(found: Row) -> str:
    """One finished row, for the display while it runs."""
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


def _closing(rows: Sequence[Row], modes: Sequence[str]) -> Iterator[str]:
    """Every problem, then one line for each mode."""
    for found in rows:
        if found.eager_failure:
            yield f"{found.case} at {found.cap}, eager DDP itself failed: {found.eager_failure}"
        for mode, cell in found.cells.items():
            yield from (f"{found.case} at {found.cap}, {mode}: {problem}" for problem in cell.problems)
    silent = sorted({found.case for found in rows if found.eager is not None and not found.flops})
    if silent:
        yield f"no FLOP is counted in the backward of {', '.join(silent)}: the ratio is 1 by definition"
    yield from (summary(rows, mode) for mode in modes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alignment", description=__doc__)
    names = partial(str.split, sep=",")
    parser.add_argument("--cases", type=names, help="names or package.module:name (default: the corpus)")
    parser.add_argument("--caps", type=_caps, default=_caps(CAPS), help=f"MiB, default, own ({CAPS})")
    modes = "torch,split,inline"
    parser.add_argument(
        "--modes", type=_modes, default=_modes(modes), help=f"{modes.replace(',', ', ')}, whole"
    )
    parser.add_argument("--backend", default="aot_eager", help="name of a Dynamo backend (aot_eager)")
    parser.add_argument("--nproc", type=int, default=1, choices=range(1, 9), help="ranks (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (300)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def _caps(text: str) -> tuple[str, ...]:
    """Checked here, because a cap that is no number would look like a crash of every mode."""
    caps = tuple(text.split(","))
    for cap in caps:
        if cap not in ("default", "own") and not float(cap) > 0:
            raise argparse.ArgumentTypeError(f"expected MiB above 0, 'default' or 'own', got {cap!r}")
    return caps


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    unknown = [mode for mode in modes if mode not in MODES or mode == "eager"]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of torch, split, inline, whole, got {unknown[0]!r}")
    return modes


if __name__ == "__main__":
    sys.exit(main())
