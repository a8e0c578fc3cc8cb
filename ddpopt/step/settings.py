"""What others need to know of steps in one graph: how they are compiled, and which modules they train now.

Invariant: this module needs no private name of torch, so that every release can import it; and a module that
nothing else holds is not kept alive.
"""

from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.plan import Plan
from ddpopt.step.overrides import Override, Transform

WHAT = "ddpopt.train_step"
"""The name of `train_step` in error messages."""
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


RUNNING: "WeakKeyDictionary[Any, Plan]" = WeakKeyDictionary()
"""The plan of the step that last trained each DDP module."""
