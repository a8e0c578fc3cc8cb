"""What a step and a link were measured to cost: a profile and a link.

Times are in seconds, sizes in bytes. Invariant: a record names the hardware and the versions that it was
measured with; one from a file is used only where it fits, and if its numbers are possible.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.limits import MIB
from ddpopt.planning.stored import Stored

LARGEST = 1 << 23
"""Bytes of the largest all-reduce that a link is measured with."""
Time = TypeVar("Time", float, Tensor)


def conditions() -> dict[str, str]:
    """The hardware and the versions of this process, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    threads = str(torch.get_num_threads())
    return {"torch": str(torch.__version__), "host": platform.node(), "device": device, "threads": threads}


@dataclass(frozen=True)
class Gradient:
    """One gradient of a profiled step.

    Attributes:
        spec: the parameter's name, size, dtype and device.
        ready_s: when it is complete, in seconds after backward began.
    """

    spec: ParamSpec
    ready_s: float


@dataclass(frozen=True)
class Profile(Stored):
    """How long the parts of a training step take while nothing is sent.

    Attributes:
        gradients: in ready order.
        forward_s: from the beginning of the step to the beginning of backward, in seconds.
        backward_s: duration of backward, in seconds.
        update_s: from the end of backward to the end of the step, in seconds.
        strategy: how the step ran: ``"eager"``, ``"inline"`` or ``"split"``.
        world_size: number of ranks.
        measured: hardware and versions, by name.
    """

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    update_s: float
    strategy: str
    world_size: int
    measured: Mapping[str, str]
    FORMAT = 2

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("it has no gradients")

    def require_fit(self, where: str, **others: Sequence[object]) -> None:
        """Check that this was measured with this release of torch, for what it is used for.

        Args:
            where: it came from, for the message.
            others: more that must be equal, by name: in the profile, and here.

        Raises:
            UsageError: it was not; the message has each difference.
        """
        releases = [str(of).partition("+")[0] for of in (self.measured.get("torch"), torch.__version__)]
        pairs = {"torch": releases, **others}
        lines = [f"  - {what}: {then}, here {here}" for what, (then, here) in pairs.items() if then != here]
        if lines:
            raise UsageError(
                "\n".join([f"{where}: measured for something else:", *lines, "Measure it again."])
            )


@dataclass(frozen=True)
class Link(Stored):
    """The cost of a bucket in a stream: ``max(latency_s, nbytes * seconds_per_byte)``.

    An all-reduce's latency is hidden by the transfers next to it, so only the larger of the two counts.

    Attributes:
        latency_s: cost of an all-reduce of a few bytes, in seconds.
        seconds_per_byte: cost of one more byte, in seconds.
        processor_s_per_byte: how long sending a byte delays the computation next to it, in seconds.
        busy: how many times as long sending takes next to computation.
        residual: median of the relative differences between measured streams and this formula.
        backend: the group's backend, for instance ``"gloo"``.
        world_size: number of ranks.
        measured: hardware and versions, by name.
    """

    latency_s: float
    seconds_per_byte: float
    processor_s_per_byte: float
    busy: float
    residual: float
    backend: str
    world_size: int
    measured: Mapping[str, str]
    FORMAT = 2

    def __post_init__(self) -> None:
        if self.busy < 1:
            raise ValueError(f"busy is {self.busy!r}")

    def cost_s(self, nbytes: Time) -> Time:
        """How long one bucket of this size occupies the link while nothing is computed, in seconds."""
        return _within(nbytes * self.seconds_per_byte, self.latency_s, math.inf)

    def back_s(self, nbytes: Time, start_s: Time, computed_s: Time) -> Time:
        """When a bucket that is sent at `start_s` is back, if computation ends at `computed_s`."""
        cost = self.cost_s(nbytes)
        overlap = _within(computed_s - start_s, 0.0, self.busy * cost)
        return start_s + cost + overlap * (1 - 1 / self.busy)

    def __str__(self) -> str:
        each, mebibyte = (f"{s * 1000:.2f} ms" for s in (self.latency_s, MIB * self.seconds_per_byte))
        where = f"{self.backend}, {self.world_size} ranks"
        return f"link: {where}, {each} a bucket, {mebibyte} a MiB, {self.residual:.0%} off in the median"


def _within(value: Time, least: float, most: Any) -> Time:
    """Of numbers, or of each of some numbers, the nearest one within limits."""
    if isinstance(value, Tensor):
        return value.clamp(least).minimum(torch.as_tensor(most))
    return min(max(value, least), float(most))


def ms(seconds: float) -> str:
    """A time in milliseconds, with its unit.

    >>> ms(1.23456)
    '1,234.6 ms'
    """
    return f"{seconds * 1000:,.1f} ms"
