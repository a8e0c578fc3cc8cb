"""One observed step as a timeline: when it computed, and when its all-reduces were on the network.

torch's profiler sees both without a communication hook. Invariant: recording changes only the timing; the
profiler costs each operator some microseconds.
"""

import re
from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile, record_function

from ddpopt.observation.reducer_buckets import ObservedBucket
from ddpopt.tuning.simulate import Sent, Timeline

STEP = "ddpopt: step"


def record(step: Callable[[], object], buckets: Sequence[ObservedBucket]) -> Timeline:
    """Run one step under torch's profiler.

    Args:
        step: forward, backward and the update by an optimizer of torch, on a CPU; the backend must be gloo.
        buckets: the reducer's in this step, as `running_buckets` has them; each is sent in one all-reduce.

    Returns:
        The step. A bucket is ready when its all-reduce is launched. Two of them may be on the network at the
        same time, as gloo has two threads.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled, record_function(STEP):
        step()
    times = [(each.time_range, each.name) for each in profiled.events() or ()]
    origin = min(time.start for time, name in times if name == STEP)

    def spans(pattern: str) -> list[tuple[float, float]]:
        own = [time for time, name in times if re.match(pattern, name)]
        return sorted(((time.start - origin) / 1e6, (time.end - origin) / 1e6) for time in own)

    # the profiler's names: an operator on the thread that launches, a range on the thread that transfers;
    # what is sent after the last bucket says which parameters were used
    each = zip(buckets, spans("c10d::allreduce_$"), spans("gloo:.*all_reduce$"), strict=False)
    sent = [Sent(own.index, own.nbytes, at, *span, own.params) for own, (at, _), span in each]
    [(_, last)] = spans(STEP)
    # a node of the backward: its computation, and the hooks that launch; DDP waits after the last one
    nodes = spans("autograd::engine::evaluate_function") or [(last, last)]
    computed = max(end for _, end in nodes)
    back = max([computed, *(bucket.back_s for bucket in sent)])
    updates = [begin for begin, _ in spans(r"Optimizer\.step#") if begin >= computed]
    return Timeline(tuple(sent), nodes[0][0], computed, min(updates, default=back), last)
