"""The tuned buckets are the best ones: compared with every division, in the simulated model."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import calibrated, simulate
from ddpopt.tuning.tune import FASTER, FINEST, LATE, _best, plan_of, tune
from tests.support.drawn_profiles import gradients, links, step_of
from tests.support.profiles import share

LINK = Link(1e-3, 1e-4, 0.0, 1.0, 0.0, "gloo", 2, {})


def back_s(groups: Sequence[Sequence[Gradient]], drawn: Sequence[Gradient], link: Link) -> float:
    """When the last bucket is back in the simulated step."""
    return step_of(groups, profile_of(drawn), link).buckets[-1].back_s


def profile_of(drawn: Sequence[Gradient]) -> Profile:
    return Profile(tuple(drawn), 0.0, drawn[-1].ready_s, 0.0, "eager", 2, {})


def tuned_of(drawn: Sequence[Gradient], link: Link, most: float) -> list[list[Gradient]]:
    by_name = {gradient.spec.name: gradient for gradient in drawn}
    return [[by_name[name] for name in b.params] for b in tune(profile_of(drawn), link, most).buckets]


def kind(gradient: Gradient) -> object:
    return gradient.spec.dtype, gradient.spec.name if gradient.spec.sparse else None


def divisions(drawn: Sequence[Gradient], most: float) -> Iterator[list[list[Gradient]]]:
    """Every division of the ready order into runs, with a bucket for each class of a run."""
    for cuts in itertools.product([False, True], repeat=len(drawn) - 1):
        buckets: list[list[Gradient]] = []
        run: dict[object, list[Gradient]] = {}
        for gradient, cut in zip(drawn, [*cuts, True], strict=True):
            run[kind(gradient)] = [*run.pop(kind(gradient), []), gradient]  # the class that ends last is last
            if cut:
                buckets, run = [*buckets, *run.values()], {}
        if all(fits(bucket, most) for bucket in buckets):
            yield buckets


def fits(bucket: Sequence[Gradient], most: float) -> bool:
    return len(bucket) == 1 or sum(g.spec.nbytes for g in bucket) <= most


def delayed(drawn: Sequence[Gradient], which: Sequence[Gradient], by: float) -> list[Gradient]:
    """With some of them complete later, by a share of the time since the first of them."""
    late_s = {g.spec.name: by * (g.ready_s - which[0].ready_s) for g in which}
    return [replace(g, ready_s=g.ready_s + late_s.get(g.spec.name, 0.0)) for g in drawn]


@share(4)
@given(gradients(10), links, st.sampled_from([math.inf, 4, 9]))
def test_no_division_of_the_ready_order_ends_earlier_and_what_waits_together_is_merged(
    drawn: list[Gradient], link: Link, most: float
) -> None:
    tuned = tuned_of(drawn, link, most)
    assert sorted(g.spec.name for b in tuned for g in b) == sorted(g.spec.name for g in drawn)
    assert all(fits(bucket, most) and len({*map(kind, bucket)}) == 1 for bucket in tuned)
    others = [(back_s(each, drawn, link), each) for each in divisions(drawn, most)]
    tuned_s = back_s(tuned, drawn, link)
    assert tuned_s <= min(end for end, _ in others) * (1 + 1e-9)
    if len({*map(kind, drawn)}) > 1 and link.busy > 1:  # merges may be undone
        return
    faster = replace(link, **{n: FASTER * getattr(link, n) for n in ("latency_s", "seconds_per_byte")})
    apart = _best(drawn, (link, faster), most)
    if len({*map(kind, drawn)}) == 1:
        ends = [back_s(each, drawn, faster) for end, each in others if end <= tuned_s * (1 + 1e-9)]
        assert back_s(apart, drawn, faster) <= min(ends) * (1 + 1e-9)
    for late in (delayed(drawn, bucket, LATE) for bucket in tuned):
        assert back_s(tuned, late, faster) <= back_s(apart, late, faster) * (1 + 1e-9)
    for place, sent in enumerate(step_of(tuned, profile_of(drawn), faster).buckets):
        other = next((o for o in tuned[place + 1 :] if kind(o[0]) == kind(tuned[place][0])), [])
        if other and fits([*tuned[place], *other], most):
            delay_s = link.processor_s_per_byte * sum(g.spec.nbytes for b in tuned[:place] for g in b)
            late_s = LATE * (other[-1].ready_s - tuned[place][0].ready_s)
            assert other[-1].ready_s + late_s + delay_s > sent.sent_s


def test_where_nothing_waits_buckets_are_few() -> None:
    drawn = [Gradient(ParamSpec(f"p{n}", 1, "float32", "cpu"), float(n)) for n in range(400)]
    assert 2 < len(tuned_of(drawn, replace(LINK, seconds_per_byte=0), math.inf)) <= 1 / FINEST + 1


@given(gradients(), links)
def test_a_calibrated_link_delays_the_computation_as_measured(drawn: list[Gradient], link: Link) -> None:
    plan, profile = plan_of(([g.spec] for g in drawn), ""), replace(profile_of(drawn), forward_s=1.0)
    end_s = simulate(plan, profile, link).backward_s
    found = calibrated(replace(link, processor_s_per_byte=0.0), plan, profile, end_s)
    assert simulate(plan, profile, found).backward_s == pytest.approx(end_s, 0.02)


@pytest.mark.parametrize(("sparse", "dtypes", "count"), [(0, 2, 5000), (26, 1, 36), (0, 8, 80)])
def test_tuning_ends_for_many_gradients_and_for_many_classes(sparse: int, dtypes: int, count: int) -> None:
    specs = [ParamSpec(f"p{n}", 1 + n % 7, f"dtype {n % dtypes}", "cpu", n < sparse) for n in range(count)]
    tuned = tuned_of([Gradient(spec, n * 1e-3) for n, spec in enumerate(specs)], LINK, 5)
    assert sum(len({g.spec.dtype for g in b}) == 1 and len(b) for b in tuned) == count
