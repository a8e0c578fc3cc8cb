"""What `benchmarks.summary` keeps of each measurement: what was asked and found, and tables for readers.

Invariant: what `asdict` and JSON made of sections, `sections_of` reads back equal. Cells are text already, so
that a page made from a stored file is the same wherever it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Claim:
    """One thing that is asked, and what was found.

    Attributes:
        case: where it is asked, for instance ``"gpt, 24 layers"``.
        what: the figure, in words; a ratio of two things measured in one run, or a count.
        found: the figure; None where it was not measured or cannot be judged.
        spread: its lowest and highest over rounds, or its quartiles; None where it was measured once.
        limit: what the figure would be at the physical limit; None where there is none.
        asked: what is asked of it, in words.
        held: whether it is so; never where nothing was found.
        remark: why nothing was found; else empty.
    """

    case: str
    what: str
    found: float | None
    spread: tuple[float, float] | None
    limit: float | None
    asked: str
    held: bool
    remark: str = ""


@dataclass(frozen=True)
class Grid:
    """A table for readers, all cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """All of one measurement.

    Attributes:
        name: of the measurement.
        conditions: machine, versions, command, date; empty if it was not measured.
        claims: what was asked.
        grids: what else it showed.
    """

    name: str
    conditions: Mapping[str, str]
    claims: tuple[Claim, ...]
    grids: tuple[Grid, ...]


def at_most(case: str, what: str, found: float | None, bound: float, **more: Any) -> Claim:
    """A claim that a figure is no larger than a bound.

    >>> at_most("gpt", "inline to one graph", 1.06, 1.05).held
    False
    """
    return _claim(case, what, found, f"at most {bound:g}", found is not None and found <= bound, more)


def at_least(case: str, what: str, found: float | None, bound: float, **more: Any) -> Claim:
    """A claim that a figure is no smaller than a bound."""
    return _claim(case, what, found, f"at least {bound:g}", found is not None and found >= bound, more)


def _claim(
    case: str, what: str, found: float | None, asked: str, held: bool, more: Mapping[str, Any]
) -> Claim:
    remark = NOT_MEASURED if found is None else ""
    return Claim(case, what, found, more.get("spread"), more.get("limit"), asked, held, remark)


def missing(name: str) -> Section:
    """The section of a measurement of which there is no file."""
    claim = Claim("all", "everything", None, None, None, "to be measured", held=False, remark=NOT_MEASURED)
    return Section(name, {}, (claim,), ())


def sections_of(documents: Iterable[Mapping[str, Any]]) -> tuple[Section, ...]:
    """Sections from what `asdict` made of them, by way of JSON."""
    return tuple(
        Section(
            document["name"],
            document["conditions"],
            tuple(_claim_of(claim) for claim in document["claims"]),
            tuple(
                Grid(grid["title"], tuple(grid["columns"]), tuple(map(tuple, grid["rows"])))
                for grid in document["grids"]
            ),
        )
        for document in documents
    )


def _claim_of(fields: Mapping[str, Any]) -> Claim:
    spread = fields["spread"]
    return Claim(**{**fields, "spread": None if spread is None else (spread[0], spread[1])})
