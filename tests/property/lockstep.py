"""Properties that hold on several ranks: rank 0 draws, and every rank runs the same example.

An example first has to hold on one process; only what survives that is promoted to all ranks. So a failure
that one process can show is found there, and Hypothesis shrinks it there; and one that needs ranks is shrunk
on all of them, in lockstep.

Invariant: all ranks run the same examples in the same order, and all leave with the same verdict; no rank
waits for one that has failed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ddpopt.ranks.group import Ranks

__all__ = ["RanksDisagreeError", "hold_on_ranks"]

Example = TypeVar("Example")
LIMIT_S = 30.0
"""Of a collective within an example: a rank that its peers left fails after it."""


class RanksDisagreeError(AssertionError):
    """An example holds on one process, but not on the ranks; the message has what each of them raised."""


def hold_on_ranks(
    ranks: Ranks,
    examples: st.SearchStrategy[Example],
    alone: Callable[[Example, dist.ProcessGroup], None],
    together: Callable[[Example, dist.ProcessGroup], None],
    how_many: settings,
) -> None:
    """Require a property of drawn examples on all ranks. A collective of all of them.

    Args:
        ranks: of this test.
        examples: what to draw; examples travel by pickle.
        alone: raises where an example fails on one process; it runs on rank 0, in a group of that rank.
        together: raises where an example fails; it runs on every rank, in a group of all of them, which is
            made anew when an example has failed.
        how_many: settings of Hypothesis.

    Raises:
        RanksDisagreeError: an example holds on one process only; it is the smallest that was found.
        Exception: what `alone` raised of the smallest example that one process can show.
    """
    lockstep = _Lockstep(ranks, together)
    own = dist.new_group([0], timeout=timedelta(seconds=LIMIT_S))
    if ranks.rank != 0:
        lockstep.follow()
        return

    @how_many
    @given(examples)
    def holds(example: Example) -> None:
        alone(example, own)
        event("promoted to all ranks")
        lockstep.lead(example)

    try:
        holds()
    except BaseException as error:
        lockstep.end("".join(traceback.format_exception_only(error)))
        raise
    lockstep.end("")


class _Lockstep(Generic[Example]):
    """Runs examples on all ranks, one after the other."""

    def __init__(self, ranks: Ranks, together: Callable[[Example, dist.ProcessGroup], None]) -> None:
        self._ranks = ranks
        self._together = together
        self._group = self._new_group()

    def _new_group(self) -> Any:
        return dist.new_group(timeout=timedelta(seconds=LIMIT_S))

    def lead(self, example: Example) -> None:
        """Have all ranks run an example."""
        self._ranks.gather(("run", example))
        self._run(example)

    def follow(self) -> None:
        """Run what rank 0 draws, until it has no more."""
        while True:
            told, what = self._ranks.gather(None)[0]
            if told == "end":
                if what:
                    raise RanksDisagreeError(f"rank 0 has found an example that fails:\n{what}")
                return
            try:
                self._run(what)
            except RanksDisagreeError:
                continue  # rank 0 has it too, and asks for a smaller one

    def end(self, error: str) -> None:
        """Let the other ranks go."""
        self._ranks.gather(("end", error))

    def _run(self, example: Example) -> None:
        error = ""
        try:
            self._together(example, self._group)
        except Exception:
            error = traceback.format_exc()
        errors = self._ranks.gather(error)
        if any(errors):
            self._group = self._new_group()  # of no use once a rank has left it in the middle
            said = "\n".join(f"rank {rank}: {error or 'no error'}" for rank, error in enumerate(errors))
            raise RanksDisagreeError(
                f"{example!r} holds on one process, but not on {len(errors)} ranks:\n{said}"
            )
