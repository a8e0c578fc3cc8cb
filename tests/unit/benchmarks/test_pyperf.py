"""Timings come back from pyperf's files by name and by process, and can be compared."""

from pathlib import Path

import pyperf

from benchmarks import compile as compiling
from benchmarks import planning
from benchmarks.compile_once import Start
from benchmarks.planning import Timing
from benchmarks.report import Timings, store_timings

FACTS = {"date": "2026-11-22", "load before": "0.10"}


def stored(path: Path, timings: Timings) -> dict[str, list[tuple[float, ...]]]:
    store_timings(path, timings, FACTS)
    suite = pyperf.BenchmarkSuite.load(str(path))
    return {bench.get_name(): [run.values for run in bench.get_runs()] for bench in suite.get_benchmarks()}


def test_what_was_timed_is_told_by_name(tmp_path: Path) -> None:
    one, two = Start(1.0, 9.0, 8, 0), Start(2.0, 9.0, 8, 0)
    figures = {compiling.Setting("gpt", 24, "split"): compiling.Starts((one, two), (two,), (one,))}
    assert stored(tmp_path / "a.json", compiling.timings_of(figures)) == {
        "gpt, 24 layers, split, uncached": [(1.0,), (2.0,)],
        "gpt, 24 layers, split, cold": [(2.0,)],
        "gpt, 24 layers, split, warm": [(1.0,)],
    }
    timings = {"ddpopt": [Timing(12, 360, 12, (0.1, 0.2))]}
    assert stored(tmp_path / "b.json", planning.timings_of(timings)) == {"ddpopt, 12 layers": [(0.1, 0.2)]}
