"""Exchanging plans between all ranks, and describing how they differ.

Invariant: a rank that fails before it has a plan tells the others, so that none waits for it.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ddpopt.ddp.agreement import agree, announce, in_group
from ddpopt.errors import InfrastructureError, PlanMismatchError
from ddpopt.planning.plan import Plan

SHOWN_BUCKETS = 8
SHOWN_NAMES = 6


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
        return f"  no plan on {_ranks(without)}, one on the others"
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
            views = "; ".join(f"{_ranks(ranks)}: {_names(params)}" for params, ranks in versions.items())
            yield f"  bucket {place}: {views}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _names(params: tuple[str, ...] | None) -> str:
    if params is None:
        return "no such bucket"
    more = f", and {len(params) - SHOWN_NAMES} more" if len(params) > SHOWN_NAMES else ""
    return ", ".join(params[:SHOWN_NAMES]) + more
