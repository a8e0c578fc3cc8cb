"""The step on paper at world sizes that were not measured: the link's cost, extended to rings and trees.

It is a model. All ranks are alike, each is one hop from its neighbors over a link like the measured one, and
no other traffic shares it. Faster links within a machine, reduction in switches, and waiting for the slowest
of many ranks are not in it.

With `a` seconds per hop and `b` seconds per byte on a link, an all-reduce of `n` bytes over `p` ranks takes

- around a ring ``2 (p - 1) a + 2 (p - 1) / p n b``: reduce-scatter and all-gather as rings in R. Thakur,
  R. Rabenseifner and W. Gropp, Optimization of Collective Communication Operations in MPICH (2005); the
  factor of ``n b`` is that of the bus bandwidth in PERFORMANCE.md of the NCCL tests;
- up and down two binary trees ``2 ceil(log2 p) a + 2 n b``: P. Sanders, J. Speck and J. L. Träff, Two-tree
  algorithms for full bandwidth broadcast, reduction and scan (2009), as NCCL has them since version 2.4. The
  cost of pipelining, which grows with the root of `n`, is left out.

In a stream of all-reduces, the larger of the two terms counts (`ddpopt.tuning.records.Link`). So a tree is
faster below ``(p - 1) a / b`` bytes. The measured link is taken for a ring, and `a` and `b` follow from it.
Invariant: at the measured world size the ring is the measured link.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.tuning.records import LARGEST, Link, Profile
from ddpopt.tuning.simulate import Timeline, simulate
from ddpopt.tuning.tune import tune


def scaled(link: Link, world_size: int, algorithm: str = "ring") -> Link:
    """A measured link at another world size.

    Args:
        link: as measured, on at least two ranks.
        world_size: at least 2.
        algorithm: ``"ring"`` or ``"tree"``.

    Returns:
        The link. Its latencies grow with the hops, and its costs of a byte with the bytes that a rank sends.
    """
    measured = link.world_size
    hops = world_size - 1
    share = (world_size - 1) / world_size
    if algorithm == "tree":
        hops = (world_size - 1).bit_length()
        share = 1.0
    far = hops / (measured - 1)
    much = share / ((measured - 1) / measured)
    by = {"latency_s": far, "seconds_per_byte": much, "processor_s_per_byte": much}
    costs: dict[str, Any] = {name: factor * getattr(link, name) for name, factor in by.items()}
    return replace(link, world_size=world_size, **costs)


def world_sizes(text: str | None, measured: int) -> list[int]:
    """Read world sizes with commas between them.

    Args:
        text: the numbers; None for none.
        measured: the world size of the link.

    Raises:
        UsageError: one is not a number of at least 2, or the link says nothing about more ranks.
    """
    sizes = [] if text is None else text.split(",")
    if sizes and not (measured > 1 and all(size.strip().isdecimal() and int(size) > 1 for size in sizes)):
        got = f"got {text!r} and {measured}"
        raise UsageError(f"--world-size: expected numbers from 2 and a link of 2 or more ranks, {got}")
    return [*map(int, sizes)]


def steps_of(
    profile: Profile, link: Link, sizes: Iterable[int], most_bytes: float = LARGEST
) -> dict[str, Timeline]:
    """Tune for some world sizes, with a ring and with a tree, and keep the better one of each.

    Args:
        profile: of the model; each rank has as large a batch as it had there.
        link: as for `scaled`.
        sizes: the world sizes, as for `scaled`.
        most_bytes: as for `tune`.

    Returns:
        The steps, by the number of ranks and the algorithm.
    """
    found = {}
    for size in sizes:
        links = {f"{size:,} ranks, {name}": scaled(link, size, name) for name in ("ring", "tree")}
        plans = {name: tune(profile, each, most_bytes) for name, each in links.items()}
        steps = {name: simulate(plans[name], profile, each) for name, each in links.items()}
        best = min(steps, key=lambda name: steps[name].step_s)
        found[best] = steps[best]
    return found
