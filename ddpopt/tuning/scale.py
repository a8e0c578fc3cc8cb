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

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.tuning.records import Link, Profile
from ddpopt.tuning.simulate import Timeline, simulate
from ddpopt.tuning.tune import tune

HEADER = " ranks  best   step, ms  exposed, ms  efficiency  buckets  MiB: first, largest"
NOTE = """A model, not a measurement: all ranks alike, each hop as on the measured link.
Efficiency: the share of the step without communication; each rank keeps its batch."""


def scaled(link: Link, world_size: int, algorithm: str = "ring") -> Link:
    """A measured link at another world size.

    Args:
        link: as measured, on at least two ranks.
        world_size: at least 2.
        algorithm: ``"ring"`` or ``"tree"``.

    Returns:
        The link. Its latencies grow with the hops, and its costs of a byte with the bytes that a rank sends.

    Raises:
        UsageError: one of the two world sizes is less than 2.
    """
    measured = link.world_size
    if min(world_size, measured) < 2:
        got = f"got {world_size}, and a link of {measured}"
        raise UsageError(f"--world-size: expected 2 or more ranks, and a link of 2 or more; {got}")
    hops, share = world_size - 1, (world_size - 1) / world_size
    if algorithm == "tree":
        hops, share = (world_size - 1).bit_length(), 1.0
    far, much = hops / (measured - 1), share / ((measured - 1) / measured)
    by = {"latency_s": far, "seconds_per_byte": much, "processor_s_per_byte": much}
    costs: dict[str, Any] = {name: factor * getattr(link, name) for name, factor in by.items()}
    return replace(link, world_size=world_size, **costs)


def world_sizes(text: str) -> list[int]:
    """Read world sizes with commas between them; raises UsageError if one is not a number of at least 2."""
    if not all(size.strip().isdecimal() and int(size) > 1 for size in text.split(",")):
        raise UsageError(f"--world-size: expected numbers of 2 or more, such as 8,64,512, got {text!r}")
    return [*map(int, text.split(","))]


def best(profile: Profile, link: Link, size: int) -> tuple[str, Timeline]:
    """Tune for a world size, with a ring and with a tree, and keep the better one.

    Args:
        profile: of the model; each rank has as large a batch as it had there.
        link: as for `scaled`.
        size: of the world, as for `scaled`.

    Returns:
        The algorithm's name, and the step with the tuned plan.
    """
    costs = {algorithm: scaled(link, size, algorithm) for algorithm in ("ring", "tree")}
    found = {name: simulate(tune(profile, cost), profile, cost) for name, cost in costs.items()}
    return min(found.items(), key=lambda item: item[1].step_s)


def report(
    profile: Profile, link: Link, sizes: str, here_s: tuple[float, float] | None = None
) -> tuple[str, dict[str, Timeline]]:
    """The tuned step at some world sizes, as a table and for a picture.

    Args:
        profile: as for `best`.
        link: as for `scaled`.
        sizes: world sizes with commas between them, such as ``"8,64,512,4096"``.
        here_s: a step on the ranks of the link, predicted and measured, in seconds; None if there is none.

    Returns:
        Text, and the steps by name, as `ddpopt.tuning.pictures.svg` takes them.

    Raises:
        UsageError: a world size is not a number of at least 2.
    """
    lines, steps = [HEADER, "-" * len(HEADER)], {}
    ideal_s = profile.forward_s + profile.backward_s + profile.update_s
    for size in world_sizes(sizes):
        name, step = best(profile, link, size)
        steps[f"{size:,} ranks, {name}"] = step
        mib = [sent.nbytes / 2**20 for sent in step.buckets] or [0.0]
        row = f"{size:6,}  {name}  {step.step_s * 1000:9,.1f}  {step.exposed_s * 1000:11,.1f}"
        lines.append(f"{row}  {ideal_s / step.step_s:10.1%}  {len(mib):7,}  {mib[0]:10.2f}, {max(mib):7.2f}")
    here = f"The measured {link.world_size} ranks:"
    lines += [NOTE, f"{here} half of all-reduces are within {link.residual:.0%} of the line through them."]
    if here_s:
        predicted_s, measured_s = here_s
        error = predicted_s / measured_s - 1
        lines.append(f"{here} a step takes {measured_s * 1000:,.1f} ms, {error:+.1%} in the model.")
    return "\n".join(lines), steps
