"""How ranks fail, which rank caused the failure, and the text that reports it.

When one rank fails, its peers fail too: in a collective that it left, or because they were terminated. A
report that shows only the first exit, or all failures alike, sends its reader to the wrong rank.

Plain data, without torch. Invariant: if any rank failed, there is at least one culprit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpopt.errors import InfrastructureError, numbered
from ddpopt.hang.diagnosis import described, diagnose
from ddpopt.hang.flights import Flight

FailureKind = Literal["raised", "died", "stalled", "ended"]

SHOWN_STACK_LINES = 40
SHOWN_LINES_OF_OTHERS = 8
"""Of each thread but the main one."""
SHOWN_OUTPUT_LINES = 20
NOT_THE_USERS = ("/torch/", "/ddpopt/", "/lib/python3", "<string>", "<frozen")
MARK = "   <-- the first frame outside of torch and ddpopt"
SHOWN_CHARACTERS = 400
OF_RECORD = "/ddpopt/ranks/black_box.py"
"""The thread that keeps a rank's record says nothing about the rank."""

# Messages of a collective whose peer left or never arrived. Gloo raises a plain RuntimeError.
PEER_SIGNS = (
    "gloo/transport/",
    "Connection closed by peer",
    "Connection reset by peer",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "ddpopt.ranks.exchange.PeersMissing",
)
# If the innermost frame is in one of these files, it waits for a peer.
WAITING_FILES = ("/torch/distributed/", "/ddpopt/ranks/exchange.py")
# What NCCL's watchdog prints before it aborts the process.
WATCHDOG_SIGN = "Watchdog caught collective operation timeout"
THREAD = re.compile(r"^(Thread|Current thread) 0x[0-9a-f]+", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line \d+ in (?P<function>.*)$', re.MULTILINE)
TRACEBACK = re.compile(r"^Traceback.*\n(?:  .*\n)*(?=\S)", re.MULTILINE)

OUT_OF_MEMORY = "SIGKILL usually means the machine ran out of memory: look for 'Killed process' in dmesg."
COMPARE = "Compare the collectives in the stacks: every rank must enter the same ones in the same order."
RAISE_LIMIT = (
    "The innermost call is first in each stack. If it is only slow, raise the time limit, for commands of "
    "ddpopt with --timeout."
)


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: the number of the rank.
        kind: ``"raised"``: it raised an exception; ``"died"``: it ended without one; ``"stalled"``: it ran
            into a limit; ``"ended"``: it was terminated during its work because a peer had failed.
        what: the work it was doing, or the last thing it is known to have done.
        exit_code: exit code of its process, negative for a signal; None if unknown.
        signal: name of the signal that ended it, for instance ``"SIGKILL"``; empty if there was none.
        stack: the traceback of the exception, or the stacks of all threads, innermost frame first; empty if
            the process could not write one.
        output: its output.
        flight: what torch's flight recorder held; None if that is not known.
    """

    rank: int
    kind: FailureKind
    what: str
    exit_code: int | None = None
    signal: str = ""
    stack: str = ""
    output: str = ""
    flight: Flight | None = None

    @property
    def how(self) -> str:
        """How the rank failed, as text."""
        died = f"died of {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"
        return {
            "raised": "raised an exception",
            "died": died,
            "stalled": "exceeded its time limit",
            "ended": "was terminated while its peers waited",
        }[self.kind]

    @property
    def error(self) -> str:
        """The type and message of the exception that was raised."""
        return " ".join(TRACEBACK.split(self.stack)[-1].split())[:SHOWN_CHARACTERS]

    @property
    def waits_for_peers(self) -> bool:
        """Whether the rank failed in a collective because a peer was missing."""
        if self.kind == "raised":
            return any(sign in self.stack for sign in PEER_SIGNS)
        if self.kind == "died":
            return WATCHDOG_SIGN in self.output
        innermost = _innermost_path(self.stack)
        return any(part in innermost for part in WAITING_FILES)


def _innermost_path(stacks: str) -> str:
    """The file of the main thread's innermost frame, from stacks that faulthandler wrote."""
    for stack in stacks.split("\n\n"):
        if _is_of_main_thread(stack):
            return next(FRAME.finditer(stack))["path"]
    return ""


def culprits(failures: Sequence[RankFailure]) -> tuple[RankFailure, ...]:
    """Find the ranks whose failure was not caused by a peer.

    Args:
        failures: one for each rank that did not return a value.

    Returns:
        The ranks that raised, died or stalled outside a collective. If there are none, those that were
        terminated outside a collective: they kept their peers waiting. If there are none of these either, all
        of them: each waits for another.
    """
    alone = [failure for failure in failures if not failure.waits_for_peers]
    of_themselves = [failure for failure in alone if failure.kind != "ended"]
    return tuple(of_themselves or alone or failures)


class RanksFailed(InfrastructureError):
    """At least one of the ranks that were started returned no value.

    Attributes:
        failures: one for each rank that returned no value, by rank.
        values: the values of the other ranks.
        culprits: the ranks whose failure no peer caused; the others failed as a consequence.
        exit_code: 1 if ranks only raised exceptions, 3 if a rank died or stalled.
        of_time_alone: whether every failure was a time limit.
        parting: where the ranks part, or the last collective of those that wait; empty if that is not known.
    """

    def __init__(
        self, failures: Sequence[RankFailure], size: int, values: Mapping[int, Any] | None = None
    ) -> None:
        self.values = dict(values or {})
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        self.culprits = culprits(self.failures)
        only_raised = all(one.kind == "raised" and not one.waits_for_peers for one in self.culprits)
        self.exit_code = 1 if only_raised else 3
        self.of_time_alone = all(
            one.kind in ("stalled", "ended") or one.waits_for_peers for one in self.culprits
        )
        head = _headline(self.failures, self.culprits, size)
        self.parting = _parting(self.failures)
        parting = [self.parting] if self.parting else []
        super().__init__("\n".join([head, *parting, *_accounts(self.culprits), *_advice(self.culprits)]))


def _headline(failures: Sequence[RankFailure], guilty: Sequence[RankFailure], size: int) -> str:
    head = f"expected a value from each of {size} ranks, got none from {_ranks(failures)}"
    if len(guilty) < len(failures):
        return f"{head}; it started with {_ranks(guilty)}"
    if all(failure.waits_for_peers for failure in guilty):
        return f"{head}: in a collective that others did not enter"
    return head


def _parting(failures: Sequence[RankFailure]) -> str:
    flights = [failure.flight for failure in failures if failure.flight is not None]
    divergences = diagnose(flights).divergences
    if divergences:
        return "\n".join(f"where the ranks part: {divergence}" for divergence in divergences)
    return "\n".join(
        f"rank {failure.rank} waits in {described(failure.flight.sent[-1])}"
        for failure in failures
        if failure.waits_for_peers and failure.flight is not None and failure.flight.sent
    )


def _ranks(failures: Sequence[RankFailure]) -> str:
    return numbered("rank", [failure.rank for failure in failures])


def _accounts(failures: Sequence[RankFailure]) -> list[str]:
    """What happened on each rank; ranks with the same text are listed together."""
    ranks: dict[str, list[RankFailure]] = {}
    for failure in failures:
        evidence = _quote(_evidence(failure)) + _quote(_last(failure.output, SHOWN_OUTPUT_LINES))
        error = f": {failure.error}" if failure.kind == "raised" else ""
        ranks.setdefault(f"{failure.how} in {failure.what!r}{error}{evidence}", []).append(failure)
    return [f"{_ranks(group)} {account}" for account, group in ranks.items()]


def _evidence(failure: RankFailure) -> str:
    """The part of a rank's stacks that says most: around the innermost frames, of the main thread first."""
    if failure.kind == "raised":  # a traceback, whose innermost frame is last
        return _last(failure.stack, SHOWN_STACK_LINES)
    stacks = [
        stack
        for stack in THREAD.sub("Thread", failure.stack).split("\n\n")
        if stack.strip() and OF_RECORD not in stack
    ]
    stacks.sort(key=lambda stack: not _is_of_main_thread(stack))  # stable: the others keep their order
    if not stacks:
        return ""
    first, *others = stacks
    lines = _marked(first).splitlines()[:SHOWN_STACK_LINES]
    for stack in others:
        own = stack.strip("\n").splitlines()[:SHOWN_LINES_OF_OTHERS]
        if len(lines) + len(own) < SHOWN_STACK_LINES:
            lines += ["", *own]
    return "\n".join(lines)


def _is_of_main_thread(stack: str) -> bool:
    frames = list(FRAME.finditer(stack))
    return bool(frames) and frames[-1]["function"] == "<module>"


def _marked(stack: str) -> str:
    """A stack whose innermost frame outside of torch, ddpopt and Python is marked."""
    for frame in FRAME.finditer(stack):
        if not any(part in frame["path"] for part in NOT_THE_USERS):
            return f"{stack[: frame.end()]}{MARK}{stack[frame.end() :]}".strip("\n")
    return stack.strip("\n")


def _last(text: str, at_most: int) -> str:
    return "\n".join(text.strip("\n").splitlines()[-at_most:])


def _quote(text: str) -> str:
    """The lines of a text, indented, each on a new line."""
    return "".join(f"\n    {line}".rstrip(" ") for line in text.strip("\n").splitlines())


def _advice(guilty: Sequence[RankFailure]) -> list[str]:
    advice = [OUT_OF_MEMORY] if any(one.how == "died of SIGKILL" for one in guilty) else []
    if any(failure.waits_for_peers for failure in guilty):
        return [*advice, COMPARE]
    slow = any(failure.kind in ("stalled", "ended") for failure in guilty)
    return [*advice, RAISE_LIMIT] if slow else advice
