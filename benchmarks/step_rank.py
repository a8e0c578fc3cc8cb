"""One rank's part of `benchmarks.step`: run the modes in turn, the parts of a step, and traced steps.

Invariant: both ranks run the same steps in the same order, and the slower rank's time counts. Nothing is sent
while computation is measured, and nothing is computed while sending is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.devices import CPU, CUDA, device_of, elapsed, elapsed_together, larger_of_both, now
from benchmarks.step_modes import EAGER, MODES, STEP, TORCH, WHOLE, Mode
from benchmarks.step_trace import exposed_share
from benchmarks.step_workloads import WORKLOADS
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.ranks.group import Ranks
from ddpopt.tuning.observed import record
from ddpopt.tuning.simulate import Timeline

STEPS_TO_COMPILE = 3
STEPS_A_TURN = 2


@dataclass(frozen=True)
class Job:
    """The job of both ranks.

    Attributes:
        model: a key of `benchmarks.step_workloads.WORKLOADS`.
        modes: some of `benchmarks.step_modes.MODES`.
        backend: name of a Dynamo backend.
        rounds: the number of rounds, in each of which every mode has a turn.
        device: one of `benchmarks.devices.DEVICES`.
    """

    model: str
    modes: tuple[str, ...]
    backend: str
    rounds: int
    device: str


@dataclass(frozen=True)
class Figures:
    """The figures of one model; each is the larger of both ranks.

    Attributes:
        model: its name.
        bucket_bytes: sizes of eager DDP's buckets, in order.
        graphs: by mode, the number of graphs its backend was given; only for modes that torch compiles.
        steps_s: by mode, two steps for each round.
        parts: the results of `Parts.measure`, equally many.
        exposed: by mode, the exposed share of each traced step; empty if steps cannot be traced.
        peak_bytes: by mode, the peak memory of a step, with DDP's buckets where they take memory.
    """

    model: str
    bucket_bytes: list[int]
    graphs: dict[str, int]
    steps_s: dict[str, list[float]]
    parts: dict[str, list[float]]
    exposed: dict[str, list[float]]
    peak_bytes: dict[str, int]


def run(ranks: Ranks, job: Job) -> Figures:
    """Measure all modes; a task for both ranks.

    Args:
        ranks: both ranks; rank 0 emits a short message when a part is done.
        job: the job.

    Returns:
        All figures, the same on both ranks.
    """
    torch.set_num_threads(1)
    device = device_of(job.device, ranks.rank)
    if device.type == CUDA:
        torch.cuda.set_device(device)
    try:
        return _measured(job, device, ranks.emit)
    finally:
        torch._dynamo.reset()
        gc.collect()  # free reducers before their process group


def _measured(job: Job, device: torch.device, tell: Callable[[str], None]) -> Figures:
    _warm_up(job.backend, device)
    # the parts of a step are measured in two modes, even if those were not requested
    names = [name for name in MODES if name in (*job.modes, EAGER, WHOLE)]
    modes = {name: Mode(name, WORKLOADS[job.model], job.backend, device) for name in names}
    for name, mode in modes.items():
        for _ in range(STEPS_TO_COMPILE):
            mode.step()
        tell(f"{job.model}: {name} compiled")
    parts = Parts(modes[WHOLE], modes[EAGER])
    asked = {name: modes[name] for name in job.modes}
    with _collector_at_rest():
        steps, measured = _timed(job, asked, parts, tell)
        traces = _traced(asked, job.rounds) if device.type == CPU else {}
    with _collector_at_rest():  # so that the profiler's garbage is not freed in a measured step
        peaks = {name: _peak(mode) for name, mode in asked.items()}
    shares = {name: [exposed_share(trace) for trace in found] for name, found in traces.items()}
    return Figures(
        model=job.model,
        bucket_bytes=[buffer.numel() * buffer.element_size() for buffer in parts.buffers],
        graphs={name: mode.counted.graphs for name, mode in asked.items() if name in (WHOLE, TORCH)},
        steps_s={name: larger_of_both(values, device) for name, values in steps.items()},
        parts={key: larger_of_both([values[key] for values in measured], device) for key in measured[0]},
        exposed={name: larger_of_both(values, device) for name, values in shares.items()},
        peak_bytes={name: int(larger_of_both([peak], device)[0]) for name, peak in peaks.items()},
    )


def _timed(
    job: Job, modes: Mapping[str, Mode], parts: Parts, tell: Callable[[str], None]
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """This rank's times of all steps and of all parts, modes in turn."""
    steps: dict[str, list[float]] = {name: [] for name in modes}
    measured: list[dict[str, float]] = []
    for turn in range(job.rounds):
        first_mode = turn % len(job.modes)
        for name in (*job.modes[first_mode:], *job.modes[:first_mode]):
            mode = modes[name]
            mode.step()  # the previous mode left another model in the processor's caches
            steps[name] += [elapsed_together(mode.step, mode.device) for _ in range(STEPS_A_TURN)]
        measured += [parts.measure() for _ in range(STEPS_A_TURN)]
        tell(f"{job.model}: round {turn + 1}")
    return steps, measured


def _traced(modes: Mapping[str, Mode], rounds: int) -> dict[str, list[Timeline]]:
    """One traced step of each mode per round, modes in turn."""
    traces: dict[str, list[Timeline]] = {name: [] for name in modes}
    for _ in range(rounds):
        for name, mode in modes.items():
            mode.step()
            dist.barrier()
            traces[name].append(record(mode.step, running_buckets(mode.ddp)))
    return traces


def _peak(mode: Mode) -> int:
    """The peak memory of a step that follows a step of the same mode, with DDP's buckets where they take any.

    `ddpopt.train_step` reduces its own buffers. A CPU has no memory for pages that are never written.
    """
    mode.step()
    dist.barrier()
    untouched = mode.name == STEP and mode.device.type == CPU
    buckets = 0 if untouched else sum(bucket.nbytes for bucket in running_buckets(mode.ddp))
    return peak_bytes(mode.step, mode.device) + buckets


def _warm_up(backend: str, device: torch.device) -> None:
    """Compile something, so that no mode pays one-time costs."""
    layer = nn.Linear(8, 8).to(device)
    compiled = torch.compile(lambda x: layer(x).relu(), backend=backend)
    compiled(torch.ones(2, 8, device=device)).sum().backward()


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Parts:
    """Measures the parts.

    Args:
        whole: the mode that computes; its graph is compiled whole, and no gradient is sent.
        eager: the mode that shows when in backward the first bucket is complete.

    Attributes:
        buffers: buffers of the sizes of eager's buckets, in order.
    """

    def __init__(self, whole: Mode, eager: Mode) -> None:
        self._whole = whole
        self._eager = eager
        buckets = running_buckets(eager.ddp)
        self.buffers = [torch.zeros(bucket.numel, device=eager.device) for bucket in buckets]
        parameters = dict(eager.ddp.module.named_parameters())
        self._first_bucket = [parameters[name] for name in buckets[0].params]

    def measure(self) -> dict[str, float]:
        """Measure each part once.

        Returns:
            Seconds of ``forward``, ``backward``, ``update``, ``comm`` and ``last_bucket``; and
            ``first_bucket``, the share of the backward after which the first bucket is complete.
        """
        device = self._whole.device
        return {
            **self._compute(),
            "first_bucket": self._share_until_first_bucket(),
            "comm": elapsed_together(lambda: _all_reduce(self.buffers), device),
            "last_bucket": elapsed_together(lambda: _all_reduce(self.buffers[-1:]), device),
        }

    def _compute(self) -> dict[str, float]:
        mode = self._whole
        phases = {"forward": mode.forward, "backward": mode.backward, "update": mode.update}
        with mode.ddp.no_sync():
            mode.step()
            dist.barrier()
            return {name: elapsed(phase, mode.device) for name, phase in phases.items()}

    def _share_until_first_bucket(self) -> float:
        mode = self._eager
        ready: list[float] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(now(mode.device)))
            for parameter in self._first_bucket
        ]
        with mode.ddp.no_sync():
            mode.forward()
            start = now(mode.device)
            backward_s = elapsed(mode.backward, mode.device)
            mode.update()
        for handle in handles:
            handle.remove()
        return (max(ready) - start) / backward_s


def _all_reduce(buffers: Sequence[Tensor]) -> None:
    """Launch all at once and in order, like DDP."""
    launched = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    for work in launched:
        work.wait()


def peak_of(changes: Iterable[int]) -> int:
    """The highest running sum, at least 0.

    Args:
        changes: bytes allocated (above 0) and freed (below 0), in chronological order.

    >>> peak_of([100, -40, 70, -130])
    130
    """
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The peak memory of `run`, beyond the memory held before it.

    Args:
        run: called once.
        device: whose memory counts.

    Returns:
        Bytes of tensors, without memory of network libraries or compilers.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return peak_of(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
