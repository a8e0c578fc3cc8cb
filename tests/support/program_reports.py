"""Public reports about programs: a model and the step around it.

``tests/data/reports.json`` has an object for each. ``python -m tests.support.program_reports`` writes
the text of docs/program_reports.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.reports import link

MODES = ("whole", "torch", "inline", "split", "step")
HEAD = """\
# Public reports about programs around DDP

Each row has issues in pytorch/pytorch about one kind of program, and how each mode trains it on two ranks, \
compared with eager DDP: *bitwise* equal, equal up to *rounding*, *refused*, or with an error. *whole* is \
one graph without an optimizer, *torch* is torch 2.13's DDPOptimizer, *inline*, *split* and *step* are \
ddpopt. `python -m tests.support.program_reports` writes this page from `tests/data/reports.json`; a test \
holds every outcome. [Reports with a case of the corpus](reports.md) have their own page.

| reports, program | about | whole | torch | inline | split | step |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class ReportedProgram:
    """Reports about a program.

    Attributes:
        numbers: of the issues in pytorch/pytorch.
        program: name in `tests.support.programs.PROGRAMS`.
        upstream: what they are about.
        outcomes: by mode, ``"bitwise"`` as eager DDP, ``"rounding"``, ``"refused"`` or ``"raises ..."``.
        note: why an outcome is not that of eager; empty if all are.
    """

    numbers: tuple[int, ...]
    program: str
    upstream: str
    outcomes: Mapping[str, str]
    note: str = ""

    def row(self) -> str:
        links = ", ".join(map(link, self.numbers))
        note = f" *{self.note}.*" if self.note else ""
        said = [self.outcomes.get(mode, "") for mode in MODES]
        return f"| {links} `{self.program}` | {self.upstream}.{note} | {' | '.join(said)} |"


@cache
def reported_programs() -> tuple[ReportedProgram, ...]:
    """The reports about programs, in the order of the file."""
    rows = json.loads((Path(__file__).parents[1] / "data" / "reports.json").read_text(encoding="utf-8"))
    of_programs = [row for row in rows if "program" in row]
    return tuple(ReportedProgram(**{**row, "numbers": tuple(row["numbers"])}) for row in of_programs)


def page() -> str:
    return HEAD + "\n".join(report.row() for report in reported_programs()) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # its output
