"""Rows of `benchmarks.step`: the figures of one model over one network, held against what is asked.

Invariant: pure; the same figures give the same rows and the same problems.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.step_figures import Figures
from benchmarks.step_modes import EAGER, INLINE, TORCH, WHOLE

ASKED_TO_LIMIT = 1.05
ASKED_TO_BEST = 1.02
ASKED_UNSPLIT = 1.15


@dataclass(frozen=True)
class Row:
    """What one mode took.

    Attributes:
        mode: its name.
        fastest_s: the fastest step.
        step_s: median over all steps.
        spread_s: first and third quartile over all steps.
        to_eager: ratio of the fastest step to eager DDP's; None if that was not measured.
        to_torch: the same to torch's DDPOptimizer.
        to_limit: ratio of the fastest step to the physical limit.
        to_best: ratio of the fastest step to that of the fastest other mode; None if there is no other.
        graphs: how many its backend was given; None for modes that torch does not compile.
        exposed: share of all-reduce time that no computing hides, the median; None if no step was traced.
        peak_bytes: the most that a step holds at once, over what is held before it.
        to_whole_peak: ratio of that to the one graph without an optimizer; None if that was not measured.
        first_steps_s: the first three steps.
    """

    mode: str
    fastest_s: float
    step_s: float
    spread_s: tuple[float, float]
    to_eager: float | None
    to_torch: float | None
    to_limit: float
    to_best: float | None
    graphs: int | None
    exposed: float | None
    peak_bytes: int
    to_whole_peak: float | None
    first_steps_s: float


def limit(parts: Mapping[str, float]) -> float:
    """The physical limit of a step; see the top of `benchmarks.step`.

    Args:
        parts: as `benchmarks.step_parts.Parts.measure` gives them.

    Returns:
        Seconds.

    >>> parts = {"forward": 2, "backward": 4, "first_bucket": 0.25, "comm": 9, "last_bucket": 1, "update": 1}
    >>> limit(parts), limit({**parts, "comm": 2})
    (13.0, 8)
    """
    forward, backward = parts["forward"], parts["backward"]
    by_network = forward + parts["first_bucket"] * backward + parts["comm"]
    by_computing = forward + backward + parts["last_bucket"]
    return max(by_network, by_computing) + parts["update"]


def fastest_parts(figures: Figures) -> dict[str, float]:
    """The fastest of each part, and the median of the share."""
    parts = {name: min(values) for name, values in figures.parts.items()}
    return {**parts, "first_bucket": statistics.median(figures.parts["first_bucket"])}


def rows(figures: Figures) -> list[Row]:
    """One row for each mode.

    Args:
        figures: of one model.

    Returns:
        In the order in which the modes were asked for.
    """
    fastest = {mode: min(steps) for mode, steps in figures.steps_s.items()}
    limit_s = limit(fastest_parts(figures))
    return [
        Row(
            mode=mode,
            fastest_s=fastest[mode],
            step_s=statistics.median(steps),
            spread_s=_quartiles(steps),
            to_eager=_ratio(fastest[mode], fastest.get(EAGER)),
            to_torch=_ratio(fastest[mode], fastest.get(TORCH)),
            to_limit=fastest[mode] / limit_s,
            to_best=_ratio(fastest[mode], _fastest_other(fastest, mode)),
            graphs=figures.graphs.get(mode),
            exposed=statistics.median(figures.exposed[mode]) if mode in figures.exposed else None,
            peak_bytes=figures.peak_bytes[mode],
            to_whole_peak=_ratio(figures.peak_bytes[mode], figures.peak_bytes.get(WHOLE)),
            first_steps_s=figures.first_steps_s[mode],
        )
        for mode, steps in figures.steps_s.items()
    ]


def _fastest_other(fastest: Mapping[str, float], mode: str) -> float | None:
    return min((value for name, value in fastest.items() if name != mode), default=None)


def _ratio(value: float, other: float | None) -> float | None:
    return None if other is None else value / other


def _quartiles(steps: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(steps, n=4, method="inclusive")
    return first, third


@dataclass(frozen=True)
class Asked:
    """One thing that is asked of ``inline``, and what was found.

    Attributes:
        what: a ratio, in words.
        at_least: whether the ratio is to be at least `bound`; else at most.
        bound: what is asked.
        found: the ratio.
        spread: of the ratio, if the first and the third quartile of its numerator were the fastest.
        possible: the ratio that a step at the physical limit would have.
    """

    what: str
    at_least: bool
    bound: float
    found: float
    spread: tuple[float, float]
    possible: float

    @property
    def held(self) -> bool:
        """Whether it is so."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    @property
    def asked(self) -> str:
        """What is asked, in words."""
        return f"at {'least' if self.at_least else 'most'} {self.bound:g}"


def asked_of(found: Sequence[Row]) -> list[Asked]:
    """What is asked of one model over one network; nothing if ``inline`` was not measured.

    Args:
        found: the rows of all modes.

    Returns:
        That inline is near the limit; that it is about as fast as the fastest other mode; and, where torch's
        DDPOptimizer compiled one graph, so that it did not split, that inline is faster than it.
    """
    inline = next((row for row in found if row.mode == INLINE), None)
    if inline is None:
        return []
    asked = [_at_most("inline to the limit", ASKED_TO_LIMIT, inline, inline.to_limit, 1.0)]
    if inline.to_best is not None:
        possible = inline.to_best / inline.to_limit
        asked.append(_at_most("inline to the best other", ASKED_TO_BEST, inline, inline.to_best, possible))
    unsplit = next((row for row in found if row.mode == TORCH and row.graphs == 1), None)
    if unsplit is not None:
        faster = unsplit.fastest_s / inline.fastest_s
        spread, possible = _spread(unsplit, faster), faster * inline.to_limit
        asked.append(Asked("torch's, one graph, to inline", True, ASKED_UNSPLIT, faster, spread, possible))
    return asked


def _at_most(what: str, bound: float, row: Row, ratio: float, possible: float) -> Asked:
    return Asked(what, False, bound, ratio, _spread(row, ratio), possible)


def _spread(row: Row, ratio: float) -> tuple[float, float]:
    first, third = (ratio * quartile / row.fastest_s for quartile in row.spread_s)
    return first, third


def problems(model: str, found: Sequence[Row]) -> list[str]:
    """What falls short of what is asked.

    Args:
        model: its name.
        found: the rows of all modes.

    Returns:
        A line for each; with what a step at the physical limit would come to.
    """
    return [
        f"{model}: {asked.what} is {asked.found:.3f}, asked {asked.asked} (at the limit {asked.possible:.3f})"
        for asked in asked_of(found)
        if not asked.held
    ]
