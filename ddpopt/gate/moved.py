"""One thing that moved.

Invariant: plain words; every report of a comparison says the same of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One thing that moved.

    Attributes:
        subject: the case or the folder.
        where: the mode, ``"plan"`` or ``"times"``; empty if it concerns all of it.
        what: the figure.
        before: the baseline's.
        now: the run's.
        grave: whether the gate fails for it; what got better, or grew as it may, is a remark.
    """

    subject: str
    where: str
    what: str
    before: str
    now: str
    grave: bool = True

    @property
    def place(self) -> str:
        """Subject and where in a few words."""
        return f"{self.subject}, {self.where}" if self.where else self.subject
