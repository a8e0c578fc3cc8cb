"""Hypothesis strategies for tuning: profiles of models, links, and the simulated step of some buckets."""

from collections.abc import Sequence

from hypothesis import strategies as st

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import Timeline, simulate
from ddpopt.tuning.tune import plan_of

times = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def gradients(draw: st.DrawFn, most: int = 14) -> list[Gradient]:
    each = [("float32", False), ("float32", False), ("bfloat16", False), ("float32", True)]
    kinds = st.sampled_from(draw(st.sampled_from([each[:1], each])))
    ready = sorted(draw(st.lists(times, min_size=draw(st.sampled_from([1, most])), max_size=most)))
    sizes = [(draw(st.integers(1, 5)), *draw(kinds)) for _ in ready]
    specs = [ParamSpec(f"p{n}", size, dtype, "cpu", sparse) for n, (size, dtype, sparse) in enumerate(sizes)]
    return [*map(Gradient, specs, ready)]


links = st.builds(
    lambda a, b, c, busy: Link(a, b, min(b, c), busy, 0.0, "gloo", 2, {}),
    times.map(lambda t: t / 4),
    times.map(lambda t: t / 8),
    times.map(lambda t: t / 20),
    st.sampled_from([1.0, 1.25, 2.0]),
)


def step_of(groups: Sequence[Sequence[Gradient]], profile: Profile, link: Link) -> Timeline:
    return simulate(plan_of([[g.spec for g in group] for group in groups], ""), profile, link)
