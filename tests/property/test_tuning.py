"""The tuned buckets are the best ones: compared with every partition, in the simulated model."""

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import timeline
from ddpopt.tuning.tune import partition

times = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def gradients(draw: st.DrawFn, most: int = 9) -> list[Gradient]:
    kinds = st.sampled_from([("float32", False), ("float32", False), ("bfloat16", False), ("float32", True)])
    ready = sorted(draw(st.lists(times, min_size=1, max_size=most)))
    found = []
    for index, ready_s in enumerate(ready):
        dtype, sparse = draw(kinds)
        found.append(Gradient(ParamSpec(f"p{index}", draw(st.integers(1, 5)), dtype, "cpu", sparse), ready_s))
    return found


links = st.builds(
    lambda a, b, c: Link(a, b, 0.0, c, 0.0, "gloo", 2, {}),
    times.map(lambda t: t / 4),
    times.map(lambda t: t / 8),
    times.map(lambda t: t / 20),
)


def end_of(buckets: Sequence[Sequence[Gradient]], link: Link) -> float:
    sizes = [sum(g.spec.nbytes for g in bucket) for bucket in buckets]
    done = [max(g.ready_s for g in bucket) for bucket in buckets]
    return timeline(sizes, done, Profile((), 0.0, 0.0, 0.0, "eager", 2, {}), link).reduced_s


def every_partition(gradients: Sequence[Gradient], most: float) -> Iterator[list[list[Gradient]]]:
    """Contiguous in each class, in the order of the last gradients."""
    classes: dict[object, list[Gradient]] = {}
    for place, g in enumerate(gradients):
        classes.setdefault((g.spec.dtype, place if g.spec.sparse else None), []).append(g)
    order = {g.spec.name: place for place, g in enumerate(gradients)}

    def contiguous(own: list[Gradient]) -> Iterator[list[list[Gradient]]]:
        for ends in itertools.product((False, True), repeat=len(own) - 1):
            parts = [[own[0]]]
            for g, is_new in zip(own[1:], ends, strict=True):
                parts.append([g]) if is_new else parts[-1].append(g)
            if all(len(part) == 1 or sum(g.spec.nbytes for g in part) <= most for part in parts):
                yield parts

    for choice in itertools.product(*(list(contiguous(own)) for own in classes.values())):
        yield sorted(itertools.chain(*choice), key=lambda bucket: order[bucket[-1].spec.name])


@given(gradients(), links, st.sampled_from([None, 4, 9]))
def test_no_partition_ends_earlier_or_equally_early_with_fewer_buckets(
    drawn: list[Gradient], link: Link, most: int | None
) -> None:
    tuned = partition(drawn, link, most)
    assert sorted(g.spec.name for b in tuned for g in b) == sorted(g.spec.name for g in drawn)
    found = end_of(tuned, link)
    for other in every_partition(drawn, most or float("inf")):
        end = end_of(other, link)
        assert found <= end * (1 + 1e-8)
        assert len(tuned) <= len(other) or end > found * (1 - 1e-8) + 1e-12
