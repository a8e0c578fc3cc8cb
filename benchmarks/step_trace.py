"""How much of a traced step's sending was exposed (`ddpopt.tuning.observed` records the step)."""

from collections.abc import Sequence

from ddpopt.tuning.simulate import Timeline

Span = tuple[float, float]


def exposed_share(step: Timeline) -> float:
    """The share of all-reduce time that is not hidden by computation.

    That is the time with a transfer after the last computation of the backward, divided by the total time
    with a transfer. Simultaneous transfers count once.

    Args:
        step: the observed step.

    Returns:
        0 if everything is hidden or nothing is sent; 1 if everything is sent after the backward's
        computation.

    >>> from ddpopt.tuning.simulate import Sent
    >>> buckets = Sent(0, 8, 3, 3, 7), Sent(1, 8, 4, 4, 8)
    >>> exposed_share(Timeline(buckets, 2, 5, 9, 9))
    0.6
    """
    transfers = [(each.sent_s, each.back_s) for each in step.buckets]
    sent = _covered(transfers)
    after = [(max(start, step.backward_s), end) for start, end in transfers if end > step.backward_s]
    return _covered(after) / sent if sent else 0.0


def _covered(spans: Sequence[Span]) -> float:
    """The total time covered by at least one of the spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
