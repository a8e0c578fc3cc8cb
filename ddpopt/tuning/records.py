"""What a step and a link were measured to cost: a profile and a link, each a frozen record and a JSON file.

Times are in seconds, sizes in bytes. Invariant: a record names the hardware and the versions that it was
measured with, and is refused where it does not fit.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from ddpopt.ddp.agreement import agree
from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec

FORMAT = 1
MARGIN = 1.25
"""How much longer bytes may take in training than when the link was measured."""
SHOWN = 5


@dataclass(frozen=True)
class Stored:
    """What is stored as a JSON object with a mark of its kind and format."""

    def to_json(self) -> str:
        """This as JSON text; `from_json` returns an equal one."""
        return json.dumps({f"ddpopt_{type(self).__name__.lower()}": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote, or what ``ddpopt tune --json`` wrote with it.

        Raises:
            UsageError: `text` is not such a document.
        """
        kind = cls.__name__.lower()
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"expected a {kind} in JSON, got something else: {error}") from error
        row = row.get(kind, row) if isinstance(row, dict) else {}
        row = row if isinstance(row, dict) else {}
        names = {f"ddpopt_{kind}", *(field.name for field in fields(cls))}
        if row.get(f"ddpopt_{kind}") != FORMAT or row.keys() != names:
            wrong = ", ".join(sorted(row.keys() ^ names)) or f"another format than {FORMAT}"
            raise UsageError(
                f"expected a {kind} that ddpopt wrote; missing or unknown: {wrong}. Measure it again"
            )
        del row[f"ddpopt_{kind}"]
        return cls(**row)


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
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote, or what ``ddpopt tune --json`` wrote with it.

        Raises:
            UsageError: `text` is not such a document.
        """
        found: Any = super().from_json(text)
        try:
            rows = [Gradient(ParamSpec(**each["spec"]), each["ready_s"]) for each in found.gradients]
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"a gradient of the profile is malformed: {error!r}. Measure it again"
            ) from error
        profile: Profile = replace(found, gradients=tuple(rows))
        return profile

    def require_fit(self, specs: Iterable[ParamSpec], world_size: int) -> None:
        """Check that this is a profile of a model, for a number of ranks and this release of torch.

        Args:
            specs: the model's parameters, in any order.
            world_size: number of ranks.

        Raises:
            UsageError: it is not; the message has each difference.
        """
        own = {gradient.spec.name: _size(gradient.spec) for gradient in self.gradients}
        other = {spec.name: _size(spec) for spec in specs}
        pairs = {"torch": (self.measured.get("torch"), str(torch.__version__))}
        pairs["number of ranks"] = str(self.world_size), str(world_size)
        pairs |= {f"parameter {n!r}": (own.get(n, "none"), other.get(n, "none")) for n in {**own, **other}}
        lines = [f"  - {what}: {then}, here {here}" for what, (then, here) in pairs.items() if then != here]
        if lines:
            more = f"  - and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "Measure it again."
            raise UsageError("\n".join(["the profile is of something else:", *lines[:SHOWN], more]))

    def slowest(self, group: dist.ProcessGroup) -> Profile:
        """The profile with the longest times of all ranks, equal on all ranks; each must call it."""
        by_name = {gradient.spec.name: gradient for gradient in self.gradients}
        names = sorted(by_name)  # two ranks may have seen the gradients in different orders
        own = self.forward_s, self.backward_s, self.update_s, *(by_name[name].ready_s for name in names)
        forward, backward, update, *ready = largest(group, own)
        gradients = (Gradient(by_name[name].spec, at) for name, at in zip(names, ready, strict=True))
        found = replace(self, gradients=tuple(order_of(gradients)), forward_s=forward)
        return replace(found, backward_s=backward, update_s=update)


@dataclass(frozen=True)
class Link(Stored):
    """The cost of `n` buckets in a stream: ``drain_s + n * latency_s + nbytes * seconds_per_byte``.

    Attributes:
        latency_s: cost of one more all-reduce, in seconds.
        seconds_per_byte: cost of one more byte, in seconds.
        drain_s: how long the last all-reduce is on its way when nothing follows it, in seconds.
        processor_s_per_byte: how long sending a byte delays the computation next to it, in seconds.
        residual: median of the relative differences between measured streams and this formula.
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

    def slower(self) -> Link:
        """A link to tune for: among buckets that are in time, those that are so on a slower link, too.

        With the fewest buckets that are just in time on the measured link, each is sent as late as it can be.
        """
        return replace(self, seconds_per_byte=MARGIN * self.seconds_per_byte)

    def __str__(self) -> str:
        each, mebibyte = (f"{s * 1000:.2f} ms" for s in (self.latency_s, 2**20 * self.seconds_per_byte))
        where = f"{self.backend}, {self.world_size} ranks"
        return f"link: {where}, {each} a bucket, {mebibyte} a MiB, {self.residual:.0%} off in the median"


def conditions() -> dict[str, str]:
    """The hardware and the versions of this process, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {"torch": str(torch.__version__), "python": platform.python_version(), "host": platform.node()}
    return {**versions, "device": device or platform.machine(), "threads": str(torch.get_num_threads())}


def _size(spec: ParamSpec) -> str:
    return f"{spec.nbytes} bytes of {spec.dtype}"


def largest(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    """Of each value the largest of all ranks; each must call this with as many.

    Raises:
        InfrastructureError: a rank did not answer in time.
    """
    texts = agree(group, "ddpopt: times of all ranks", json.dumps([*values]), LONGEST_WAIT)
    return [max(each) for each in zip(*map(json.loads, texts), strict=True)]


def order_of(gradients: Iterable[Gradient]) -> list[Gradient]:
    """Gradients in the order in which they are complete; equal times keep the order given."""
    return sorted(gradients, key=lambda gradient: gradient.ready_s)
