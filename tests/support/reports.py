"""Public reports against PyTorch that cases of the corpus reproduce, and the page that lists them.

``tests/data/reports.json`` has one object for each; ``python -m tests.support.reports > docs/reports.md``
writes the page. ``torch_says`` is what was measured with torch 2.13, never what was expected.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ddpopt.cases import corpus
from ddpopt.cases.case import Case

WITHOUT_CASE = {104088: "a regression of nightly builds on GPUs, closed without a reproduction"}
"""Reports on the list that have no case, and why."""
ANSWERS = {
    "compiled": "compiled",
    "one piece": "one piece (inline)",
    "overlap": "at least half early",
    "aligned": "all but the last early",
    "recompiles": "nothing compiled after the second step",
    "products": "no product recomputed that was to be kept",
}
"""What a report may ask for besides eager DDP's gradients, as the page puts it."""
HEAD = """\
# Public reports against compiled DDP

Each row is an issue or pull request in pytorch/pytorch, and the case of the corpus that reproduces it on \
CPU and gloo. **wrong** means that the case still fails or loses its overlap with torch 2.13's optimizer. \
ddpopt is right on all of them; the last column says what the multi-rank tests check besides gradients. \
`python -m tests.support.reports` writes this page from `tests/data/reports.json`. \
[Programs](program_reports.md) around DDP \
and [other engines](engine_reports.md) have their own pages.

A *piece* is a graph that is compiled on its own. A bucket is *early* if it is sent before the last compiled \
backward ends.

| report, case | what happened upstream | torch 2.13 | ddpopt |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Report:
    """A report against PyTorch that a case reproduces.

    Attributes:
        number: of the issue or pull request in pytorch/pytorch.
        case: name of the case.
        upstream: one sentence: what went wrong there, or what was done about it.
        torch_passes: whether torch 2.13's own optimizer does what the report asks for.
        torch_says: what it does with the case, as `tests.support.reported.sentence` puts it.
        asks: of `ANSWERS`.
        nearest: how the case differs from the report, where that cannot run on CPU and gloo; else empty.
        backend: Dynamo backend under which torch and ddpopt are judged.
        settings: torch's settings under which both are judged.
        wrap: how the model is made data-parallel: ``DDP``; ``compiled inside`` of DDP; by ``replicate``;
            ``nested``, with its submodule ``inner`` in a DDP of its own.
    """

    number: int
    case: str
    upstream: str
    torch_passes: bool
    torch_says: str
    asks: tuple[str, ...] = ()
    nearest: str = ""
    backend: str = "aot_eager"
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrap: str = "DDP"

    def row(self) -> str:
        terms = [f"`{name}={value!r}`" for name, value in self.settings.items()]
        terms += [] if self.backend == "aot_eager" else [self.backend]
        terms += [] if self.wrap == "DDP" else [self.wrap]
        torch_says = self.torch_says.replace(", gradients as eager", "").replace("compiles ", "")
        torch_says = re.sub(r"sends (\d+ of \d+) buckets during backward", r"\1 early", torch_says)
        cells = (
            f"{link(self.number)} `{self.case}`",
            f"{self.upstream}." + (f" *Here: {self.nearest}.*" if self.nearest else ""),
            ("" if self.torch_passes else "**wrong**: ")
            + torch_says
            + (f" ({', '.join(terms)})" if terms else ""),
            ", ".join(ANSWERS[ask] for ask in self.asks),
        )
        return f"| {' | '.join(cells)} |"


@cache
def reported_cases() -> tuple[tuple[Case, Report], ...]:
    """The cases that stem from a report, with it, by its number."""
    rows = json.loads((Path(__file__).parents[1] / "data" / "reports.json").read_text(encoding="utf-8"))
    of_cases = [row for row in rows if "case" in row]
    reports = [Report(**{**row, "asks": tuple(row.get("asks", ()))}) for row in of_cases]
    return tuple((corpus.case(report.case), report) for report in reports)


def page() -> str:
    rows = [report.row() for _, report in reported_cases()]
    reasons = [f"- {link(number)}: {reason}." for number, reason in WITHOUT_CASE.items()]
    return HEAD + "\n".join([*rows, "", "Without a case:", "", *reasons]) + "\n"


def link(number: int) -> str:
    return f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # its output
