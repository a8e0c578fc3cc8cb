"""Comparing short texts between the ranks of a process group, with a clean failure when a rank is missing.

The texts are exchanged through the group's key-value store, not through a collective: a store has a timeout
that leaves the group usable, works while other collectives are in flight (under ``join()``, or in the middle
of a backward), and is the same for every backend.

Invariant: of the ranks that return, all return the same texts; and either all ranks return or all of them
raise. A rank that arrives after another one gave up learns of it and raises too.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpopt.errors import InfrastructureError, NoAnswerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Where this package's keys live in the group's store.
PREFIX = "ddpopt"
COMPLETE = "complete"
EXPIRED = "expired"

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


def agree(
    process_group: dist.ProcessGroup, what: str, payload: str, timeout: timedelta = timedelta(seconds=30)
) -> tuple[str, ...]:
    """Exchange one text with every rank of a group. Every rank must call this the same number of times.

    Each distinct text is fetched once, so each rank costs a digest.

    Args:
        process_group: the ranks that take part; any group of any backend, of any size.
        what: a description of the comparison for error messages; also separates independent sequences
            of calls from each other.
        payload: this rank's text.
        timeout: how long to wait for the other ranks.

    Returns:
        The text of every rank, in the order of the ranks in the group.

    Raises:
        InfrastructureError: a rank did not answer in time, this rank answered after another one gave up,
            or the store failed.
    """
    # A group of the "fake" backend has no peers: it exists to inspect structure in one process.
    if process_group.size() == 1 or dist.get_backend(process_group) == "fake":
        return (payload,) * process_group.size()
    with _store_errors_named(what):
        board, earlier = _post(process_group, what, payload)
        opinion = COMPLETE if _await_everyone(board, process_group.size(), timeout) else EXPIRED
        # The first rank to write a verdict decides for all, so that all end in the same way.
        if board.compare_set("verdict", "", opinion).decode() == EXPIRED:
            raise NoAnswerError(_missing_text(board, process_group, what, timeout))
        payloads = _payloads(board, process_group, payload)
        # All ranks are in this round, so none reads the previous round any more.
        _forget(earlier, process_group.rank())
    return payloads


def group_name(group: dist.ProcessGroup) -> str:
    """The name of a process group, and its members' ranks among all; empty for the default group."""
    if group is dist.group.WORLD:
        return ""
    name = group.group_name if group.group_desc == "undefined" else group.group_desc
    return f"{name} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"


def in_group(what: str, process_group: dist.ProcessGroup) -> str:
    """Add the name of a process group to a description, if it is not the default group."""
    return f"{what} in group {name}" if (name := group_name(process_group)) else what


def announce(process_group: dist.ProcessGroup, what: str, payload: str) -> None:
    """Take this rank's turn in :func:`agree` without waiting for the others, as a rank that fails does.

    Args:
        process_group: as in :func:`agree`.
        what: as in :func:`agree`.
        payload: the text that the other ranks' calls of :func:`agree` return for this rank.

    Raises:
        InfrastructureError: the store failed.
    """
    if process_group.size() == 1 or dist.get_backend(process_group) == "fake":
        return
    with _store_errors_named(what):
        _post(process_group, what, payload)


def _part(store: "Store", name: str) -> "Store":
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch does not mark its re-exports


def _post(process_group: dist.ProcessGroup, what: str, payload: str) -> tuple["Store", "Store"]:
    """Write this rank's text; return this round's part of the store, and the previous round's."""
    rank = process_group.rank()
    # Private: the prefixed store that init_process_group or new_group made.
    own_store = dist.distributed_c10d._get_process_group_store(process_group)
    sequence = _part(own_store, f"{PREFIX}/{what}")
    # The store counts this rank's calls, so that no state outlives the process group.
    number = sequence.add(f"calls/{rank}", 1)
    board = _part(sequence, str(number))
    board.set(f"text/{rank}", payload)
    board.set(f"digest/{rank}", _digest(payload))
    board.add("arrived", 1)
    return board, _part(sequence, str(number - 1))


def _digest(payload: str) -> str:
    return hashlib.sha256(payload.encode()).hexdigest()


def _await_everyone(board: "Store", size: int, timeout: timedelta) -> bool:
    # Polling instead of Store.wait, which holds the client's lock while it waits: the backends' watchdog
    # threads share the client.
    deadline, pause_s = time.monotonic() + timeout.total_seconds(), FIRST_PAUSE_S
    while board.add("arrived", 0) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or board.check(["verdict"]):
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return True


def _payloads(board: "Store", process_group: dist.ProcessGroup, own: str) -> tuple[str, ...]:
    digests = [board.get(f"digest/{rank}").decode() for rank in range(process_group.size())]
    texts = {_digest(own): own}
    for rank, digest in enumerate(digests):
        if digest not in texts:
            texts[digest] = board.get(f"text/{rank}").decode()
    return tuple(texts[digest] for digest in digests)


def _missing_text(board: "Store", process_group: dist.ProcessGroup, what: str, timeout: timedelta) -> str:
    missing = [rank for rank in range(process_group.size()) if not board.check([f"digest/{rank}"])]
    if not missing:
        return (
            f"{what}: rank {process_group.rank()} answered after another rank had given up waiting. Make "
            "this call on all ranks at about the same time, or allow more time with timeout="
        )
    return (
        f"{what}: no answer from rank {', '.join(map(str, missing))} of {process_group.size()} within "
        f"{timeout.total_seconds():g} s. Every rank of the process group must make this call: check the "
        "missing rank's log for what stopped it, or allow more time with timeout="
    )


def _forget(board: "Store", rank: int) -> None:
    own = [f"text/{rank}", f"digest/{rank}"]
    shared = ["arrived", "verdict"] if rank == 0 else []
    for key in own + shared:
        with suppress(RuntimeError):  # not every store can delete
            board.delete_key(key)


@contextmanager
def _store_errors_named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # dist.DistError and its children are RuntimeErrors
        raise InfrastructureError(
            f"{what}: the process group's key-value store failed ({error}). Usually this means that rank 0, "
            "which hosts it, has exited: check its log for the reason"
        ) from error
