"""ddpopt.judge.report.curves: what is outside of the envelope is above it, also where it is infinite."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ddpopt.judge.report.curves import HEIGHT, WIDTH, curve
from ddpopt.judge.verdict import Drift

VALUES = st.one_of(st.just(0.0), st.just(math.inf), st.floats(1e-30, 1e30))


def points(path: str) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in path.split())
    return [(float(x), float(y)) for x, y in pairs]


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=60))
def test_every_point_is_in_the_picture_and_what_is_farther_is_higher(
    values: list[tuple[float, float, float]],
) -> None:
    distances, bounds, sizes = zip(*values, strict=True)
    drawn = curve(Drift("the loss", tuple(range(len(values))), distances, bounds, sizes))
    line, envelope = points(drawn.distances), points(drawn.envelope)[1:-1]
    assert len(line) == len(envelope) == len(values)
    for x, y in (*line, *envelope, *points(drawn.sizes)):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    for (_, y), (_, allowed), distance, bound in zip(line, envelope, distances, bounds, strict=True):
        assert (y <= allowed) if distance >= bound else (y >= allowed)
    assert len(drawn.outside) == sum(d > b for d, b in zip(distances, bounds, strict=True))
