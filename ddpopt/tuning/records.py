"""What a step and a link were measured to cost: a profile and a link, each a frozen record and a JSON file.

Times are in seconds, sizes in bytes. Invariant: a record names the hardware and the versions that it was
measured with, and is refused where it does not fit.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec

Record = TypeVar("Record", "Profile", "Link")
FORMAT = 1


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
class Profile:
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

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` returns an equal profile."""
        return _text("profile", self)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile that `to_json` wrote.

        Raises:
            UsageError: `text` is not such a document.
        """
        row = _row(cls, "profile", text)
        try:
            rows = [(ParamSpec(**each["spec"]), each["ready_s"]) for each in row["gradients"]]
        except (KeyError, TypeError) as error:
            raise UsageError(f"a profile: a gradient is malformed: {error!r}; write the file again") from error
        return cls(**{**row, "gradients": tuple(Gradient(*each) for each in rows)})


@dataclass(frozen=True)
class Link:
    """The cost of all-reduces on a process group: a stream of `n` buckets takes

    ``drain_s + n * latency_s + nbytes * seconds_per_byte``.

    Attributes:
        latency_s: cost of one more all-reduce, in seconds.
        seconds_per_byte: cost of one more byte, in seconds.
        drain_s: how long the last all-reduce is on its way when nothing follows it, in seconds.
        processor_s_per_byte: how long sending a byte delays the computation next to it, in seconds.
        residual: largest relative difference between a measured stream and this formula.
        backend: the group's backend, for instance ``"gloo"``.
        world_size: number of ranks.
        measured: hardware and versions, by name.
    """

    latency_s: float
    seconds_per_byte: float
    drain_s: float
    processor_s_per_byte: float
    residual: float
    backend: str
    world_size: int
    measured: Mapping[str, str]

    def cost_s(self, nbytes: float) -> float:
        """How long one bucket of this size occupies the link, in seconds."""
        return self.latency_s + nbytes * self.seconds_per_byte

    def to_json(self) -> str:
        """The link as JSON text; `from_json` returns an equal link."""
        return _text("link", self)

    @classmethod
    def from_json(cls, text: str) -> Link:
        """Read a link that `to_json` wrote.

        Raises:
            UsageError: `text` is not such a document.
        """
        return cls(**_row(cls, "link", text))


def conditions() -> dict[str, str]:
    """The hardware and the versions of this process, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": platform.node(),
        "device": device or platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def _text(kind: str, record: Profile | Link) -> str:
    return json.dumps({f"ddpopt_{kind}": FORMAT, **asdict(record)}, indent=2)


def _row(cls: type[Any], kind: str, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"expected a {kind} as {cls.__name__}.to_json() writes it; not JSON: {error}") from error
    found = row.get(f"ddpopt_{kind}") if isinstance(row, dict) else type(row).__name__
    if found != FORMAT:
        raise UsageError(f"expected a JSON object with ddpopt_{kind}={FORMAT}, found {found!r}")
    del row[f"ddpopt_{kind}"]
    names = {field.name for field in fields(cls)}
    if row.keys() != names:
        wrong = ", ".join(sorted(row.keys() ^ names))
        raise UsageError(f"a {kind}: missing or unknown entries: {wrong}; write the file again")
    return row


def order_of(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Gradients in the order in which they are complete; equal times keep the order given."""
    return sorted(gradients, key=lambda gradient: gradient.ready_s)
