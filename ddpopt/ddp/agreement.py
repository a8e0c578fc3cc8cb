"""Comparing texts, and plans, between the ranks of a process group; a missing rank is a clean failure.

The texts are exchanged through the group's key-value store, not through a collective: a store has a timeout
that leaves the group usable, works while other collectives are in flight (under ``join()``, or in the middle
of a backward), and is the same for every backend.

Invariant: of the ranks that return, all return the same texts; and either all ranks return or all of them
raise. A rank that arrives after another one gave up learns of it and raises too; a rank that fails before it
has a plan tells the others, so that none waits for it.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpopt.errors import InfrastructureError, NoAnswerError, PlanMismatchError, numbered
from ddpopt.planning.plan import Plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Where this package's keys live in the group's store.
PREFIX = "ddpopt"
COMPLETE = "complete"
EXPIRED = "expired"

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05

SHOWN_BUCKETS = 8
SHOWN_NAMES = 6


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
    if group is dist.group.WORLD or group.group_desc == "default_pg":  # the latter once it is destroyed
        return ""
    name = group.group_name if group.group_desc == "undefined" else group.group_desc
    try:
        return f"{name} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"
    except KeyError:
        return f"{name} (destroyed)"


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
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s = FIRST_PAUSE_S
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


# --- plans ------------------------------------------------------------------------------------------


def exchange_plans(
    process_group: dist.ProcessGroup, what: str, decide: Callable[[], Plan | None], timeout: timedelta
) -> tuple[Plan | None, ...]:
    """Decide on a plan, and get every other rank's decision.

    Args:
        process_group: the ranks; each must make this call.
        what: a description of the comparison, for error messages.
        decide: makes this rank's plan, or returns None if it has none.
        timeout: how long to wait for the other ranks.

    Returns:
        The plan of each rank, in the order of the ranks in the group.

    Raises:
        PlanMismatchError: another rank's ``decide`` raised; the message repeats its error.
        InfrastructureError: a rank did not answer in time.
    """
    what = in_group(what, process_group)
    try:
        plan = decide()
    except Exception as error:
        with suppress(InfrastructureError):  # the first error matters
            announce(process_group, what, json.dumps({"problem": f"{type(error).__name__}: {error}"}))
        raise
    own = plan.to_json() if plan else None
    read = functools.cache(json.loads)  # ranks nearly always agree, and reading a large plan takes time
    ballots = [*map(read, agree(process_group, what, json.dumps({"plan": own}), timeout))]
    problems = [f"rank {rank}: {b['problem']}" for rank, b in enumerate(ballots) if "problem" in b]
    if problems:
        raise PlanMismatchError(
            f"{what}: another rank failed, so nothing was changed on this one:\n" + "\n".join(problems)
        )
    parse = functools.cache(Plan.from_json)
    texts = [ballot["plan"] for ballot in ballots]
    return tuple(plan if text == own else text and parse(text) for text in texts)


def same_buckets(plans: Sequence[Plan | None]) -> bool:
    """Whether all plans reduce the same parameters, in the same buckets, in the same order.

    Args:
        plans: one for each rank.

    Returns:
        True if they do; a rank without a plan differs from one that has one.
    """
    return len({_buckets(plan) for plan in plans}) == 1


def plan_difference(plans: Sequence[Plan | None]) -> str:
    """The difference between the ranks' plans, bucket by bucket.

    Args:
        plans: one for each rank.

    Returns:
        One line for each bucket that differs between ranks.
    """
    if None in plans:
        without = [rank for rank, plan in enumerate(plans) if plan is None]
        return f"  no plan on {numbered('rank', without)}, one on the others"
    lines = list(_difference_lines([_buckets(plan) or () for plan in plans]))
    if len(lines) > SHOWN_BUCKETS:
        lines = [*lines[:SHOWN_BUCKETS], f"  and {len(lines) - SHOWN_BUCKETS} more buckets"]
    return "\n".join(lines)


def _buckets(plan: Plan | None) -> tuple[tuple[str, ...], ...] | None:
    return None if plan is None else tuple(bucket.params for bucket in plan.buckets)


def _difference_lines(buckets_of: Sequence[tuple[tuple[str, ...], ...]]) -> Iterator[str]:
    for place in range(max(map(len, buckets_of))):
        # Dictionaries, not sets: every rank prints the same text.
        versions: dict[tuple[str, ...] | None, list[int]] = {}
        for rank, buckets in enumerate(buckets_of):
            versions.setdefault(buckets[place] if place < len(buckets) else None, []).append(rank)
        if len(versions) > 1:
            views = "; ".join(
                f"{numbered('rank', ranks)}: {_names(params)}" for params, ranks in versions.items()
            )
            yield f"  bucket {place}: {views}"


def _names(params: tuple[str, ...] | None) -> str:
    if params is None:
        return "no such bucket"
    more = f", and {len(params) - SHOWN_NAMES} more" if len(params) > SHOWN_NAMES else ""
    return ", ".join(params[:SHOWN_NAMES]) + more
