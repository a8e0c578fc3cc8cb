"""The sizes at which DDP closes its buckets, from the arguments of its constructor.

Invariant: ``BucketConfig.from_kwargs(**arguments)`` equals ``limits_of(DDP(model, **arguments))`` and needs
neither a model nor a process group.

Source: ``torch/nn/parallel/distributed.py``.
"""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ddpopt.errors import UsageError, did_you_mean

MIB = 2**20
DEFAULT_CAP_MB = 25

DDP_ARGUMENTS = tuple(inspect.signature(nn.parallel.DistributedDataParallel).parameters)[1:]
"""Names of the arguments of DistributedDataParallel, without the module."""


@dataclass(frozen=True)
class BucketConfig:
    """The sizes at which one DDP module closes its buckets.

    Attributes:
        cap_bytes: limit of every bucket except the first. With 0 each parameter has its own bucket; below 0
            no rebuilt bucket has a limit, as in DDP.
        first_bucket_bytes: limit of the first bucket; equal to ``cap_bytes`` if the user gave a cap.
        cap_bytes_list: limits of ``bucket_cap_mb_list``, the last one repeats; empty if not given.
        find_unused_parameters: as given to DDP.
        static_graph: as given to DDP's constructor.
        small_last_bucket: environment variable ``DDP_SET_LAST_BUCKET_CAP=1``: the rebuilt buckets are filled
            backwards from the last ready gradient, so that the first limit applies to the last bucket.
    """

    cap_bytes: int
    first_bucket_bytes: int
    cap_bytes_list: tuple[int, ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    small_last_bucket: bool = False

    @property
    def rebuilds(self) -> bool:
        """Whether the reducer rebuilds its initial buckets in ready order after the first steps."""
        return self.static_graph or not self.find_unused_parameters

    @property
    def initial_limits(self) -> tuple[int, ...]:
        """Limits in bytes of the first iteration's buckets (of every iteration's, if DDP never rebuilds)."""
        caps = min(self.first_bucket_bytes, self.cap_bytes), self.cap_bytes
        return self.cap_bytes_list or ((sys.maxsize,) if self.rebuilds else caps)

    @property
    def rebuilt_limits(self) -> tuple[int, ...]:
        """Limits in bytes of the rebuilt buckets, in closing order; the last one repeats."""
        caps = self.cap_bytes_list or (self.first_bucket_bytes, self.cap_bytes)
        return tuple(sys.maxsize if cap < 0 else cap for cap in caps)  # DDP reads a cap below 0 as unsigned

    @property
    def after_the_first(self) -> "BucketConfig":
        """The same limits, once the first buckets are filled."""
        return replace(self, first_bucket_bytes=self.cap_bytes, cap_bytes_list=self.cap_bytes_list[-1:])

    @classmethod
    def from_kwargs(
        cls,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **other_ddp_arguments: object,
    ) -> "BucketConfig":
        """Read the limits from the arguments of ``DistributedDataParallel``, without building one.

        Args:
            bucket_cap_mb: cap in MiB, fractions allowed; None: DDP's default, 25 with a first bucket of 1.
            bucket_cap_mb_list: caps in MiB of the first, second, … bucket; wins over ``bucket_cap_mb``.
            find_unused_parameters: as in DDP.
            static_graph: as in DDP.
            **other_ddp_arguments: any other argument of DDP; none of them changes a limit.

        Returns:
            The configuration of a DDP module built with these arguments.

        Raises:
            UsageError: an argument is unknown to DDP, a flag is not a bool, or DDP fails with a cap: it is no
                finite number, 2**63 bytes or more, or below 0 in a list or where DDP never rebuilds.
        """
        _require_ddp_arguments(other_ddp_arguments)
        flags = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise UsageError(f"{name}: expected True or False, got {flag!r}; pass what you pass to DDP")
        try:
            cap = int((DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
            caps = tuple(int(each * MIB) for each in bucket_cap_mb_list or ())
            cap = max(caps, default=cap)
            first = cap if bucket_cap_mb is not None or caps else default_first_bucket_bytes()
            config = cls(cap, first, caps, **flags, small_last_bucket=last_bucket_is_small())
            if min(config.initial_limits) < 0 or abs(cap) > sys.maxsize:
                raise ValueError(f"DDP does not take {cap} bytes")
        except (TypeError, ValueError, OverflowError) as error:
            given = f"{bucket_cap_mb!r} and {bucket_cap_mb_list!r}; pass sizes that DDP takes"
            raise UsageError(f"expected bucket_cap_mb and bucket_cap_mb_list in MiB, got {given}") from error
        return config


def default_first_bucket_bytes() -> int:
    """DDP's first limit where the user gave no cap; users tune it."""
    return int(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]  # private


def last_bucket_is_small() -> bool:
    """Whether the environment asks for `BucketConfig.small_last_bucket`."""
    return os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"


def _require_ddp_arguments(arguments: Mapping[str, object]) -> None:
    unknown = sorted(name for name in arguments if name not in DDP_ARGUMENTS)
    if unknown:
        known = sorted(DDP_ARGUMENTS)
        raise UsageError(
            f"expected arguments of DistributedDataParallel, got {', '.join(map(repr, unknown))}; "
            f"use the names that DDP knows: {', '.join(known)}{did_you_mean(unknown[0], known)}"
        )
