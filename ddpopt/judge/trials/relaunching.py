"""Run a task on ranks of our own, and again on new ones after a failure that the task can go on from."""

from collections.abc import Callable
from typing import Any

from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.pool import launch


def run_until_done(
    next_task: Callable[[], tuple[Any, ...]],
    *,
    nproc: int,
    left_s: Callable[[], float],
    survives: Callable[[RanksFailed], bool],
    on_event: Callable[[object], None],
    device: str | None,
) -> bool:
    """Launch a task until it returns, or until a failure ends it.

    Args:
        next_task: makes the task and its arguments for new ranks.
        nproc: the number of ranks.
        left_s: the seconds that are left.
        survives: called with a failure of the ranks; whether new ones shall go on.
        on_event: as for `ddpopt.ranks.pool.launch`.
        device: as for `ddpopt.ranks.pool.launch`.

    Returns:
        Whether it ended before the time was over.

    Raises:
        InfrastructureError: no ranks could be started.
    """
    while (limit_s := left_s()) > 0:
        try:
            launch(*next_task(), nproc=nproc, limit_s=limit_s, on_event=on_event, device=device)
        except RanksFailed as failed:
            if survives(failed):
                continue
        return True
    return False
