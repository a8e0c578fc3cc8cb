"""What the gate compares, as data: plans, runs, ratios and numbers of tests.

Plain data, without torch. Invariant: what `to_data` gives, `from_data` reads back as equal figures, and equal
figures give equal text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Ratio = float | str
"""A figure of ours as a share of torch's in the same run; a word where torch has none."""


@dataclass(frozen=True)
class BucketRow:
    """A bucket of a plan.

    Attributes:
        params: names of its parameters, in ready order.
        nbytes: its size.
        dtype: of its elements.
    """

    params: tuple[str, ...]
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class PlanFigures:
    """A case's plan.

    Attributes:
        fingerprint: ``Plan.fingerprint``.
        segments: how many segments it cuts.
        buckets: in the order in which they are reduced.
        unread: trainable parameters that no graph reads.
    """

    fingerprint: str
    segments: int
    buckets: tuple[BucketRow, ...]
    unread: tuple[str, ...] = ()

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> PlanFigures:
        """Read what ``asdict`` gave, by way of JSON."""
        rows = (BucketRow(tuple(row["params"]), row["nbytes"], row["dtype"]) for row in data["buckets"])
        return PlanFigures(data["fingerprint"], data["segments"], tuple(rows), tuple(data["unread"]))


@dataclass(frozen=True)
class ModeFigures:
    """What one mode did with a case.

    Attributes:
        graphs: how many graphs Dynamo compiled, recompilations aside.
        recompiles: how many it compiled again, over all steps.
        compiled: what the backend was asked to compile in the first step: graphs, or distinct segments.
        backward: collectives of the last backward, by operator.
        outside: collectives between backwards, over all steps, by operator.
        aligned: whether each backward reduced exactly the planned buckets.
        potential: overlap potential as a ratio to eager DDP's.
        margins: for each level of the ladder, the worst distance as a share of its bound.
    """

    graphs: int
    recompiles: int
    compiled: int
    backward: Mapping[str, int]
    outside: Mapping[str, int]
    aligned: bool
    potential: float
    margins: Mapping[str, float]

    def to_data(self) -> dict[str, Any]:
        """Values for JSON, which has no infinity."""
        margins = {level: _finite(share) for level, share in self.margins.items()}
        return asdict(self) | {"margins": margins, "potential": _finite(self.potential)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> ModeFigures:
        """Read what `to_data` gave, by way of JSON."""
        margins = {level: float(share) for level, share in data["margins"].items()}
        return ModeFigures(**{**data, "potential": float(data["potential"]), "margins": margins})


@dataclass(frozen=True)
class CaseFigures:
    """A case.

    Attributes:
        plan: its plan.
        modes: by mode, what that did.
    """

    plan: PlanFigures
    modes: Mapping[str, ModeFigures]


@dataclass(frozen=True)
class Figures:
    """All that one run measured, or that a baseline keeps.

    Attributes:
        cases: by target.
        ratios: by target: planning and compile time of ours as shares of torch's.
        tests: by folder, how many tests pytest collects.
    """

    cases: Mapping[str, CaseFigures] = field(default_factory=dict)
    ratios: Mapping[str, Mapping[str, Ratio]] = field(default_factory=dict)
    tests: Mapping[str, int] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """Values for JSON, without the numbers of tests."""
        cases = {
            name: {
                "plan": asdict(case.plan),
                "modes": {mode: found.to_data() for mode, found in case.modes.items()},
            }
            for name, case in self.cases.items()
        }
        return {"cases": cases, "ratios": {name: dict(found) for name, found in self.ratios.items()}}

    @staticmethod
    def from_data(data: Mapping[str, Any], tests: Mapping[str, int]) -> Figures:
        """Read what `to_data` gave, by way of JSON."""
        cases = {
            name: CaseFigures(
                PlanFigures.from_data(case["plan"]),
                {mode: ModeFigures.from_data(found) for mode, found in case["modes"].items()},
            )
            for name, case in data["cases"].items()
        }
        return Figures(cases, data["ratios"], tests)


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
