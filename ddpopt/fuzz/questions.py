"""The questions about a drawn model: in which modes and settings it runs, and the answer for each.

Invariant: plain data, which can be sent to worker processes and written as JSON, without torch.
"""

from dataclasses import dataclass
from enum import StrEnum

from ddpopt.fuzz.signatures import FailureSignature

TORCH = "torch"
WHOLE = "whole"
"""The mode that compiles without any optimizer: its faults are the backend's own."""
MODES = (TORCH, WHOLE, "ddpopt-split", "ddpopt-inline", "ddpopt-step", "ddpopt-step-coalesced")
"""The modes that ``--mode all`` means; any other engine can be named."""
STANDALONE = (TORCH, WHOLE)
"""Modes whose faults are torch's own."""
STEPS = 3


class Outcome(StrEnum):
    """The outcome of one model in one mode."""

    OK = "ok"
    EAGER = "eager cannot run it"
    REFUSED = "refused"
    """ddpopt reports that it does not support this."""
    WRONG = "wrong"
    BACKEND = "the backend is wrong"
    """Without any optimizer the same backend is wrong too."""
    BROKEN = "the judge failed"
    """A fault of verification itself, from which nothing is learned about the mode."""


@dataclass(frozen=True)
class Setting:
    """How models are run.

    Attributes:
        backend: name of the Dynamo backend.
        nproc: the number of ranks.
        steps: the number of training steps.
        lowers_limit: whether torch's smallest bucket is set to the model's cap. Its DDPOptimizer takes no cap
            below that limit of 1 MiB, so a tiny model would never be cut.
    """

    backend: str = "aot_eager"
    nproc: int = 1
    steps: int = STEPS
    lowers_limit: bool = True


@dataclass(frozen=True)
class Task:
    """One model in some modes.

    Attributes:
        source: the text of the model's module.
        cap_bytes: its bucket cap.
        modes: names of modes, as for `ddpopt.judge.engines.modes.mode`.
        setting: how it is run.
        training: name of the verification option under which it is trained.
    """

    source: str
    cap_bytes: int
    modes: tuple[str, ...]
    setting: Setting
    training: str = "default"


@dataclass(frozen=True)
class Answer:
    """The answer for one model in one mode.

    Attributes:
        mode: name of the mode.
        kind: how it ended.
        signature: signature of the failure; None if there is none.
        detail: the full text of the failure, or why it was refused.
    """

    mode: str
    kind: Outcome
    signature: FailureSignature | None = None
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.signature}" if self.signature is not None else str(self.kind)
