"""One rank's part of `benchmarks.step`: run the modes in turn, the parts of a step, and traced steps.

Started as a process of its own, with a `Job` as JSON in its arguments. Rank 0 writes one line of JSON to its
standard output for each thing done, and the result last. The process ends when its standard input does, so
that it never outlives the one that started it.

Invariant: both ranks run the same steps in the same order, and the slower rank's time counts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.devices import (
    CPU,
    CUDA,
    WORLD_SIZE,
    device_of,
    elapsed_together,
    group_backend,
    larger_of_both,
)
from benchmarks.group import process_group
from benchmarks.memory import peak_bytes
from benchmarks.step_figures import Figures, Job
from benchmarks.step_modes import EAGER, MODES, TORCH, WHOLE, Mode
from benchmarks.step_parts import Parts
from benchmarks.step_trace import Trace, exposed_share, record
from benchmarks.step_workloads import WORKLOADS

STEPS_TO_COMPILE = 3
STEPS_A_TURN = 2


def compile_seconds(mode: Mode) -> float:
    """Time for the first steps, from empty caches."""
    from torch._inductor.utils import fresh_cache  # imports Inductor, which not every backend needs

    with fresh_cache():

        def first_steps() -> None:
            for _ in range(STEPS_TO_COMPILE):
                mode.step()

        return elapsed_together(first_steps, mode.device)


def run(job: Job, device: torch.device, tell: Callable[[str], None]) -> Figures:
    """Measure all modes.

    Args:
        job: what to do.
        device: of this rank.
        tell: called with a few words when something is done.

    Returns:
        All figures, the same on both ranks; the traces are this rank's own.
    """
    _warm_up(job.backend, device)
    # the parts of a step are measured in two modes, whether or not those are asked for
    names = [name for name in MODES if name in (*job.modes, EAGER, WHOLE)]
    modes = {name: Mode(name, WORKLOADS[job.model], job.backend, device) for name in names}
    first: dict[str, float] = {}
    for name, mode in modes.items():
        first[name] = larger_of_both([compile_seconds(mode)], device)[0]
        tell(f"{job.model}: {name} compiled")
    parts = Parts(modes[WHOLE], modes[EAGER])
    asked = {name: modes[name] for name in job.modes}
    with _collector_at_rest():
        steps, measured = _timed(job, asked, parts, tell)
        traces = _traced(asked, job.rounds) if device.type == CPU else {}
    with _collector_at_rest():  # so that no garbage of the profiler's is freed in a step that is looked at
        peaks = {name: _peak(mode) for name, mode in asked.items()}
    shares = {name: [exposed_share(trace) for trace in found] for name, found in traces.items()}
    return Figures(
        model=job.model,
        bucket_bytes=[buffer.numel() * buffer.element_size() for buffer in parts.buffers],
        graphs={name: mode.counted.graphs for name, mode in asked.items() if name in (WHOLE, TORCH)},
        first_steps_s={name: first[name] for name in asked},
        steps_s={name: larger_of_both(values, device) for name, values in steps.items()},
        parts={key: larger_of_both([values[key] for values in measured], device) for key in measured[0]},
        exposed={name: larger_of_both(values, device) for name, values in shares.items()},
        peak_bytes={name: int(larger_of_both([peak], device)[0]) for name, peak in peaks.items()},
        traces={name: min(found, key=lambda trace: trace.update[1]) for name, found in traces.items()},
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
            mode.step()  # whatever ran before has left another model in the caches
            steps[name] += [elapsed_together(mode.step, mode.device) for _ in range(STEPS_A_TURN)]
        measured += [parts.measure() for _ in range(STEPS_A_TURN)]
        tell(f"{job.model}: round {turn + 1}")
    return steps, measured


def _traced(modes: Mapping[str, Mode], rounds: int) -> dict[str, list[Trace]]:
    """One traced step of each mode a round, modes in turn."""
    traces: dict[str, list[Trace]] = {name: [] for name in modes}
    for _ in range(rounds):
        for name, mode in modes.items():
            mode.step()
            dist.barrier()
            traces[name].append(record(mode.forward, mode.backward, mode.update))
    return traces


def _peak(mode: Mode) -> int:
    """The most that a step holds at once, when a step of the same mode came before."""
    mode.step()
    dist.barrier()
    return peak_bytes(mode.step, mode.device)


def _warm_up(backend: str, device: torch.device) -> None:
    """Compile something: no mode shall pay for what only the first one needs."""
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


def _end_with_parent() -> None:
    """End this process when its standard input ends."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _own_output() -> TextIO:
    """The standard output, for this module alone; what others write goes to the standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def main(arguments: Sequence[str]) -> None:
    """Do the job in the arguments."""
    rank, fields = int(arguments[0]), json.loads(arguments[1])
    job = Job(**{**fields, "modes": tuple(fields["modes"])})
    output = _own_output()
    _end_with_parent()
    torch.set_num_threads(1)
    device = device_of(job.device, rank)
    if device.type == CUDA:
        torch.cuda.set_device(device)

    def tell(words: str) -> None:
        if rank == 0:
            output.write(json.dumps({"done": words}) + "\n")

    with process_group(rank, WORLD_SIZE, job.rendezvous, group_backend(job.device)):
        figures = run(job, device, tell)
        dist.barrier()
        torch._dynamo.reset()
        gc.collect()  # reducers go before their process group
    if rank == 0:
        output.write(json.dumps({"figures": asdict(figures)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
