"""Tables as plain ASCII text without colors and control codes, 80 columns wide, or 60 in a narrow terminal.

Invariant: outside a narrow terminal the text depends only on the arguments, so it can be stored and compared.
"""

import io
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Width of the text in columns; fits every log."""
NARROW = 60
"""Width in a terminal of fewer than 80 columns, or where the environment variable COLUMNS says so."""

MIB = 2**20

NARROWEST = 24
"""Columns of words are not narrower than this, unless their cells are."""

RULED = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""A single line below the headers: rich's SIMPLE_HEAD in ASCII."""


def width() -> int:
    """The width of text that is made now."""
    return WIDTH if shutil.get_terminal_size((WIDTH, 0)).columns >= WIDTH else NARROW


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: its header.
        align: ``"left"`` for words, which wrap where the table is too wide; ``"right"`` for numbers.
    """

    title: str
    align: Literal["left", "right"] = "left"


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, "right") for title in titles)


@dataclass(frozen=True)
class Noted:
    """A cell with a remark below it, indented."""

    text: str
    note: str


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> str:
    """Lay out a table.

    Args:
        columns: its columns. The widest columns of words wrap first; a table of many columns is wider than
            `width` rather than one of them narrower than its words or `NARROWEST`.
        rows: one cell for each column: a `Noted`, or any object, shown with ``str()``.

    Returns:
        Lines without trailing blanks, the last one without a newline.

    >>> print(table([*numbers("bucket"), Column("gradients")], [(0, "b"), (10, "w")]))
    bucket  gradients
    -----------------
         0  b
        10  w
    """
    console = Console(file=io.StringIO(), width=width(), color_system=None, force_terminal=False)
    grid = Table(box=RULED, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    cells = [tuple(map(_cell, row)) for row in rows]
    for column, *parts in zip(columns, *cells, strict=True):
        shown = (Text(column.title), *parts)
        widest = max(Measurement.get(console, console.options, part).maximum for part in shown)
        grid.add_column(
            Text(column.title),
            justify=column.align,
            overflow="fold",
            min_width=widest if column.align == "right" else min(widest, NARROWEST),
        )
    for row in cells:
        grid.add_row(*row)
    with console.capture() as text:
        console.print(grid, crop=False)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _cell(value: object) -> RenderableType:
    """Plain text without markup: a parameter may be called [bold]."""
    if isinstance(value, Noted):
        return Group(Text(value.text), Padding(Text(value.note), (0, 0, 0, 2)))
    return Text(str(value))


def paragraph(text: str, indent: str = "") -> str:
    """Wrap a sentence to the common width and indent later lines by `indent`; long names are not broken."""
    return textwrap.fill(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def mib(nbytes: int) -> str:
    """A size in MiB, to the KiB.

    >>> mib(4198400), mib(12)
    ('4.004', '0.000')
    """
    return f"{nbytes / MIB:.3f}"


def names(items: Sequence[str], at_most: int = 4) -> str:
    """A list of names; a long list shows its first names, its last name and its length.

    >>> names(["a", "b"]), names(["a", "b", "c", "d", "e"]), names([])
    ('a, b', 'a, b, ..., e (5)', '-')
    """
    if not items:
        return "-"
    if len(items) <= at_most:
        return ", ".join(items)
    return f"{', '.join(items[: at_most - 2])}, ..., {items[-1]} ({len(items)})"
