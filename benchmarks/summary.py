"""The requirements, the results, and whether they hold: ``python -m benchmarks.summary``.

Reads the JSON that the measurements left in ``benchmarks/results`` (``make bench``) and prints one table:
ratios, each measured in one run, with their spread and their value at the physical limit. A spread
is the lowest and the highest over rounds; for step times it is the quartiles.

``--store NAME`` writes the summary, without individual timings, to ``summary-NAME.json`` in the same folder,
which is under version control; figures that were not measured again stay there, with their own conditions.
docs/benchmarks.md is an extract.

Exit code 0: all requirements hold; 1: one does not, or was not measured; 2: a file cannot be read.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import Section, missing, section_of, show_claims, wide_console
from ddpopt.errors import UsageError

MEASUREMENTS = ("planning", "compile", "step", "alignment", "simulate")
"""The names of the measurements' modules and files."""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


def read(results: Path, kept: Sequence[Section] = ()) -> tuple[Section, ...]:
    """The sections of all measurements.

    Args:
        results: the folder with their files, each named for its measurement.
        kept: earlier sections, used if there is no file.

    Returns:
        One section for each measurement, with or without a file.

    Raises:
        UsageError: a file was not written by its measurement.
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
    """The stored summaries of a folder, in the order of their names."""
    return {
        path.stem.removeprefix("summary-"): tuple(
            map(section_of, json.loads(path.read_text(encoding="utf-8")))
        )
        for path in sorted(results.glob("summary-*.json"))
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print, store.

    Args:
        arguments: the command-line arguments.

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
    except (UsageError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    short = sum(not claim.held for section in sections for claim in section.claims)
    asked_in_all = sum(len(section.claims) for section in sections)
    console.print(f"{asked_in_all - short} of {asked_in_all} requirements met", markup=False, highlight=False)
    return int(bool(short))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON (benchmarks/results)"
    )
    parser.add_argument("--store", type=_name, metavar="NAME", help="store as this: cpu, or a GPU's name")
    return parser


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(
            f"expected letters, digits, dots and dashes such as cpu, got {text!r}"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
