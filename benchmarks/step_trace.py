"""Record when one training step computed and sent, and how much of the sending was exposed.

Invariant: recording changes only the timing. torch's profiler sees both without a communication hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[float, float]
PHASES = ("forward", "backward", "update")
# the profiler's name for a node of the backward: its computation, and the hooks that launch all-reduces
NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Trace:
    """One step; all times in milliseconds from the start of its forward.

    Attributes:
        forward: start and end of the forward.
        backward: start and end of the backward, which ends when the last gradient is back from the network.
        computed: when the backward's computation ended; the rest is waiting for the network.
        update: start and end of the optimizer's update.
        launches: when each bucket's all-reduce was launched, in order.
        transfers: start and end of each transfer on the network, in the same order.
    """

    forward: Span
    backward: Span
    computed: float
    update: Span
    launches: tuple[float, ...]
    transfers: tuple[Span, ...]


def record(
    forward: Callable[[], object], backward: Callable[[], object], update: Callable[[], object]
) -> Trace:
    """Run one step under torch's profiler, which costs each operator some microseconds.

    Args:
        forward: the step's first phase.
        backward: its second phase, which waits for its all-reduces; the backend must be gloo.
        update: its last phase.

    Returns:
        The trace of the step.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for phase, run in zip(PHASES, (forward, backward, update), strict=True):
            with record_function(phase):
                run()
    seen: dict[str, list[Span]] = {}
    for event in profiled.events() or ():
        seen.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    origin = seen["forward"][0][0]

    def spans(name: str) -> tuple[Span, ...]:
        microseconds = ((start - origin, end - origin) for start, end in sorted(seen.get(name, ())))
        return tuple((start / 1000, end / 1000) for start, end in microseconds)

    forward_span, backward_span, update_span = (spans(phase)[0] for phase in PHASES)
    # the profiler's names: an operator on the thread that launches, a range on the thread that transfers
    launches = tuple(start for start, _ in spans("c10d::allreduce_"))
    nodes = [span for name in seen if name.startswith(NODE) for span in spans(name)]
    return Trace(
        forward=forward_span,
        backward=backward_span,
        # DDP waits for its buckets after the last node
        computed=max((end for _, end in nodes), default=backward_span[0]),
        update=update_span,
        launches=launches,
        transfers=spans("gloo:all_reduce"),
    )


def exposed_share(trace: Trace) -> float:
    """The share of all-reduce time that is not hidden by computation.

    That is the time with a transfer after the last computation of the backward, divided by the total time
    with a transfer. Simultaneous transfers count once.

    Args:
        trace: the trace of one step.

    Returns:
        0 if everything is hidden or nothing is sent; 1 if everything is sent after the backward's
        computation.

    >>> step = Trace((0, 2), (2, 9), 5, (9, 9), (3, 4), ((3, 7), (4, 8)))
    >>> exposed_share(step)
    0.6
    """
    sent = _covered(trace.transfers)
    after = [(max(start, trace.computed), end) for start, end in trace.transfers if end > trace.computed]
    return _covered(after) / sent if sent else 0.0


def _covered(spans: Sequence[Span]) -> float:
    """The total time covered by at least one of the spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
