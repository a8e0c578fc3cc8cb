"""What do simulated ranks cost? ``python -m benchmarks.simulate``.

A case is judged with 8, 64 and 512 simulated ranks, each number in a process of its own. Every figure is a
ratio to the smallest number of ranks in the same run:

- *time*: what one more rank costs in a step, from one number of ranks to the next;
- *memory*: the peak of the process.

Exit code 1 if one more rank costs more than 1.25 times as much, or the process has more than 1.25 times the
memory; 2 for invalid arguments; 3 if a process fails, or a trial is not right.
"""

import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks import report
from ddpopt.cases.targets import resolve
from ddpopt.errors import DdpoptError
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.simulation.simulate import simulate
from ddpopt.judge.training.options import option
from ddpopt.judge.verdict import Status
from ddpopt.ranks.pool import launch

RANKS = ("8", "64", "512")
STEPS = 3
LIMIT_S = 3600.0
MIB = 2**20
COLUMNS = ("ranks", "trial, s", "one more rank and step, ms", "peak memory, MiB")


@dataclass(frozen=True)
class Cost:
    """The cost of one trial.

    Attributes:
        trial_s: of the whole trial.
        peak: of the process, in bytes.
    """

    trial_s: float
    peak: int


def cost_of(_: Any, target: str, name: str, backend: str, ranks: int) -> Cost:
    """Judge a case on simulated ranks, in this process."""
    subject = Subject(resolve(target), option("default"), STEPS, torch.device("cpu"))
    trial = simulate(subject, mode(name), backend, ranks)
    if trial.status is not Status.OK:
        raise RuntimeError(f"{trial.name}: {trial.status} {trial.reason} {trial.findings}")
    return Cost(trial.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def of_one_more(costs: dict[int, Cost]) -> dict[int, float]:
    """What one more rank costs in a step, in seconds, between each number of ranks and the one before."""
    found = {}
    for fewer, more in pairwise(sorted(costs)):
        added = costs[more].trial_s - costs[fewer].trial_s
        found[more] = added / (more - fewer) / STEPS
    return found


def claims(where: str, costs: dict[int, Cost]) -> Iterator[report.Claim]:
    """What is asked of all numbers of ranks."""
    fewest, *others = sorted(costs)
    each = of_one_more(costs)
    for ranks in others:
        words = f"{ranks} to {fewest} ranks"
        yield report.at_most(where, f"{words}, memory", costs[ranks].peak / costs[fewest].peak, 1.25)
    for ranks in others[1:]:
        words = f"{ranks} to {others[0]} ranks"
        yield report.at_most(where, f"{words}, one more rank", each[ranks] / each[others[0]], 1.25)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store."""
    parser = report.parser_of("benchmarks.simulate", __doc__)
    console = report.wide_console()
    parser.add_argument("--case", default="gpt", help="the case (gpt)")
    parser.add_argument("--mode", default="ddpopt-inline", help="the mode (ddpopt-inline)")
    parser.add_argument("--backend", default="aot_eager", help="Dynamo backend (aot_eager)")
    parser.add_argument("--ranks", default=",".join(RANKS), help="numbers of ranks (8,64,512)")
    asked = parser.parse_args(arguments)
    facts = {**report.conditions("benchmarks.simulate"), "threads": "1", "backend": asked.backend}
    report.state(console, facts)
    costs: dict[int, Cost] = {}
    try:
        for ranks in map(int, asked.ranks.split(",")):
            task = (asked.case, asked.mode, asked.backend, ranks)
            (costs[ranks],) = launch(cost_of, *task, nproc=1, limit_s=LIMIT_S)
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    each = of_one_more(costs)
    rows = tuple(
        (
            str(ranks),
            f"{cost.trial_s:.1f}",
            f"{each[ranks] * 1000:.0f}" if ranks in each else "-",
            f"{cost.peak / MIB:.0f}",
        )
        for ranks, cost in costs.items()
    )
    where = f"{asked.case}, {asked.mode}"
    grid = report.Grid(where, COLUMNS, rows)
    report.show_grid(console, grid)
    section = report.Section("simulate", facts, tuple(claims(where, costs)), (grid,))
    return report.finish(console, section, asked, None, {})


if __name__ == "__main__":
    sys.exit(main())
