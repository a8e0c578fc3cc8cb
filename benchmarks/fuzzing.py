"""How many drawn programs are judged in a second? ``python -m benchmarks.fuzzing``.

Graphs: drawn, planned, cut and certified. Models: drawn, trained in eager DDP and compiled by ``aot_eager``,
all of it compared, by ``ddpopt fuzz`` itself. Both on as many processes as there are workers.

Exit code 1 where fewer than 100 graphs or 3 models a second were judged, or a model was wrong; 2 for
arguments that cannot be. It reads the clock, so nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.report import conditions, state, wide_console
from ddpopt.errors import InfrastructureError, VerificationError
from ddpopt.planning.bucket_rule import BucketConfig
from ddpopt.planning.facts import collect, parameter_names
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.graph_builder import SmallGraph

GRAPHS_ASKED = 100.0
MODELS_ASKED = 3.0
LIMITS = BucketConfig(cap_bytes=100, first_bucket_bytes=64)
"""A drawn graph's parameters have 16 to 128 bytes: some buckets hold one of them, some several."""
WARM_UP = 200
"""Graphs that a process judges before its time is taken: the first import what the others find."""


@dataclass(frozen=True)
class Rate:
    """How many were judged in a second, in each round.

    Attributes:
        what: graphs or models, and what is done with them.
        rounds: by round, all workers together.
        asked: how many at least.
    """

    what: str
    rounds: tuple[float, ...]
    asked: float

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)

    @property
    def holds(self) -> bool:
        """Whether it is as many as asked."""
        return self.median >= self.asked


def main() -> int:
    """Measure, print, store.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = wide_console()
    facts = conditions("benchmarks.fuzzing")
    state(console, facts)
    graphs = Rate("graphs: plan, partition, certificate", _graphs(arguments), GRAPHS_ASKED)
    judged, wrong = _models(arguments)
    rates = (graphs, Rate("models: eager and aot_eager, split, all compared", judged, MODELS_ASKED))
    console.print(_table(rates))
    for problem in wrong:
        console.print(problem, style="red", markup=False)
    if arguments.json:
        document = {"conditions": facts, "rates": [asdict(rate) for rate in rates]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return int(bool(wrong) or not all(rate.holds for rate in rates))


def _graphs(arguments: argparse.Namespace) -> tuple[float, ...]:
    """All processes begin together, and each takes its own time; the slowest counts for all."""
    context = multiprocessing.get_context("spawn")
    found = []
    for number in range(arguments.rounds):
        seeds = [number * arguments.workers + worker for worker in range(arguments.workers)]
        with context.Manager() as manager, context.Pool(arguments.workers) as pool:
            start = manager.Barrier(arguments.workers)
            seconds = pool.starmap(_judge_graphs, [(arguments.graphs, seed, start) for seed in seeds])
        found.append(arguments.workers * arguments.graphs / max(seconds))
    return tuple(found)


def _judge_graphs(count: int, number: int, start: threading.Barrier) -> float:
    """Judge some graphs in this process, and say how many seconds it took."""
    # Heavy, and not needed to read the command line.
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.property.strategies import graphs

    def judge(amount: int) -> None:
        drawn = settings(
            max_examples=amount,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(drawn(given(graphs())(_certify)))()

    judge(WARM_UP)
    start.wait()
    began = time.perf_counter()
    judge(count)
    return time.perf_counter() - began


def _certify(graph: SmallGraph) -> None:
    specs = graph.specs()
    plan = plan_graph(collect(graph.gm, graph.example_values, specs), LIMITS)
    stitched = partition(graph.gm, plan)
    certify(graph.gm, stitched, plan, parameter_names(graph.gm, graph.example_values, specs))


def _models(arguments: argparse.Namespace) -> tuple[tuple[float, ...], list[str]]:
    """The rate of each round, and a sentence for each round in which a model was wrong."""
    found, wrong = [], []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "ddpopt", "fuzz", "--mode", "ddpopt-split", "--seed", str(number),
                "--examples", str(arguments.models), "--workers", str(arguments.workers), "--out", folder,
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            told = (
                f"expected every drawn model to be right, got exit code {done.returncode} from "
                f"'{shlex.join(command[1:])}'; run it with a folder to keep:\n{done.stderr[-2000:]}"
            )
            if done.returncode not in (0, VerificationError.exit_code):
                raise InfrastructureError(told)
            wrong += [told] if done.returncode else []
            summary = json.loads((Path(folder) / "summary.json").read_text())
        found.append(float(summary["models"]) / float(summary["seconds"]))
    return tuple(found), wrong


def _table(rates: Sequence[Rate]) -> Table:
    table = Table()
    for title in ("what", "a second", "lowest", "highest", "asked", ""):
        table.add_column(title, justify="left" if title in ("what", "") else "right")
    for rate in rates:
        figures = (rate.median, min(rate.rounds), max(rate.rounds), rate.asked)
        table.add_row(rate.what, *(f"{figure:.3g}" for figure in figures), "" if rate.holds else "FEWER")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzzing", description=__doc__)
    parser.add_argument("--graphs", type=_some, default=1000, help="graphs of a worker in a round")
    parser.add_argument("--models", type=_some, default=400, help="models of a round")
    parser.add_argument("--workers", type=_some, default=2, help="processes")
    parser.add_argument("--rounds", type=_some, default=3)
    parser.add_argument("--json", type=Path, help="store conditions and rates in this file")
    return parser


def _some(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
