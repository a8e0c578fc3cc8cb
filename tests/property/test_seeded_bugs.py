"""The properties of cutting find bugs that are put in, and shrink each to a graph of a few nodes."""

import statistics

from tests.property.seeded_bugs import BUGS, look_for

ENOUGH = 20
LARGEST_MEDIAN_OPS = 6


def test_each_bug_that_is_put_in_is_found_and_shrinks_to_a_few_operations() -> None:
    found = {name: look_for(name) for name in BUGS}
    assert [name for name, each in found.items() if each is None] == []
    assert len(found) >= ENOUGH
    ops = {name: each.ops for name, each in found.items() if each is not None}
    assert statistics.median(ops.values()) <= LARGEST_MEDIAN_OPS, ops
