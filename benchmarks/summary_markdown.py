"""The summary as Markdown, and its place in a page between two markers.

Invariant: the page's tables are what the stored summaries give, to the letter; nobody types a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.summary_sections import Claim, Grid, Section
from ddpopt.errors import UsageError

BEGIN = "<!-- begin: python -m benchmarks.summary --markdown -->"
END = "<!-- end -->"
NOTHING = "*No figures are stored yet: they are to be measured on a machine that does nothing else.*"
CLAIMS = ("where", "figure", "found", "spread", "at the limit", "asked", "held")


def claim_cells(claim: Claim) -> tuple[str, ...]:
    """A claim as the cells of a row under `CLAIMS`."""
    spread = "–" if claim.spread is None else f"{_number(claim.spread[0])} – {_number(claim.spread[1])}"
    held = claim.remark or ("yes" if claim.held else "no")
    return (claim.case, claim.what, _number(claim.found), spread, _number(claim.limit), claim.asked, held)


def _number(value: float | None) -> str:
    """A count as it is, a ratio with three digits behind the point."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def markdown(summaries: Mapping[str, Sequence[Section]]) -> str:
    """All summaries, one below the other.

    Args:
        summaries: by the name under which each is stored.

    Returns:
        Markdown, with an empty line between blocks.
    """
    blocks = [block for name, sections in summaries.items() for block in _summary(name, sections)]
    return "\n\n".join(blocks or [NOTHING])


def _summary(name: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"## Figures: {name}"
    for section in sections:
        yield f"### {section.name}"
        if section.conditions:
            yield "; ".join(f"{title}: {_plain(value)}" for title, value in section.conditions.items()) + "."
        yield _table(CLAIMS, [claim_cells(claim) for claim in section.claims])
        for grid in section.grids:
            yield f"**{_plain(grid.title)}**"
            yield _grid(grid)


def _grid(grid: Grid) -> str:
    return _table(grid.columns, grid.rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    r"""Text that ends no cell.

    >>> _plain("a | b")
    'a \\| b'
    """
    return text.replace("|", "\\|")


def replaced(page: str, block: str) -> str:
    """A page with another block between its markers.

    Args:
        page: has `BEGIN` and, after it, `END`, once each and each on a line of its own.
        block: what shall stand between them.

    Returns:
        The page; what is outside the markers is as it was.

    Raises:
        UsageError: there are no such markers.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise UsageError(
            f"expected a line {BEGIN!r} and below it a line {END!r} in the page, found neither or one. "
            "Put both where the tables shall stand."
        )
    return f"{before}{begin}\n{block}\n\n{end}{after}"
