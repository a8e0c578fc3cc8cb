"""What a step and a link were measured to cost: a profile and a link, and how they are stored as JSON.

Times are in seconds, sizes in bytes. Invariant: a record names the hardware and the versions that it was
measured with; one from a file is used only where it fits, and if its numbers are possible.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.limits import MIB

FORMAT = 2
LEAST = {"busy": 1, "world_size": 1}
"""Of numbers that may not be 0."""
Record = TypeVar("Record")
LARGEST = 1 << 23
"""Bytes of the largest all-reduce that a link is measured with."""
SHOWN = 5
Time = TypeVar("Time", float, Tensor)


@dataclass(frozen=True)
class Stored:
    """A record that is stored as a JSON object, with its kind and format."""

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
            UsageError: `text` is not such a document, or was written by another version.
        """
        kind = cls.__name__.lower()
        try:
            row = json.loads(text)
            row = dict(row.get(kind, row))
            if (found := row.pop(f"ddpopt_{kind}")) != FORMAT:
                raise ValueError(f"format {found!r}, which another version wrote; this one has {FORMAT}")
            return cls._of(row)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            got = f"got something else: {type(error).__name__}: {error}"
            raise UsageError(
                f"{where}expected a {kind} that ddpopt wrote, {got}. Measure it again"
            ) from error

    @classmethod
    def from_file(cls, option: str, file: str | os.PathLike[str]) -> Self:
        """Read a file that an option names; raises UsageError as `read` and `from_json` do."""
        return cls.from_json(read(option, file), f"{option} {os.fspath(file)}: ")

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Self:
        return checked(cls(**row))


def checked(record: Record) -> Record:
    """A record whose numbers are finite and not negative; raises TypeError or ValueError for others."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if field.type in ("float", "int", int) and not LEAST.get(field.name, 0) <= value < math.inf:
            raise ValueError(f"{field.name} is {value!r}")
    return record


def read(option: str, file: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read; the message begins with `option`.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        came = f"cannot read {str(file)!r}: {error}"
        raise UsageError(f"{option}: {came}; name a file that ddpopt wrote") from error


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

    @property
    def alone_s(self) -> float:
        """The step without communication, in seconds."""
        return self.forward_s + self.backward_s + self.update_s

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Self:
        rows = [(checked(ParamSpec(**each["spec"])), each["ready_s"]) for each in row["gradients"]]
        return super()._of({**row, "gradients": tuple(checked(Gradient(*each)) for each in rows)})

    def require_fit(
        self, where: str, specs: Iterable[ParamSpec], others: Mapping[str, Sequence[object]]
    ) -> None:
        """Check that this is a profile of a model, with this release of torch.

        Args:
            where: it came from, for the message.
            specs: the model's parameters.
            others: more that must be equal, by name: in the profile, and here.

        Raises:
            UsageError: it is not; the message has each difference.
        """
        kinds = [_kinds(gradient.spec for gradient in self.gradients), _kinds(specs)]
        releases = [str(of).partition("+")[0] for of in (self.measured.get("torch"), torch.__version__)]
        pairs: dict[str, Sequence[object]] = {"torch": releases, **others}
        pairs |= {f"parameter {n!r}": [own.get(n, "none") for own in kinds] for n in kinds[0] | kinds[1]}
        lines = [f"  - {what}: {then}, here {here}" for what, (then, here) in pairs.items() if then != here]
        if lines:
            more = f"  - and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "Measure it again."
            raise UsageError("\n".join([f"{where}: measured for something else:", *lines[:SHOWN], more]))


def _kinds(specs: Iterable[ParamSpec]) -> dict[str, str]:
    return {s.name: f"{s.nbytes:,} bytes of {s.dtype}{', sparse' if s.sparse else ''}" for s in specs}


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
