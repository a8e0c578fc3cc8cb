"""How steps in one graph are compiled.

Invariant: this module needs no private name of torch, so that every release can import it.
"""

from dataclasses import dataclass
from typing import Literal

from ddpopt.errors import require_choice
from ddpopt.graph.nodes import CompilerFn
from ddpopt.step.overrides import Override, Transform

WHAT = "ddpopt.train_step"
"""The name of `train_step` in error messages."""
Fusion = Literal["concat", "coalesced"]
Fallback = Literal["inline"]


@dataclass(frozen=True)
class StepSettings:
    """How steps are compiled; see `train_step`.

    Raises:
        UsageError: `fusion` or `fallback` is none of its words.
    """

    backend: str | CompilerFn
    fusion: Fusion
    fallback: Fallback | None
    overrides: tuple[Override, ...]
    transform: Transform | None

    def __post_init__(self) -> None:
        require_choice("fusion", self.fusion, Fusion)
        if self.fallback is not None:
            require_choice("fallback", self.fallback, Fallback)
