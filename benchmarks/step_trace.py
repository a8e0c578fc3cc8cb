"""Record when one training step computed and when it sent, and tell how much of the sending was exposed.

Invariant: recording changes nothing but the clock. torch's profiler sees both without a communication hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[float, float]
PHASES = ("forward", "backward", "update")
# the profiler's name for one node of the backward: its computing, and the hooks that launch all-reduces
NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Trace:
    """One step; all times in milliseconds from the start of its forward.

    Attributes:
        forward: from when to when.
        backward: the same; it ends when the last gradient is back from the network.
        computed: when the backward's computing ended; what follows is waiting for the network.
        update: as forward, of the optimizer.
        launches: when each bucket's all-reduce was launched, in order.
        transfers: when each was on the network, in the same order.
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
        backward: its second; it waits for its all-reduces, of which gloo is the backend.
        update: its last.

    Returns:
        When all of it ran.
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
    """The share of all-reduce time that no computing hides.

    That is the time with something on the network after the last computing of the backward ended, over all
    time with something on the network. Transfers at one time count once.

    Args:
        trace: of one step.

    Returns:
        0: all is hidden; 1: all is sent after the backward's computing. 0 also where nothing is sent.

    >>> step = Trace((0, 2), (2, 9), 5, (9, 9), (3, 4), ((3, 7), (4, 8)))
    >>> exposed_share(step)
    0.6
    """
    sent = _covered(trace.transfers)
    after = [(max(start, trace.computed), end) for start, end in trace.transfers if end > trace.computed]
    return _covered(after) / sent if sent else 0.0


def _covered(spans: Sequence[Span]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
