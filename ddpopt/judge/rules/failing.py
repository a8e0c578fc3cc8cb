"""How a run fails on ranks: on its own, because a peer is gone, or because all wait for each other.

Plain data, without torch. Invariant: a failure that a longer limit might have prevented never counts against
a mode.
"""

import contextlib
import importlib.util
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpopt
from ddpopt.cases.targets import users_line
from ddpopt.errors import PlanMismatchError, UnsupportedError, UsageError
from ddpopt.hang.diagnosis import diagnose
from ddpopt.hang.flights import Flight
from ddpopt.hang.recorder import current
from ddpopt.judge.rules.refusals import refusal_of

LOST = ("connection closed by peer", "connection reset by peer", "pair closure", "timed out", "broken pipe")
"""Gloo's messages when a peer is gone; not all that its transport says, such as that sizes differ."""
LAST = 200
"""Collectives of a rank that are compared with its peers'."""
SHOWN_CHARACTERS = 400
PASSING_ON = ("torch/_ops.py", "torch/_compile.py", "_dynamo/eval_frame.py")
"""Files whose frames only forward an operator call."""

TORCH = Path(importlib.util.find_spec("torch").origin or "").parent  # type: ignore[union-attr]  # it is installed
PACKAGE = Path(ddpopt.__file__).parent
JUDGES = (PACKAGE / "judge", PACKAGE / "observation", PACKAGE / "ranks")
PROGRAM = (PACKAGE / "judge" / "engines", PACKAGE / "judge" / "training" / "option_steps.py")
"""Parts of the judge that belong to the program under test: its engines and its options."""
CALLS = frozenset(
    [
        ("trainer.py", "_make"),
        ("trainer.py", "inputs"),
        ("trainer.py", "forward"),
        ("trainer.py", "loss"),
        ("trainer.py", "backward"),
        ("updating.py", "__init__"),
        ("updating.py", "step"),
        ("moments.py", "further_steps"),
    ]
)
"""Functions of the judge, by file, that call the program."""
PASSED_THROUGH = ("launches.py", "__torch_dispatch__")
"""The function of the judge that every operator of a watched program is called through."""


class FailedAloneError(Exception):
    """The program failed on this rank, while its peers went on waiting for it."""


@dataclass(frozen=True)
class Failure:
    """An exception on one rank.

    Attributes:
        rank: the rank on which it was raised.
        text: its type and message, the innermost line of the user's code, and the innermost informative
            frame, which may be torch's.
        refused: whether ddpopt reports that it does not support this, as one of `REFUSALS`.
        if_ranks_differ: whether that counts only where the case or the option says that ranks differ.
        lost: whether it only reports that a peer is gone.
        of_judge: whether it was raised by the judge's own code, and not by the program or its engine.
        extra: the name of the extra step that failed; empty for the others.
        flight: the last collectives of this rank, if it waited for a peer.
    """

    rank: int
    text: str
    refused: bool
    lost: bool
    of_judge: bool = False
    extra: str = ""
    if_ranks_differ: bool = False
    flight: Flight | None = None


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describe an exception.

    Args:
        rank: the rank on which it was raised.
        error: the exception, with its traceback.

    Returns:
        The description, which can be sent to other ranks.
    """
    words = str(error)
    lost = any(sign in words.lower() for sign in LOST)
    row = refusal_of(words) if isinstance(error, (UsageError, PlanMismatchError)) else None
    return Failure(
        rank,
        in_words(error),
        flight=_own_flight(rank) if lost else None,
        refused=row is not None,
        lost=lost,
        of_judge=row is None and is_of_judge(error),
        if_ranks_differ=row is not None and row.if_ranks_differ,
    )


def _own_flight(rank: int) -> Flight | None:
    """The last collectives of this rank; None if this build of torch does not record them."""
    with contextlib.suppress(UnsupportedError):
        return current(rank, LAST)
    return None


def is_of_judge(error: BaseException) -> bool:
    """Whether the innermost code outside of torch is the judge's, apart from its calls of the program.

    Args:
        error: the exception, with its traceback.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_passage = (path.name, frame.name) == PASSED_THROUGH
        if path.is_relative_to(TORCH) or frame.filename.startswith("<") or is_passage:
            continue
        if not any(path.is_relative_to(folder) for folder in JUDGES):
            return False
        of_program = any(path.is_relative_to(part) for part in PROGRAM)
        return not of_program and (path.name, frame.name) not in CALLS
    return False


def in_words(error: BaseException) -> str:
    """An exception's type and message, the innermost line of the user's code, and the informative frame."""
    words = " ".join(str(error).split())
    users = users_line(error)
    where = ""
    frame = _telling(traceback.extract_tb(error.__traceback__))
    if frame is not None and f"({frame.filename}:{frame.lineno} in " not in users:
        file = Path(frame.filename).name
        if frame.filename.startswith("<"):  # fx: '<eval_with_key>.3 from /path/proxy_tensor.py:9 in wrapped'
            file = frame.filename.partition(" from ")[0]
        where = f" ({file}:{frame.lineno} in {frame.name})"
    return f"{type(error).__name__}: {words[:SHOWN_CHARACTERS]}{users}{where}"


def _telling(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame, except those that only forward an operator call.

    Every operator is called in one line of ``torch/_ops.py``. Dispatch modes call it too, through the wrapper
    that keeps Dynamo out of them.
    """
    passed_on = False
    for frame in reversed(frames):
        file = "/".join(Path(frame.filename).parts[-2:])
        passed_on |= file == "torch/_ops.py"
        if not (passed_on and (file in PASSING_ON or frame.name == "__torch_dispatch__")):
            return frame
    return frames[-1] if frames else None


def own_of(failures: Sequence[Failure]) -> Sequence[Failure]:
    """The failures that do not only report that a peer is gone; all of them if there are no others."""
    return [failure for failure in failures if not failure.lost] or failures


def told(failures: Sequence[Failure]) -> str:
    """The ranks' failures as text; equal texts of several ranks appear once.

    >>> told([Failure(rank, "OSError: no", False, False) for rank in (0, 1)])
    'rank 0: OSError: no'
    """
    first: dict[str, Failure] = {}
    for failure in failures:
        first.setdefault(failure.text, failure)
    return "; ".join(f"rank {failure.rank}: {failure.text}" for failure in first.values())


def stalled(failures: Sequence[Failure], size: int, limit_s: float) -> str:
    """Recognize a run in which all ranks waited for each other until a limit passed.

    One of them may only have been compiling longer. But if a rank finished, its peers waited for something
    that it never sent, and no limit helps.

    Args:
        failures: the failures of all ranks on which the run failed.
        size: the number of ranks.
        limit_s: how long a rank waits in a collective.

    Returns:
        What happened and what to do; empty for any other failure.
    """
    all_failed = size > 1 and len(failures) == size
    if not all_failed or not all(failure.lost for failure in failures):
        return ""
    return (
        f"no rank failed on its own: each waited for another in a collective, for up to {limit_s:g} s "
        f"({told(failures)}). If a rank compiles for longer than that, raise the time limit of a trial "
        "(--timeout); if not, the ranks do not run the same collectives in the same order"
        f"{_divergence(failures)}"
    )


def _divergence(failures: Sequence[Failure]) -> str:
    """Where the ranks part, if the flight recorder knows."""
    flights = [failure.flight for failure in failures if failure.flight is not None]
    divergences = diagnose(flights).divergences if flights else ()
    return f": {'; '.join(map(str, divergences))}" if divergences else ""
