"""The report of `benchmarks.step` on one model over one network: its limit, ratios, claims and a table.

Invariant: pure; equal figures give equal reports.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.network import Network
from benchmarks.report import Claim, Ends, Grid, Section, at_least, at_most, number
from benchmarks.step_modes import INLINE, STEP, TORCH, WHOLE
from benchmarks.step_rank import Figures
from benchmarks.step_workloads import MIB, WORKLOADS

ASKED_TO_LIMIT = 1.05
ASKED_TO_BEST = 1.02
ASKED_STEP = 1.0
ASKED_UNSPLIT = 1.15
RATES = ("1gbit", "10gbit")


@dataclass(frozen=True)
class Measured:
    """The figures of one model over one network, with the rate of the link."""

    rate: str
    network: Network
    figures: Figures


@dataclass(frozen=True)
class Row:
    """The results of one mode.

    Attributes:
        mode: its name.
        fastest_s: the fastest step.
        step_s: median over all steps.
        spread_s: first and third quartile over all steps.
        to_limit: ratio of the fastest step to the physical limit.
        to_best: ratio of the fastest step to that of the fastest other mode that compiles the model at most;
            None if there is no other.
        graphs: the number of graphs its backend was given; None for modes that torch does not compile.
        exposed: median share of all-reduce time not hidden by computation; None if no step was traced.
        peak_bytes: peak memory of a step, with DDP's buckets where they take memory.
        to_whole_peak: ratio of `peak_bytes` to that of the single graph without an optimizer; None if that
            was not measured.
    """

    mode: str
    fastest_s: float
    step_s: float
    spread_s: tuple[float, float]
    to_limit: float
    to_best: float | None
    graphs: int | None
    exposed: float | None
    peak_bytes: int
    to_whole_peak: float | None


def limit(parts: Mapping[str, float]) -> float:
    """The physical limit of a step; see the top of `benchmarks.step`.

    Args:
        parts: the result of `benchmarks.step_rank.Parts.measure`.

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
    """The fastest time of each part, and the median of the share."""
    parts = {name: min(values) for name, values in figures.parts.items()}
    return {**parts, "first_bucket": statistics.median(figures.parts["first_bucket"])}


def rows(figures: Figures) -> list[Row]:
    """One row for each mode, in the requested order."""
    fastest = {mode: min(steps) for mode, steps in figures.steps_s.items()}
    limit_s = limit(fastest_parts(figures))
    found = []
    for mode, steps in figures.steps_s.items():
        first, _, third = statistics.quantiles(steps, n=4, method="inclusive")
        others = [value for name, value in fastest.items() if name not in (mode, STEP)]
        best = min(others, default=None)
        exposed = figures.exposed.get(mode)
        row = Row(
            mode=mode,
            fastest_s=fastest[mode],
            step_s=statistics.median(steps),
            spread_s=(first, third),
            to_limit=fastest[mode] / limit_s,
            to_best=None if best is None else fastest[mode] / best,
            graphs=figures.graphs.get(mode),
            exposed=None if exposed is None else statistics.median(exposed),
            peak_bytes=figures.peak_bytes[mode],
            to_whole_peak=_ratio(figures.peak_bytes[mode], figures.peak_bytes.get(WHOLE)),
        )
        found.append(row)
    return found


def _ratio(value: float, other: float | None) -> float | None:
    return None if other is None else value / other


def claims(where: str, found: Sequence[Row]) -> Iterator[Claim]:
    """The claims on one model over one network; none if ``inline`` was not measured.

    They are that inline is near the limit; that it is about as fast as the fastest other mode; and, if
    torch's DDPOptimizer compiled one graph and so did not split, that inline is faster than it. The spread
    follows from the quartiles of the numerator, the limit from a step at the physical limit.

    Args:
        where: model and rate.
        found: the rows of all modes.
    """
    inline = next((row for row in found if row.mode == INLINE), None)
    if inline is None:
        return
    ratio = inline.to_limit
    spread = _spread(inline, ratio)
    yield at_most(where, "inline to the limit", ratio, ASKED_TO_LIMIT, spread=spread, limit=1.0)
    if inline.to_best is not None:
        ratio = inline.to_best
        possible, spread = ratio / inline.to_limit, _spread(inline, ratio)
        yield at_most(where, "inline to the best other", ratio, ASKED_TO_BEST, spread=spread, limit=possible)
    whole = next((row for row in found if row.mode == STEP), None)
    if whole is not None:
        ratio = whole.fastest_s / inline.fastest_s
        yield at_most(where, "step to inline", ratio, ASKED_STEP, spread=_spread(whole, ratio), limit=1.0)
    unsplit = next((row for row in found if row.mode == TORCH and row.graphs == 1), None)
    if unsplit is not None:
        ratio = unsplit.fastest_s / inline.fastest_s
        possible, spread = ratio * inline.to_limit, _spread(unsplit, ratio)
        what = "torch's, one graph, to inline"
        yield at_least(where, what, ratio, ASKED_UNSPLIT, spread=spread, limit=possible)


def _spread(row: Row, ratio: float) -> Ends:
    first, third = (ratio * quartile / row.fastest_s for quartile in row.spread_s)
    return first, third


def section(found: Sequence[Measured], facts: Mapping[str, str]) -> Section:
    """All models and networks; there are no claims without a slow network.

    Args:
        found: the measurements.
        facts: the conditions.
    """
    judged = [each for each in found if each.network.emulated and INLINE in each.figures.steps_s]
    names = [f"{each.figures.model} at {each.rate}" for each in judged]
    asked = [
        claim for name, each in zip(names, judged, strict=True) for claim in claims(name, rows(each.figures))
    ]
    asked += [
        at_most(name, "inline to the limit", None, ASKED_TO_LIMIT)
        for name in (f"{model} at {rate}" for rate in RATES for model in WORKLOADS)
        if name not in names
    ]
    return Section("step", facts, tuple(asked), tuple(map(grid, found)))


def grid(measured: Measured) -> Grid:
    """The table of one model over one network."""
    figures = measured.figures
    columns = ("mode", "fastest step, ms", "median (quartiles)", "to the limit", "exposed", "peak, MiB")
    limit_ms = milliseconds(limit(fastest_parts(figures)))
    return Grid(
        f"{WORKLOADS[figures.model].about}; {measured.network.description}; physical limit {limit_ms} ms",
        (*columns, "to whole's"),
        tuple(
            (
                row.mode + ("" if row.graphs is None else f" (graphs: {row.graphs})"),
                milliseconds(row.fastest_s),
                f"{milliseconds(row.step_s)} ({'–'.join(map(milliseconds, row.spread_s))})",
                number(row.to_limit),
                percent(row.exposed),
                f"{row.peak_bytes / MIB:.1f}",
                number(row.to_whole_peak),
            )
            for row in rows(figures)
        ),
    )


def parts_line(figures: Figures) -> str:
    """The limit and its parts, as text."""
    parts = fastest_parts(figures)
    sent = sum(figures.bucket_bytes) / MIB
    return (
        f"physical limit {milliseconds(limit(parts))} ms: forward {milliseconds(parts['forward'])}, "
        f"backward {milliseconds(parts['backward'])}, "
        f"first bucket after {percent(parts['first_bucket'])} of it, "
        f"all-reduce of {sent:.1f} MiB in {len(figures.bucket_bytes)} buckets {milliseconds(parts['comm'])}, "
        f"of the last one {milliseconds(parts['last_bucket'])}, update {milliseconds(parts['update'])}"
    )


def milliseconds(value_s: float) -> str:
    """Seconds as whole milliseconds."""
    return f"{1000 * value_s:.0f}"


def percent(share: float | None) -> str:
    """A share, or a dash where there is none.

    >>> percent(0.256)
    '26 %'
    """
    return "–" if share is None else f"{100 * share:.0f} %"
