"""How steps are compiled.

Invariant: this module needs no private name of torch, so that it can be read with every release.
"""

from dataclasses import dataclass
from typing import Literal

from ddpopt.graph.nodes import CompilerFn
from ddpopt.step.overrides import Override, Transform

Fusion = Literal["concat", "coalesced"]
Fallback = Literal["inline"]


@dataclass(frozen=True)
class StepSettings:
    """How steps are compiled; see `train_step`."""

    backend: str | CompilerFn
    fusion: Fusion
    fallback: Fallback | None
    overrides: tuple[Override, ...]
    transform: Transform | None
