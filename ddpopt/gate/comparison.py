"""A run held against a baseline, as the reports take it.

Plain data. Invariant: true only if something was compared and nothing grave moved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddpopt.errors import VerificationError
from ddpopt.gate.figures import Figures
from ddpopt.gate.moved import Change

FORMAT = 1


@dataclass(frozen=True)
class Comparison:
    """A run held against a baseline.

    Attributes:
        baseline: file name of the baseline.
        release: of torch, for instance ``"torch 2.13"``.
        figures: what the run measured.
        changes: what moved.
        left_out: what the baseline has and nobody asked for this time.
        updates: whether what moved goes into the baseline.
    """

    baseline: str
    release: str
    figures: Figures
    changes: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    updates: bool = False

    def __bool__(self) -> bool:
        return bool(self.figures.cases) and not self.grave

    @property
    def grave(self) -> Sequence[Change]:
        """What the gate fails for."""
        return [change for change in self.changes if change.grave]

    @property
    def remarks(self) -> Sequence[Change]:
        """What got better, or grew as it may."""
        return [change for change in self.changes if not change.grave]

    @property
    def exit_code(self) -> int:
        """0 if nothing grave moved, else 1."""
        return 0 if self else VerificationError.exit_code

    def to_json(self) -> str:
        """The comparison as a JSON object: what moved, and everything that was measured."""
        data = {
            "ddpopt_gate_comparison": FORMAT,
            "passes": bool(self),
            "baseline": self.baseline,
            "torch": self.release,
            "left_out": self.left_out,
            "changes": [asdict(change) for change in self.changes],
            "figures": {**self.figures.to_data(), "tests": dict(self.figures.tests)},
        }
        return json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
