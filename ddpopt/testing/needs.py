"""Read the needs of a test marked ``world_size(n, backend=…, timeout=…)`` from its markers.

Invariant: equal markers give equal needs in every process, so all ranks and the process that started them
agree on a test's limit.
"""

import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from ddpopt.ranks.environment import launched_ranks

LIMIT_S = 120.0
"""The limit of a test that sets none, in seconds."""

BACKENDS = (None, "gloo", "nccl")

DIVIDED = (
    "expected torchrun or xdist to give a test its ranks, got both: torchrun's ranks cannot be divided "
    "among xdist's workers. Use -n or torchrun, not both."
)


class Rank(Protocol):
    """This process, as a rank that runs marked tests.

    Attributes:
        on_gpu: whether each rank, on any node, has its own GPU.
    """

    on_gpu: bool

    @property
    def seat(self) -> tuple[Any, int, int]:
        """The store of the current test, this rank's number, and the number of ranks."""


simulated_ranks: ContextVar[int] = ContextVar("simulated_ranks", default=0)
"""The number of ranks that the process of the running test is in turn; 0 for ranks of their own."""
rank_key = pytest.StashKey[Rank]()


@dataclass(frozen=True)
class Needs:
    """The needs of a marked test.

    Attributes:
        size: the number of ranks; 0 if the marker cannot be read.
        backend: backend of its process group; None for NCCL if each rank has a GPU, else gloo.
        limit_s: seconds that the test and its fixtures may take.
        problem: the error in the marker, which the test's setup shows; empty if there is none.
        simulate: the number of ranks that the test's only process is in turn; 0 for ranks of their own.
    """

    size: int
    backend: str | None = None
    limit_s: float = LIMIT_S
    problem: str = ""
    simulate: int = 0


def is_marked(item: pytest.Item) -> bool:
    """Return whether a test runs on ranks: it, its class or its module has a ``world_size`` marker."""
    return item.get_closest_marker("world_size") is not None


def needs_of(item: pytest.Item) -> Needs:
    """Read the needs of a test with a ``world_size`` marker."""
    marker = item.get_closest_marker("world_size")
    assert marker is not None
    match marker.args:
        case (int(size),) if size > 0 and marker.kwargs.keys() <= {"backend", "timeout", "simulate"}:
            backend = marker.kwargs.get("backend")
            limit_s = marker.kwargs.get("timeout", _other_limit(item))
            if backend in BACKENDS and isinstance(limit_s, int | float) and limit_s > 0:
                if marker.kwargs.get("simulate"):
                    return Needs(1, backend, float(limit_s), simulate=size)
                return Needs(size, backend, float(limit_s))
            expected = "world_size(n, backend='gloo' or 'nccl', timeout=seconds above 0, simulate=True)"
            advice = "Omit what you do not need to set."
        case _:
            expected = "world_size(n) with one positive int"
            advice = "Write @pytest.mark.world_size(2)."
    got = f"args {marker.args!r}, kwargs {marker.kwargs!r}"
    return Needs(0, problem=f"{item.nodeid}: expected {expected}, got {got}. {advice}")


def lacking(item: pytest.Item) -> str:
    """Return why a marked test cannot have its ranks; empty if it can."""
    needs = needs_of(item)
    present = launched_ranks()
    if present is None:
        return ""
    if present < needs.size:
        command = f"torchrun --nproc-per-node {needs.size} -m pytest …"
        return f"needs {needs.size} ranks, this run has {present}: {command}"
    return DIVIDED if "PYTEST_XDIST_WORKER" in os.environ else ""


def _other_limit(item: pytest.Item) -> float:
    """The limit that a ``timeout`` marker of pytest-timeout sets; the default if there is none.

    The plugin itself adds a marker without a limit, ``timeout(0)``.
    """
    for marker in item.iter_markers("timeout"):
        if limit_s := marker.args[0] if marker.args else marker.kwargs.get("timeout"):
            return float(limit_s)
    return LIMIT_S
