"""What the ranks of `benchmarks.step` are asked, and what they answer; both travel as JSON.

Invariant: what `asdict` and JSON made of figures, `figures_of` reads back equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.step_trace import Trace


@dataclass(frozen=True)
class Job:
    """What both ranks are to do.

    Attributes:
        model: a key of `benchmarks.step_workloads.WORKLOADS`.
        modes: some of `benchmarks.step_modes.MODES`.
        backend: name of a Dynamo backend.
        rounds: how often each mode has its turn.
        device: one of `benchmarks.devices.DEVICES`.
        rendezvous: path of a file that does not exist yet.
    """

    model: str
    modes: tuple[str, ...]
    backend: str
    rounds: int
    device: str
    rendezvous: str


@dataclass(frozen=True)
class Figures:
    """What was measured of one model; of both ranks the larger figure each.

    Attributes:
        model: its name.
        bucket_bytes: sizes of eager DDP's buckets, in their order.
        graphs: by mode, how many graphs its backend was given; only of modes that torch compiles.
        first_steps_s: by mode, the first three steps, in seconds.
        steps_s: by mode, two steps for each round.
        parts: what `benchmarks.step_parts.Parts.measure` gives, as often.
        exposed: by mode, the exposed share of each traced step; empty where steps cannot be traced.
        peak_bytes: by mode, the most that a step holds at once, over what is held before it.
        traces: by mode, the fastest traced step of rank 0; empty where steps cannot be traced.
    """

    model: str
    bucket_bytes: list[int]
    graphs: dict[str, int]
    first_steps_s: dict[str, float]
    steps_s: dict[str, list[float]]
    parts: dict[str, list[float]]
    exposed: dict[str, list[float]]
    peak_bytes: dict[str, int]
    traces: dict[str, Trace]


def figures_of(fields: Mapping[str, Any]) -> Figures:
    """Figures from what `asdict` made of them, by way of JSON."""
    traces = {
        mode: Trace(**{name: _tuples(value) for name, value in trace.items()})
        for mode, trace in fields["traces"].items()
    }
    return Figures(**{**fields, "traces": traces})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
