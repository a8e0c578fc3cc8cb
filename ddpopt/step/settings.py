"""How steps in one graph are compiled.

Invariant: this module needs no private name of torch, so that every release can import it.
"""

from dataclasses import dataclass
from typing import Literal

from ddpopt.errors import UsageError, require_choice
from ddpopt.graph.nodes import CompilerFn
from ddpopt.step.overrides import Override, Transform
from ddpopt.step.parallel import Parallel
from ddpopt.step.state import StatefulTransform

WHAT = "ddpopt.train_step"
"""The name of `train_step` in error messages."""
INSTEAD = "use ddpopt.compile(model), or fallback='inline'"
Fusion = Literal["concat", "coalesced"]
Fallback = Literal["inline"]


@dataclass(frozen=True)
class StepSettings:
    """How steps are compiled; see `train_step`.

    Raises:
        UsageError: `fusion` or `fallback` is none of its words, or `parallel` cannot be used.
    """

    backend: str | CompilerFn
    fusion: Fusion
    fallback: Fallback | None
    overrides: tuple[Override, ...]
    transform: Transform | StatefulTransform | None
    parallel: Parallel | None = None

    def __post_init__(self) -> None:
        require_choice("fusion", self.fusion, Fusion)
        if self.fallback is not None:
            require_choice("fallback", self.fallback, Fallback)
        if self.parallel is None:
            return
        if not isinstance(self.parallel, Parallel):
            raise UsageError(f"{WHAT}: parallel: expected ddpopt.Replicate() or None, got {self.parallel!r}")
        if self.fallback is not None:
            raise UsageError(f"{WHAT}: fallback={self.fallback!r} needs a DDP module; leave parallel= out")
