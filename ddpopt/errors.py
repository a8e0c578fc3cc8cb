"""Every error that ddpopt raises, each with the exit code that the command line gives it.

Invariant: a user's mistake ends in one of these, never in a bare assert or a traceback from inside torch.
Each message says what was expected, what came, where, and what to do next.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known names are like one that is not known; empty if none is.

    >>> did_you_mean("toch", ["eager", "torch"])
    "; did you mean 'torch'?"
    >>> did_you_mean("x", ["eager", "torch"])
    ''
    """
    near = difflib.get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


class DdpoptError(Exception):
    """Root of all errors of this package.

    Attributes:
        exit_code: what the ``ddpopt`` command exits with when this error reaches it
            (0 right, 1 the program under test is wrong, 2 usage, 3 not judged).
    """

    exit_code = 1


class UsageError(DdpoptError):
    """An argument, a target or a plan that cannot be used as given."""

    exit_code = 2


class UnsupportedError(UsageError):
    """A combination, each part of which can be used as given, that ddpopt does not do; it says which."""


class PlanMismatchError(DdpoptError):
    """A plan and a module, or the plans of two ranks, do not belong together."""


class CertificateError(DdpoptError):
    """A cut graph is not the same program as the graph that it was cut from.

    Attributes:
        violations: one sentence for each broken invariant, in the order of the checks.
    """

    def __init__(self, violations: tuple[str, ...]) -> None:
        self.violations = violations
        lines = "\n".join(f"  - {violation}" for violation in violations)
        super().__init__(
            f"the cut graph is not the program it was cut from; {len(violations)} violation(s):\n{lines}\n"
            "This is a bug in ddpopt: please report it with the graph (TORCH_LOGS=graph_code)."
        )


class HandOverError(DdpoptError):
    """A gradient that was handed to DDP from inside a backward turned out not to be the whole of it."""


class NotJudgedError(DdpoptError):
    """Nothing could be judged: eager itself fails, or there is nothing to compare."""

    exit_code = 3


class InfrastructureError(NotJudgedError):
    """A rank died, a rendezvous failed, or a peer did not answer in time."""


class VerificationError(DdpoptError):
    """A verification found something wrong; the message has every finding."""
