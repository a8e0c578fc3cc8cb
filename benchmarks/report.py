"""The report of a measurement: its conditions, the requirements and results, and tables for readers.

Invariant: `section_of` restores a section from the JSON of its `asdict`. Cells are text already, so a page
made from a stored file is the same everywhere.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyperf
import torch
from rich.console import Console
from rich.table import Table

NOT_MEASURED = "not measured"
CLAIMS = ("where", "figure", "found", "spread", "at the limit", "asked", "held")
Ends = tuple[float, float] | None
Timings = Mapping[str, Sequence[Sequence[float]]]
"""By name of the measurement: for each process, its figures in seconds."""


@dataclass(frozen=True)
class Claim:
    """One requirement, and the result.

    Attributes:
        case: where it applies, for instance ``"gpt, 24 layers"``.
        what: the name of the figure: a ratio of two things measured in one run, or a count.
        found: the figure; None if it was not measured or cannot be judged.
        spread: its lowest and highest over rounds, or its quartiles; None if it was measured once.
        limit: the figure at the physical limit; None if there is none.
        asked: the requirement, as text.
        held: whether the requirement holds; false if nothing was found.
        remark: why nothing was found; otherwise empty.
    """

    case: str
    what: str
    found: float | None
    spread: Ends
    limit: float | None
    asked: str
    held: bool
    remark: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a row under `CLAIMS`."""
        spread = "–" if self.spread is None else f"{number(self.spread[0])} – {number(self.spread[1])}"
        held = self.remark or ("yes" if self.held else "no")
        return (self.case, self.what, number(self.found), spread, number(self.limit), self.asked, held)


@dataclass(frozen=True)
class Grid:
    """A table for readers, all cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """The report of one measurement.

    Attributes:
        name: name of the measurement.
        conditions: machine, versions, command, date; empty if it was not measured.
        claims: the claims; including those not measured, so that no claim is lost.
        grids: tables of its other results.
    """

    name: str
    conditions: Mapping[str, str]
    claims: tuple[Claim, ...]
    grids: tuple[Grid, ...]


def at_most(
    case: str,
    what: str,
    found: float | None,
    bound: float,
    *,
    spread: Ends = None,
    limit: float | None = None,
) -> Claim:
    """A claim that a figure is no larger than a bound.

    >>> at_most("gpt", "inline to one graph", 1.06, 1.05).held
    False
    """
    held = found is not None and found <= bound
    remark = NOT_MEASURED if found is None else ""
    return Claim(case, what, found, spread, limit, f"at most {bound:g}", held, remark)


def at_least(
    case: str,
    what: str,
    found: float | None,
    bound: float,
    *,
    spread: Ends = None,
    limit: float | None = None,
) -> Claim:
    """A claim that a figure is no smaller than a bound."""
    held = found is not None and found >= bound
    remark = NOT_MEASURED if found is None else ""
    return Claim(case, what, found, spread, limit, f"at least {bound:g}", held, remark)


def missing(name: str) -> Section:
    """The section of a measurement without a file."""
    claim = Claim("all", "everything", None, None, None, "to be measured", held=False, remark=NOT_MEASURED)
    return Section(name, {}, (claim,), ())


def section_of(document: Mapping[str, Any]) -> Section:
    """Restore a section from the JSON of its `asdict`."""
    return Section(
        document["name"],
        document["conditions"],
        tuple(_claim_of(claim) for claim in document["claims"]),
        tuple(
            Grid(grid["title"], tuple(grid["columns"]), tuple(map(tuple, grid["rows"])))
            for grid in document["grids"]
        ),
    )


def _claim_of(fields: Mapping[str, Any]) -> Claim:
    spread = fields["spread"]
    return Claim(**{**fields, "spread": None if spread is None else (spread[0], spread[1])})


def number(value: float | None) -> str:
    """A count unchanged, a ratio with three decimals, a dash for None."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def ends(values: Sequence[float] | None) -> Ends:
    """Lowest and highest; None for fewer than two values."""
    return (min(values), max(values)) if values and len(values) > 1 else None


def over(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def some_of(known: Sequence[str], text: str) -> tuple[str, ...]:
    """Read names on a command line that are separated by commas, each once.

    Args:
        known: the known names.
        text: the text from the command line.

    Raises:
        argparse.ArgumentTypeError: a name is unknown.

    >>> some_of(("eager", "torch"), "torch,eager,torch")
    ('torch', 'eager')
    """
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown[0]!r}")
    return names


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """A command line with ``--json`` and ``--pyperf``.

    Args:
        module: the module to start.
        about: its docstring.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="write the tables and all figures to this file")
    parser.add_argument(
        "--pyperf", type=Path, metavar="FILE", help="write all timings to this file, in pyperf's format"
    )
    return parser


def conditions(module: str) -> dict[str, str]:
    """Date, hardware, versions and command of this run.

    Args:
        module: name of the module that was started, for instance ``"benchmarks.planning"``.

    Returns:
        Printable values by title.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    """The processor's name if Linux reports it, else its architecture."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def wide_console() -> Console:
    """A console for tables; wide enough for them if the output is a file or a pipe."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=140)


def state(console: Console, facts: Mapping[str, str]) -> None:
    """Print `conditions`, one per line."""
    for title, value in facts.items():
        console.print(f"{title}: {value}", markup=False, highlight=False)


def show_grid(console: Console, grid: Grid) -> None:
    """Print a table; numbers are right-aligned."""
    table = Table(title=grid.title)
    for place, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    for row in grid.rows:
        table.add_row(*row)
    console.print(table)


def show_claims(console: Console, sections: Sequence[Section]) -> None:
    """Print the requirements and results, one row each."""
    table = Table(title="Ratios, each from one run; their values at the physical limit; what is required")
    table.add_column("benchmark", no_wrap=True)
    for title in CLAIMS:
        table.add_column(title, justify="left" if title in ("where", "figure") else "right")
    for section in sections:
        for claim in section.claims:
            *cells, held = claim.cells
            table.add_row(section.name, *cells, held if claim.held else f"[red]{held}[/red]")
    console.print(table)


def finish(
    console: Console, section: Section, asked: argparse.Namespace, figures: object, timings: Timings
) -> int:
    """Print the claims, and store the files that the command line requests.

    Args:
        console: the console to print to.
        section: section of the measurement.
        asked: the command line.
        figures: all figures, for JSON.
        timings: the timings for pyperf's file; at least one of each, all above 0.

    Returns:
        The exit code: 1 if a measured figure misses its requirement.
    """
    show_claims(console, [section])
    if asked.json:
        asked.json.write_text(json.dumps({**asdict(section), "figures": figures}, indent=1) + "\n")
    if asked.pyperf:
        store_timings(asked.pyperf, timings, section.conditions)
    return int(any(claim.found is not None and not claim.held for claim in section.claims))


def store_timings(path: Path, timings: Timings, facts: Mapping[str, str]) -> None:
    """Write timings to a pyperf file, so that two commits or machines can be compared.

    Args:
        path: path of the file, which is overwritten.
        timings: at least one figure of each, all above 0.
        facts: `conditions`, stored in addition to pyperf's own metadata.
    """
    own = {f"ddpopt_{name.replace(' ', '_')}": value for name, value in facts.items()}
    suite = pyperf.BenchmarkSuite([
        pyperf.Benchmark([
            pyperf.Run([*seconds], metadata={**own, "name": name, "unit": "second"}) for seconds in processes
        ])
        for name, processes in timings.items()
    ])  # fmt: skip
    suite.dump(str(path), replace=True)
