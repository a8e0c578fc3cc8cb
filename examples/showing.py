"""The demo's display: a line for each phase, a progress bar while it runs, and a closing table."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

MARKS = {True: "[green]✓[/]", False: "[red]✗ wrong[/]", None: ""}


@dataclass(frozen=True)
class Row:
    """One figure of the closing table.

    Attributes:
        name: what it is.
        eager: eager DDP's.
        ours: the values of split and inline.
        right: whether those are right; None if there is no requirement.
    """

    name: str
    eager: str
    ours: Sequence[str]
    right: Sequence[bool] | None = None


class Display:
    """Progress on the first rank, nothing on the others.

    Args:
        shown: whether this is the first rank.
    """

    def __init__(self, *, shown: bool) -> None:
        self.console = Console(quiet=not shown)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not shown,
        )

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show one phase.

        Args:
            name: what is being done.
            total: the largest number of units of work; None for a single one.

        Yields:
            A function to call after each unit.
        """
        task = self.progress.add_task(name, total=total)
        started = time.perf_counter()
        yield lambda: self.progress.advance(task)
        self.progress.remove_task(task)
        self.console.print(f"[green]✓[/] {name} [dim]({time.perf_counter() - started:.1f} s)[/]")

    def table(self, title: str, rows: list[Row]) -> None:
        """Show the results.

        Args:
            title: title of the table.
            rows: one for each figure.
        """
        table = Table("", "eager DDP", "split", "inline", title=title, title_justify="left")
        for row in rows:
            judged = row.right or (None, None)
            cells = [f"{text} {MARKS[right]}" for text, right in zip(row.ours, judged, strict=True)]
            table.add_row(row.name, row.eager, *cells)
        self.console.print(table)
