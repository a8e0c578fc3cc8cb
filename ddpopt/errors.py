"""Every error that ddpopt raises, each with its exit code on the command line.

Invariant: a user's mistake raises one of these, never a bare assert or a traceback from inside torch.
Each message says what was expected, what was found, where, and what to do next.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest known names that are similar to an unknown one; empty if none is.

    >>> did_you_mean("toch", ["eager", "torch"])
    "; did you mean 'torch'?"
    >>> did_you_mean("inlin", ["eager", "ddpopt-inline"])
    "; did you mean 'ddpopt-inline'?"
    >>> did_you_mean("x", ["eager", "torch"])
    ''
    """
    names = list(known)
    near = difflib.get_close_matches(name, names) or [
        each for each in names if len(name) > 2 and name in each
    ]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


LONG_SPAN = 4
"""So many numbers in a row are written as their first and last."""
MOST_NUMBERS = 12


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """A noun with the numbers of what it means; many numbers in a row as a span.

    Args:
        noun: the noun in the singular.
        numbers: the numbers, in ascending order.

    >>> numbered("rank", [0]), numbered("rank", [0, 2]), numbered("rank", [1, 4, 5, 6, 7])
    ('rank 0', 'ranks 0, 2', 'ranks 1, 4-7')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [part for span in spans for part in _in_short(span)]
    more = f" and {len(parts) - MOST_NUMBERS} more" if len(parts) > MOST_NUMBERS else ""
    ending = "" if len(numbers) == 1 else "s"
    return f"{noun}{ending} {', '.join(parts[:MOST_NUMBERS])}{more}"


def _in_short(span: Sequence[int]) -> list[str]:
    """Numbers in a row, one by one if they are few."""
    is_long = len(span) >= LONG_SPAN
    return [f"{span[0]}-{span[-1]}"] if is_long else [str(number) for number in span]


class DdpoptError(Exception):
    """Base class of all errors of this package.

    Attributes:
        exit_code: the exit code of the ``ddpopt`` command when it gets this error
            (0 right, 1 the program under test is wrong, 2 usage, 3 not judged).
    """

    exit_code = 1


class UsageError(DdpoptError):
    """An argument, a target or a plan that cannot be used as given."""

    exit_code = 2


class UnsupportedError(UsageError):
    """A combination of individually valid inputs that ddpopt does not support; the message names it."""


class PlanMismatchError(DdpoptError):
    """A plan and a module, or the plans of two ranks, do not belong together."""


class CertificateError(DdpoptError):
    """A cut graph is not the same program as the graph that it was cut from.

    Attributes:
        violations: one sentence for each violation, in the order of the checks.
    """

    def __init__(self, violations: tuple[str, ...]) -> None:
        self.violations = violations
        lines = "\n".join(f"  - {violation}" for violation in violations)
        super().__init__(
            f"the cut graph is not the program it was cut from; {len(violations)} violation(s):\n{lines}\n"
            "This is a bug in ddpopt: please report it with the graph (TORCH_LOGS=graph_code)."
        )


class SegmentError(DdpoptError):
    """The backend failed for a segment of a graph that ddpopt cut; the message names it and has the error."""


class CaptureError(DdpoptError):
    """torch itself failed while it captured a train step; that is a fault, and no restriction of ddpopt."""


class HandOverError(DdpoptError):
    """A gradient that was handed to DDP from inside a backward turned out to be incomplete."""


class NotJudgedError(DdpoptError):
    """Nothing could be judged: eager itself fails, or there is nothing to compare."""

    exit_code = 3


class InfrastructureError(NotJudgedError):
    """A rank died, a rendezvous failed, or a peer did not answer in time."""


class NoAnswerError(InfrastructureError):
    """A rank did not take part in an exchange in time."""


class VerificationError(DdpoptError):
    """A verification found something wrong; the message lists every finding."""


def require_choice(argument: str, value: str, choice: Any) -> None:
    """Check that an argument is one of the values of a ``Literal``.

    Raises:
        UsageError: it is none of them; the message has all.
    """
    words = get_args(choice)
    if value not in words:
        *others, last = map(repr, words)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"{argument}: expected {expected}, got {value!r}")
