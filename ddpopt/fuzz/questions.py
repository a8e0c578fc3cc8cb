"""What is asked of a drawn model: in which modes it runs, on what, and what came of each.

Invariant: plain data, which travels to worker processes and into JSON, and needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddpopt.fuzz.signatures import FailureSignature

TORCH = "torch"
WHOLE = "whole"
"""The mode that compiles without any optimizer: what it gets wrong is the backend's own."""
MODES = (TORCH, WHOLE, "ddpopt-split", "ddpopt-inline")
"""The modes of `ddpopt.judge.modes` that can be fuzzed."""
STANDALONE = (TORCH, WHOLE)
"""Modes whose faults are torch's own."""
STEPS = 3


class Outcome(StrEnum):
    """What came of one model in one mode."""

    OK = "ok"
    EAGER = "eager cannot run it"
    REFUSED = "refused"
    """ddpopt says that it does not do this."""
    WRONG = "wrong"
    BACKEND = "the backend is wrong"
    """Without any optimizer the same backend is wrong too."""
    BROKEN = "the judge failed"
    """A fault of verification itself, from which nothing is learned about the mode."""


@dataclass(frozen=True)
class Setting:
    """How models are run.

    Attributes:
        backend: of Dynamo, by name.
        nproc: how many ranks.
        steps: of training.
        lowers_limit: whether torch's smallest bucket is set to the model's cap. Its DDPOptimizer takes no
            cap below that, which is 1 MiB: a model of some bytes would never be cut.
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
        modes: names of modes, of `MODES`.
        setting: how it is run.
        training: name of the option of verification that it is trained under.
    """

    source: str
    cap_bytes: int
    modes: tuple[str, ...]
    setting: Setting
    training: str = "default"


@dataclass(frozen=True)
class Answer:
    """What came of one model in one mode.

    Attributes:
        mode: name of the mode.
        kind: how it ended.
        signature: of the failure; None if there is none.
        detail: what the failure says in full, or why it was refused.
    """

    mode: str
    kind: Outcome
    signature: FailureSignature | None = None
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.signature}" if self.signature is not None else str(self.kind)
