"""Timings as pyperf keeps them, so that those of two commits or machines can be compared.

``python -m pyperf compare_to before.json after.json --table`` tells what has changed by more than its noise;
``pyperf show``, ``stats`` and ``hist`` read such a file, too. pyperf adds what it finds out of the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyperf

Timings = Mapping[str, Sequence[Sequence[float]]]
"""By what was timed: for each process that timed it, its figures in seconds."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--pyperf FILE`` to a command line."""
    parser.add_argument(
        "--pyperf", type=Path, metavar="FILE", help="write all timings to this file of pyperf's"
    )


def store(path: Path, timings: Timings, facts: Mapping[str, str]) -> None:
    """Write timings to a file; what was there before is gone.

    Args:
        path: of the file.
        timings: at least one figure of each, all above 0.
        facts: `benchmarks.report.conditions`, which stand beside what pyperf finds out by itself.
    """
    suite = pyperf.BenchmarkSuite([
        pyperf.Benchmark([
            pyperf.Run([*seconds], metadata={**_metadata(facts), "name": name, "unit": "second"})
            for seconds in processes
        ])
        for name, processes in timings.items()
    ])  # fmt: skip
    suite.dump(str(path), replace=True)


def _metadata(facts: Mapping[str, str]) -> dict[str, str]:
    """The conditions under names that pyperf has no meaning of its own for."""
    return {f"ddpopt_{name.replace(' ', '_')}": value for name, value in facts.items()}
