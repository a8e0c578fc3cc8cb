"""The picture of a trajectory: how far a number was from eager's, with the envelope behind it.

Coordinates for the template `verdict.html.jinja`. Invariant: what is outside of the envelope is above it in
the picture, too, also where it is infinite.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ddpopt.judge.verdict import Drift

WIDTH = 640.0
HEIGHT = 170.0
LEFT = 64.0
TOP = 10.0
BOTTOM = 24.0
"""Room for the figures at the left and below, in pixels."""
MOST_TICKS = 5


@dataclass(frozen=True)
class Curve:
    """One drift, in pixels from the upper left corner.

    Attributes:
        name: the number.
        envelope: the corners of what rounding explains.
        distances: the corners of the line.
        sizes: those of the line of eager's own values.
        outside: the points outside of the envelope.
        ticks: heights with their figures.
        steps: places along the axis with their steps.
        told: the picture in words.
    """

    name: str
    envelope: str
    distances: str
    sizes: str
    outside: tuple[tuple[float, float], ...]
    ticks: tuple[tuple[float, str], ...]
    steps: tuple[tuple[float, int], ...]
    told: str


def curve(drift: Drift) -> Curve:
    """Draw the drift of a number, on a logarithmic scale."""
    scale = _Scale(drift)
    xs = [scale.x(step) for step in drift.steps]
    bounds = [scale.y(bound) for bound in drift.bounds]
    distances = [scale.y(distance) for distance in drift.distances]
    floor = HEIGHT - BOTTOM
    envelope = [(xs[0], floor), *zip(xs, bounds, strict=True), (xs[-1], floor)] if xs else []
    pairs = zip(drift.distances, drift.bounds, strict=True)
    outside = [distance > bound for distance, bound in pairs]
    points = [(x, y) for x, y, is_out in zip(xs, distances, outside, strict=True) if is_out]
    return Curve(
        name=drift.name,
        envelope=_path(envelope),
        distances=_path(zip(xs, distances, strict=True)),
        sizes=_path((x, scale.y(size)) for x, size in zip(xs, drift.sizes, strict=True)),
        outside=tuple(points),
        ticks=tuple(scale.ticks()),
        steps=tuple((scale.x(step), step) for step in _some(drift.steps)),
        told=_told(drift, sum(outside)),
    )


def _told(drift: Drift, outside: int) -> str:
    if not drift.steps:
        return f"{drift.name}: no step"
    last = (
        f"{drift.distances[-1]:.2g} from eager at step {drift.steps[-1]}, where rounding explains "
        f"{drift.bounds[-1]:.2g}"
    )
    return f"{drift.name}: {last}; outside of the envelope in {outside} of {len(drift.steps)} steps"


class _Scale:
    """Where a step and a value are drawn."""

    def __init__(self, drift: Drift) -> None:
        values = [value for value in (*drift.distances, *drift.bounds, *drift.sizes) if 0 < value < math.inf]
        self.low = math.floor(math.log10(min(values, default=1e-9)))
        self.high = max(math.ceil(math.log10(max(values, default=1.0))), self.low + 1)
        self._first = drift.steps[0] if drift.steps else 0
        self._spread = max(drift.steps[-1] - self._first, 1) if drift.steps else 1

    def x(self, step: int) -> float:
        """The place of a step."""
        return round(LEFT + (WIDTH - LEFT - 10) * (step - self._first) / self._spread, 1)

    def y(self, value: float) -> float:
        """The height of a value; 0 is at the bottom, infinity at the top."""
        if value <= 0:
            return HEIGHT - BOTTOM
        exponent = math.log10(value) if math.isfinite(value) else self.high
        share = min(max((exponent - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(TOP + (HEIGHT - BOTTOM - TOP) * (1 - share), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Powers of 10 with their heights."""
        stride = max(1, math.ceil((self.high - self.low) / (MOST_TICKS - 1)))
        for exponent in range(self.low, self.high + 1, stride):
            yield self.y(10.0**exponent), f"1e{exponent}"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _some(steps: Sequence[int]) -> Sequence[int]:
    """At most a few of the steps, evenly."""
    return steps[:: max(1, math.ceil(len(steps) / (2 * MOST_TICKS)))]
