"""Is a step as long as predicted, and are tuned buckets the best? ``python -m benchmarks.tuning``.

Two ranks of one thread each train a model on two emulated hosts (`benchmarks.network`) with DDP's default
buckets, with some caps and with the tuned buckets, in turns. The profile and the link are measured first, in
the same processes. Every figure is from one run:

- *predicted*: the predicted step to the median of the measured ones, for each kind of buckets;
- *tuned*: the lower quartile of the steps with the tuned buckets to the least one with others, and to that
  with DDP's default. Other load only adds time: lower quartiles of equal buckets differ less than medians.

Exit code 1 if a prediction is off by more than 10%, or fewer than 80% of them are within 5%, or tuned
buckets take more than 1.03 times as long as the best others, or longer than DDP's default (0.86 times as long
for the GPT at 1 Gbit/s); 2 for invalid arguments; 3 if a rank fails.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import quantiles

import ddpopt
from benchmarks import report
from benchmarks.network import two_hosts
from benchmarks.step import on_hosts
from benchmarks.step_workloads import WORKLOADS
from ddpopt.cases.case import Case
from ddpopt.errors import DdpoptError
from ddpopt.tuning.comparing import Row, Tuned, tuned_on

RATES, STRATEGIES = ("1gbit", "2500mbit"), ("eager", "inline")
CAPS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 25.0)
COLUMNS = ("buckets", "predicted, ms", "median, ms", "quartile, ms", "predicted to median")


def case_of(name: str) -> Case:
    """A workload of `benchmarks.step` as a case."""
    workload = WORKLOADS[name]
    return Case(name, workload.build, lambda *_: ((workload.inputs(),), {}), workload.about)


def grid(where: str, tuned: Tuned) -> report.Grid:
    """The table of one model over one network."""
    rows = ((row.name, row.predicted.step_s, row.step_s, quick_s(row)) for row in tuned.rows)
    cells = (
        (name, *(f"{t * 1000:.1f}" for t in times), report.number(times[0] / times[1]))
        for name, *times in rows
    )
    return report.Grid(f"{where}; {tuned.link}", COLUMNS, tuple(cells))


def quick_s(row: Row) -> float:
    """The lower quartile of the measured steps."""
    return quantiles(row.measured_s, n=4)[0]


def claims(found: dict[str, Tuned]) -> Iterator[report.Claim]:
    """What is asked of all tables."""
    off: list[float] = []
    for where, tuned in found.items():
        off += [abs(row.predicted.step_s / row.step_s - 1) for row in tuned.rows]
        quick = {row.name: quick_s(row) for row in tuned.rows}
        best, most = quick.pop("tuned"), 0.86 if where.startswith("gpt") and "1gbit" in where else 1.0
        yield report.at_most(where, "tuned to DDP's default", best / quick["DDP's default"], most)
        yield report.at_most(where, "tuned to the best cap", best / min(quick.values()), 1.03)
    yield report.at_most("all", "largest error of a prediction", max(off), 0.1)
    yield report.at_least(
        "all", "share of predictions within 5%", sum(each <= 0.05 for each in off) / len(off), 0.8
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store."""
    parser, console = report.parser_of("benchmarks.tuning", __doc__), report.wide_console()
    for option, known in (("--models", WORKLOADS), ("--rate", RATES), ("--strategy", STRATEGIES)):
        all_of = ",".join(known)
        parser.add_argument(
            option, type=partial(report.some_of, tuple(known)), default=all_of, help=f"({all_of})"
        )
    parser.add_argument("--backend", default="inductor", help="Dynamo backend (inductor)")
    asked, found, grids = parser.parse_args(arguments), dict[str, Tuned](), list[report.Grid]()
    facts = {
        **report.conditions("benchmarks.tuning"),
        "threads": "1 per rank, 2 ranks",
        "backend": asked.backend,
    }
    report.state(console, facts)
    try:
        for rate, model, strategy in product(asked.rate, asked.models, asked.strategy):
            with two_hosts(rate) as network:
                where = f"{model}, {strategy}, {network.description}"
                wrap = None if strategy == "eager" else partial(ddpopt.compile, backend=asked.backend)
                task = tuned_on, case_of(model), strategy, wrap, None, CAPS
                found[where] = on_hosts(network, "gloo", lambda _: None, *task)
            grids.append(grid(where, found[where]))
            report.show_grid(console, grids[-1])
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    timings = {f"{where}, {row.name}": [row.measured_s] for where, each in found.items() for row in each.rows}
    section = report.Section("tuning", facts, tuple(claims(found)), tuple(grids))
    return report.finish(console, section, asked, None, timings)


if __name__ == "__main__":
    sys.exit(main())
