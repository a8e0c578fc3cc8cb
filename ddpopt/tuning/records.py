"""What a step and a link were measured to cost: a profile and a link, each a frozen record and a JSON file.

Times are in seconds, sizes in bytes. Invariant: a record names the hardware and the versions that it was
measured with, and is refused where it does not fit.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ddpopt.ddp.agreement import agree
from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.limits import MIB
from ddpopt.planning.plan import Bucket, Plan

FORMAT = 1
LARGEST = 1 << 23
"""Bytes of the largest all-reduce that a link is measured with."""
SHOWN = 5
TYPES: Mapping[str, Any] = {"float": (int, float), "int": int, "str": str, "Mapping[str, str]": Mapping}
LEAST = {"busy": 1, "world_size": 1}
"""Of values that are not just positive."""


@dataclass(frozen=True)
class Stored:
    """What is stored as a JSON object with a mark of its kind and format."""

    def to_json(self) -> str:
        """This as JSON text; `from_json` returns an equal one."""
        return json.dumps({f"ddpopt_{type(self).__name__.lower()}": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Read what `to_json` wrote, or what ``ddpopt tune --json`` wrote with it.

        Args:
            text: the document.
            where: it came from, for messages.

        Raises:
            UsageError: `text` is not such a document.
        """
        kind = cls.__name__.lower()
        try:
            row = json.loads(text)
            row = dict(row.get(kind, row))
            if row.pop(f"ddpopt_{kind}") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            found = cls._of(row)
            require_values(found)
            return found
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            got = f"got something else: {type(error).__name__}: {error}"
            raise UsageError(
                f"{where}expected a {kind} that ddpopt wrote, {got}. Measure it again"
            ) from error

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Self:
        return cls(**row)


def require_values(record: Any) -> None:
    """Check types, and that numbers are finite and not negative; raises ValueError."""
    for field in fields(record):
        value, declared = getattr(record, field.name), field.type
        kind = TYPES.get(declared if isinstance(declared, str) else declared.__name__)
        least = LEAST.get(field.name, 0)
        right = kind is None or isinstance(value, kind)
        if not right or (isinstance(value, (int, float)) and not least <= value < math.inf):
            raise ValueError(f"{field.name} is {value!r}")


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

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Self:
        gradients = [Gradient(ParamSpec(**each["spec"]), each["ready_s"]) for each in row["gradients"]]
        for each in gradients:
            require_values(each)
            require_values(each.spec)
        return cls(**{**row, "gradients": tuple(gradients)})

    def require_fit(self, plan: Plan, world_size: int | None = None) -> None:
        """Check that this is a profile of a plan's model, with this release of torch.

        Args:
            plan: a plan for the model.
            world_size: number of ranks that it must have been measured on; None for any.

        Raises:
            UsageError: it is not; the message has each difference.
        """
        here = str(torch.__version__)
        pairs: dict[str, tuple[object, object]] = {"torch": (self.measured.get("torch", here), here)}
        pairs["number of ranks"] = self.world_size, world_size or self.world_size
        sizes = [each.spec.nbytes for each in self.gradients], [bucket.nbytes for bucket in plan.buckets]
        pairs["bytes of all gradients"] = sum(sizes[0]), sum(sizes[1])
        own = {gradient.spec.name: gradient.spec.dtype for gradient in self.gradients}
        other = {name: bucket.dtype for bucket in plan.buckets for name in bucket.params}
        pairs |= {f"parameter {n!r}": (own.get(n, "none"), other.get(n, "none")) for n in {**own, **other}}
        lines = [f"  - {what}: {then}, here {here}" for what, (then, here) in pairs.items() if then != here]
        if lines:
            more = f"  - and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "Measure it again."
            raise UsageError("\n".join(["the profile is of something else:", *lines[:SHOWN], more]))


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

    def cost_s(self, nbytes: float) -> float:
        """How long one bucket of this size occupies the link while nothing is computed, in seconds."""
        return max(self.latency_s, nbytes * self.seconds_per_byte)

    def back_s(self, nbytes: float, start_s: float, computed_s: float) -> float:
        """When a bucket that is sent at `start_s` is back, if computation ends at `computed_s`."""
        cost = self.cost_s(nbytes)
        overlap = min(max(computed_s - start_s, 0.0), self.busy * cost)
        return start_s + cost + overlap * (1 - 1 / self.busy)

    def __str__(self) -> str:
        each, mebibyte = (f"{s * 1000:.2f} ms" for s in (self.latency_s, MIB * self.seconds_per_byte))
        where = f"{self.backend}, {self.world_size} ranks"
        return f"link: {where}, {each} a bucket, {mebibyte} a MiB, {self.residual:.0%} off in the median"


def read(what: str, file: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read; the message begins with `what`.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        came = f"cannot read {str(file)!r}: {error}"
        raise UsageError(f"{what}: {came}; name a file that ddpopt wrote") from error


def conditions() -> dict[str, str]:
    """The hardware and the versions of this process, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {"torch": str(torch.__version__), "python": platform.python_version(), "host": platform.node()}
    return {**versions, "device": device or platform.machine(), "threads": str(torch.get_num_threads())}


def largest(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    """Of each value the largest of all ranks; each must call this with as many.

    Raises:
        InfrastructureError: a rank did not answer in time.
    """
    texts = agree(group, "ddpopt: times of all ranks", json.dumps([*values]), LONGEST_WAIT)
    return [max(each) for each in zip(*map(json.loads, texts), strict=True)]


def plan_of(groups: Iterable[Sequence[ParamSpec]], reason: str) -> Plan:
    """A plan with these buckets and no segments, for `ddpopt.impose`."""
    return Plan(tuple(Bucket.of(i, specs, 0, reason) for i, specs in enumerate(groups)), (), ())


def ms(seconds: float) -> str:
    """A time in milliseconds, with its unit.

    >>> ms(1.23456)
    '1,234.6 ms'
    """
    return f"{seconds * 1000:,.1f} ms"


def order_of(gradients: Iterable[Gradient]) -> list[Gradient]:
    """Gradients in the order in which they are complete; equal times keep the order given."""
    return sorted(gradients, key=lambda gradient: gradient.ready_s)
