"""The tuned buckets are the best ones: compared with every partition, in the simulated model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning import tune
from ddpopt.tuning.records import Gradient, Link, Profile, plan_of
from ddpopt.tuning.simulate import Timeline, simulate

LINK = Link(1e-3, 1e-4, 0.0, 1.0, 0.0, "gloo", 2, {})
times = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def gradients(draw: st.DrawFn, most: int = 14) -> list[Gradient]:
    kinds = st.sampled_from([("float32", False), ("float32", False), ("bfloat16", False), ("float32", True)])
    ready = sorted(draw(st.lists(times, min_size=1, max_size=most)))
    found = []
    for index, ready_s in enumerate(ready):
        dtype, sparse = draw(kinds)
        found.append(Gradient(ParamSpec(f"p{index}", draw(st.integers(1, 5)), dtype, "cpu", sparse), ready_s))
    return found


links = st.builds(
    lambda a, b, c, busy: Link(a, b, c, busy, 0.0, "gloo", 2, {}),
    times.map(lambda t: t / 4),
    times.map(lambda t: t / 8),
    times.map(lambda t: t / 20),
    st.sampled_from([1.0, 1.25, 2.0]),
)


def step_of(groups: Sequence[Sequence[Gradient]], profile: Profile, link: Link) -> Timeline:
    return simulate(plan_of([[g.spec for g in group] for group in groups], ""), profile, link)


def every_end(gradients: Sequence[Gradient], link: Link, most: float) -> list[tuple[float, int]]:
    """When the last bucket is back, and how many there are, for every partition of the gradients.

    Contiguous in each class, in the order of the last gradients.
    """
    classes: dict[object, list[tuple[int, Gradient]]] = {}
    for place, g in enumerate(gradients):
        classes.setdefault((g.spec.dtype, place if g.spec.sparse else None), []).append((place, g))
    found: list[tuple[float, int]] = []

    def send(rest: list[list[tuple[int, Gradient]]], last: int, free: float, sent: int, count: int) -> None:
        if not any(rest):
            found.append((free, count))
        for index, own in enumerate(rest):
            nbytes = 0
            for taken, (place, g) in enumerate(own, start=1):
                nbytes += g.spec.nbytes
                if place > last and (taken == 1 or nbytes <= most):
                    start = max(free, g.ready_s + sent * link.processor_s_per_byte)
                    left = [*rest[:index], own[taken:], *rest[index + 1 :]]
                    computed = gradients[-1].ready_s + sent * link.processor_s_per_byte
                    send(left, place, link.back_s(nbytes, start, computed), sent + nbytes, count + 1)

    send([*classes.values()], -1, 0.0, 0, 0)
    return found


@given(gradients(), links, st.sampled_from([math.inf, 4, 9]), st.sampled_from([1e-6, 1e-3, 0.1]))
def test_no_partition_ends_earlier_or_equally_early_on_all_links_with_fewer_buckets(
    drawn: list[Gradient], link: Link, most: float, tie: float
) -> None:
    shares = tuple((share, tie) for share, _ in tune.LINKS)
    with patch.object(tune, "LINKS", shares):
        tuned = tune.partition(drawn, link, most)
    assert sorted(g.spec.name for b in tuned for g in b) == sorted(g.spec.name for g in drawn)
    scaled = (
        replace(link, latency_s=share * link.latency_s, seconds_per_byte=share * link.seconds_per_byte)
        for share, _ in shares
    )
    ends = [every_end(drawn, each, most) for each in scaled]
    latest = [min(end for end, _ in each) * (1 + tie) for each in ends]
    profile = Profile(tuple(drawn), 0.0, 0.0, 0.0, "eager", 2, {})
    assert step_of(tuned, profile, link).reduced_s <= latest[0] + 1e-9
    # rounding decides about an end that is the latest itself
    fewest = min(n for end, n in ends[0] if end <= latest[0] + 1e-10)
    rows = [
        (n, [end <= by - 1e-10 for (end, _), by in zip(row, latest, strict=True)])
        for row in zip(*ends, strict=True)
        for n in [row[0][1]]
    ]
    surely = min((n for n, good in rows if all(good)), default=99)
    assert fewest <= len(tuned) <= surely


def test_5000_gradients_of_two_dtypes_need_no_more_steps_than_the_limit() -> None:
    specs = [ParamSpec(f"p{n}", 1 + n % 7, "bfloat16" if n % 3 else "float32", "cpu") for n in range(5000)]
    tuned = tune.partition([Gradient(spec, n * 1e-3) for n, spec in enumerate(specs)], LINK)
    assert sorted(g.spec.name for b in tuned for g in b) == sorted(spec.name for spec in specs)
    assert all(len({g.spec.dtype for g in bucket}) == 1 for bucket in tuned)
