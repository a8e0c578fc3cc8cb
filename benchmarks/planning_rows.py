"""Timings of `benchmarks.planning`, held against what is asked.

Invariant: pure; the same timings give the same verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASKED_RATIO = 20.0
ASKED_EXPONENT = 1.2
OURS = "ddpopt"
THEIRS = "DDPOptimizer"


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one optimizer at one size.

    Attributes:
        layers: transformer layers of the model.
        nodes: nodes of its Dynamo graph.
        segments: pieces the graph was cut into.
        seconds: one figure for each repetition.
    """

    layers: int
    nodes: int
    segments: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of `seconds`."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The smallest of `seconds`."""
        return min(self.seconds)


def growth_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares slope of log(seconds) over log(size): 1 is linear, 2 quadratic.

    >>> round(growth_exponent([10, 20, 40], [1.0, 4.0, 16.0]), 6)
    2.0
    """
    slope, _ = statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds])
    return slope


@dataclass(frozen=True)
class Verdict:
    """What the timings show.

    Attributes:
        ratios: by number of layers, how many times faster ddpopt is; only where both were timed.
        exponents: by optimizer, the growth exponent over all of its sizes; none for a single size.
        problems: what falls short of what is asked.
    """

    ratios: Mapping[int, float]
    exponents: Mapping[str, float]
    problems: tuple[str, ...]


Timings = Mapping[str, Sequence[Timing]]
"""By optimizer, one timing for each size, sizes ascending; ddpopt may have more of them."""


def judge(timings: Timings) -> Verdict:
    """Compare ddpopt's timings with those of torch's optimizer.

    Ratios are of medians, for both were measured in turn. Growth is fitted to the fastest timings, for sizes
    were measured in different minutes, and a busy machine only ever adds.

    Args:
        timings: of `OURS` and `THEIRS`; the sizes of the second are among those of the first.

    Returns:
        Ratios, exponents, and what falls short: the ratio at the largest size of both, the growth exponent,
        and a number of segments below the number of layers, for then less was done than is asked.
    """
    theirs = {timing.layers: timing for timing in timings[THEIRS]}
    ratios = {t.layers: theirs[t.layers].median / t.median for t in timings[OURS] if t.layers in theirs}
    exponents = {
        name: growth_exponent([t.layers for t in found], [t.fastest for t in found])
        for name, found in timings.items()
        if len(found) > 1
    }
    largest = max(ratios)
    problems = [
        f"{t.segments} segments for {t.layers} layers" for t in timings[OURS] if t.segments < t.layers
    ]
    if ratios[largest] < ASKED_RATIO:
        problems.append(f"{ratios[largest]:.1f} times faster at {largest} layers, asked {ASKED_RATIO:g}")
    if exponents.get(OURS, 0.0) > ASKED_EXPONENT:
        problems.append(f"time grows as layers ** {exponents[OURS]:.2f}, asked at most {ASKED_EXPONENT}")
    return Verdict(ratios, exponents, tuple(problems))
