"""What a test marked ``world_size(n, backend=…, timeout=…)`` needs, read from its markers.

Invariant: equal markers give equal needs in every process, so that all ranks and the process that started
them agree on a test's limit.
"""

import os
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from ddpopt.ranks.environment import launched_ranks

__all__ = [
    "DIVIDED",
    "LIMIT_S",
    "Needs",
    "Rank",
    "is_marked",
    "lacking",
    "needs_of",
    "rank_key",
    "readable_needs",
]

LIMIT_S = 120.0
"""The limit of a test that sets none, in seconds."""

BACKENDS = (None, "gloo", "nccl")

DIVIDED = (
    "expected torchrun or xdist to give a test its ranks, got both: torchrun's ranks cannot be divided among "
    "xdist's workers. Leave out -n, or torchrun."
)

needs_key = pytest.StashKey["Needs"]()


class Rank(Protocol):
    """This process, as a rank that runs marked tests.

    Attributes:
        on_gpu: whether each of the ranks, on whatever node, has a GPU of its own.
    """

    on_gpu: bool

    @property
    def seat(self) -> tuple[Any, int, int]:
        """The store of the test that runs, this rank's number, and how many there are."""


rank_key = pytest.StashKey[Rank]()


@dataclass(frozen=True)
class Needs:
    """What a marked test needs.

    Attributes:
        size: the number of ranks.
        backend: of its process group; None for NCCL where each rank has a GPU, else gloo.
        limit_s: how many seconds it may take, with its fixtures.
    """

    size: int
    backend: str | None
    limit_s: float


def is_marked(item: pytest.Item) -> bool:
    """Tell whether a test is to run on ranks.

    Args:
        item: a collected test.

    Returns:
        Whether it, its class or its module has a ``world_size`` marker.
    """
    return item.get_closest_marker("world_size") is not None


def needs_of(item: pytest.Item) -> Needs:
    """Read what a marked test needs.

    Args:
        item: a test with a ``world_size`` marker.

    Returns:
        Its needs, read once: what other plugins are told of its limit later changes nothing.

    Raises:
        pytest.UsageError: the marker has other arguments than it takes.
    """
    if needs_key not in item.stash:
        item.stash[needs_key] = _read(item)
    return item.stash[needs_key]


def readable_needs(item: pytest.Item) -> Needs | None:
    """Read what a marked test needs, where its setup will show what is wrong with the marker.

    Args:
        item: a test with a ``world_size`` marker.

    Returns:
        Its needs; None if its marker cannot be read.
    """
    try:
        return needs_of(item)
    except pytest.UsageError:
        return None


def lacking(item: pytest.Item) -> str:
    """Tell why a marked test cannot have its ranks.

    Args:
        item: a test with a ``world_size`` marker.

    Returns:
        A reason; empty if it can have them, or if its marker cannot be read.
    """
    needs, present = readable_needs(item), launched_ranks()
    if needs is None or present is None:
        return ""
    if present < needs.size:
        command = f"torchrun --nproc-per-node {needs.size} -m pytest …"
        return f"needs {needs.size} ranks, this run has {present}: {command}"
    return DIVIDED if "PYTEST_XDIST_WORKER" in os.environ else ""


def _read(item: pytest.Item) -> Needs:
    marker = item.get_closest_marker("world_size")
    assert marker is not None
    match marker.args:
        case (int(size),) if size > 0 and marker.kwargs.keys() <= {"backend", "timeout"}:
            backend, limit_s = marker.kwargs.get("backend"), marker.kwargs.get("timeout", _other_limit(item))
            if backend in BACKENDS and isinstance(limit_s, int | float) and limit_s > 0:
                return Needs(size, backend, float(limit_s))
            raise pytest.UsageError(
                f"{item.nodeid}: expected world_size(n, backend='gloo' or 'nccl', timeout=seconds above 0), "
                f"got kwargs {marker.kwargs!r}. Leave out what need not be set."
            )
    raise pytest.UsageError(
        f"{item.nodeid}: expected world_size(n) with one positive int, got args {marker.args!r}, "
        f"kwargs {marker.kwargs!r}. Write @pytest.mark.world_size(2)."
    )


def _other_limit(item: pytest.Item) -> float:
    """The limit that a ``timeout`` marker of pytest-timeout sets; ours if there is none, or it sets none."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return LIMIT_S
    limit_s = marker.args[0] if marker.args else marker.kwargs.get("timeout")
    return float(limit_s or LIMIT_S)
