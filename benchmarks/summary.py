"""What was asked, what was found, and whether it held: ``python -m benchmarks.summary``.

Reads the JSON that the measurements left in ``benchmarks/results`` (``make bench``) and prints one table:
ratios measured in one run each, with their spread and with what they would be at the physical limit. A spread
is the lowest and the highest over rounds; for step times it is the quartiles.

``--store NAME`` keeps the summary, without the single timings, as ``summary-NAME.json`` in the same folder,
which the repository keeps; what was not measured again stays there as it is, with the conditions that it was
measured in. ``--markdown`` writes the tables of all stored summaries into docs/benchmarks.md.

Exit code 0: all that is asked held; 1: something did not, or was not measured; 2: a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import CLAIMS, Section, missing, section_of, show_claims, wide_console
from ddpopt.errors import UsageError

MEASUREMENTS = ("planning", "compile", "step", "alignment")
"""Their modules, and their files."""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- begin: python -m benchmarks.summary --markdown -->"
END = "<!-- end -->"
NOTHING = "*No figures are stored yet: they are to be measured on a machine that does nothing else.*"


def read(results: Path, kept: Sequence[Section] = ()) -> tuple[Section, ...]:
    """The sections of all measurements.

    Args:
        results: the folder with their files, each named for its measurement.
        kept: earlier ones, which count where there is no file.

    Returns:
        One for each, whether or not there is a file.

    Raises:
        UsageError: a file is not what its measurement writes.
    """
    earlier = {section.name: section for section in kept}
    return tuple(
        _section(results / f"{name}.json", name, earlier.get(name, missing(name))) for name in MEASUREMENTS
    )


def _section(path: Path, name: str, earlier: Section) -> Section:
    if not path.exists():
        return earlier
    try:
        return section_of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected what `python -m benchmarks.{name} --json` writes, got "
            f"{type(error).__name__}: {error}. Measure again."
        ) from error


def stored(results: Path) -> dict[str, tuple[Section, ...]]:
    """The summaries that a folder keeps, by name and in the order of their names."""
    return {
        path.stem.removeprefix("summary-"): tuple(
            map(section_of, json.loads(path.read_text(encoding="utf-8")))
        )
        for path in sorted(results.glob("summary-*.json"))
    }


def markdown(summaries: Mapping[str, Sequence[Section]]) -> str:
    """All summaries, one below the other; nobody types a figure.

    Args:
        summaries: by the name under which each is stored.

    Returns:
        Markdown, with an empty line between blocks.
    """
    blocks = [block for name, sections in summaries.items() for block in _blocks(name, sections)]
    return "\n\n".join(blocks or [NOTHING])


def _blocks(name: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"## Figures: {name}"
    for section in sections:
        yield f"### {section.name}"
        if section.conditions:
            yield "; ".join(f"{title}: {_plain(value)}" for title, value in section.conditions.items()) + "."
        yield _table(CLAIMS, [claim.cells for claim in section.claims])
        for grid in section.grids:
            yield f"**{_plain(grid.title)}**"
            yield _table(grid.columns, grid.rows)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print, store.

    Args:
        arguments: of the command line.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(arguments)
    console = wide_console()
    try:
        sections = read(asked.results, stored(asked.results).get(asked.store, ()))
        show_claims(console, sections)
        if asked.store:
            text = json.dumps([asdict(section) for section in sections], indent=1, ensure_ascii=False)
            (asked.results / f"summary-{asked.store}.json").write_text(text + "\n", encoding="utf-8")
        if asked.markdown:
            page = replaced(asked.markdown.read_text(encoding="utf-8"), markdown(stored(asked.results)))
            asked.markdown.write_text(page, encoding="utf-8")
    except (UsageError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    short = sum(not claim.held for section in sections for claim in section.claims)
    asked_in_all = sum(len(section.claims) for section in sections)
    console.print(f"{asked_in_all - short} of {asked_in_all} held", markup=False, highlight=False)
    return int(bool(short))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON is (benchmarks/results)"
    )
    parser.add_argument("--store", type=_name, metavar="NAME", help="keep the summary: cpu, or a GPU's name")
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="?",
        const=PAGE,
        metavar="PAGE",
        help="write the stored summaries into a page (docs/benchmarks.md)",
    )
    return parser


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(
            f"expected letters, digits, dots and dashes such as cpu, got {text!r}"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
