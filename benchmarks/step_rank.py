"""One rank's part of `benchmarks.step`: run the modes in turn, the parts of a step, and one traced step.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.gpt import GptLike
from benchmarks.group import process_group
from benchmarks.timeline import Trace, record
from ddpopt.running_buckets import running_buckets

EAGER, WHOLE, TORCH, SPLIT, INLINE = MODES = ("eager", "whole", "torch", "split", "inline")
STEPS_TO_COMPILE = 3
STEPS_A_TURN = 2
TRACES = 8
WORLD_SIZE = 2


@dataclass(frozen=True)
class Job:
    """What both ranks are to do.

    Attributes:
        model: a key of `WORKLOADS`.
        modes: some of `MODES`.
        backend: name of a Dynamo backend.
        rounds: how often each mode has its turn.
        trace: whether to trace one step of each mode as well.
        rendezvous: path of a file that does not exist yet.
    """

    model: str
    modes: tuple[str, ...]
    backend: str
    rounds: int
    trace: bool
    rendezvous: str


@dataclass(frozen=True)
class Figures:
    """What was measured of one model; the slower rank's time each, in seconds.

    Attributes:
        model: its name.
        bucket_bytes: sizes of eager DDP's buckets, in their order.
        first_steps_s: by mode, the first `STEPS_TO_COMPILE` steps.
        steps_s: by mode, `STEPS_A_TURN` steps for each round.
        parts: what `Parts.measure` gives, as often.
        traces: by mode, one step of rank 0; empty if not asked for.
    """

    model: str
    bucket_bytes: list[int]
    first_steps_s: dict[str, float]
    steps_s: dict[str, list[float]]
    parts: dict[str, list[float]]
    traces: dict[str, Trace]


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        about: the model, in words.
        build: makes the model.
        inputs: makes a batch.
        cap_bytes: DDP's bucket cap.
    """

    about: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    cap_bytes: Callable[[nn.Module], int]


class Linears(nn.Module):
    """Linear layers without anything between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def _gpt_cap_bytes(model: nn.Module) -> int:
    assert isinstance(model, GptLike)
    return model.layer_bytes


WORKLOADS: Mapping[str, Workload] = {
    "linears": Workload(
        "8 x Linear(1024), batch 128, cap 4 MiB",
        lambda: Linears(8, 1024),
        lambda: torch.randn(128, 1024),
        lambda _: 4 * 2**20,
    ),
    "gpt": Workload(
        "GPT, 4 layers of width 256, batch 4 x 128 tokens, a bucket a layer",
        lambda: GptLike(4, 256),
        lambda: torch.randint(0, 3000, (4, 128)),
        _gpt_cap_bytes,
    ),
}
"""The models, by their names on the command line."""


class Mode:
    """One way to run a training step, with a model of its own.

    Args:
        name: one of `MODES`.
        workload: what is trained.
        backend: name of a Dynamo backend.
    """

    def __init__(self, name: str, workload: Workload, backend: str) -> None:
        torch.manual_seed(0)
        model = workload.build()
        cap_mb = workload.cap_bytes(model) / 2**20
        self.name = name
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self._inputs = workload.inputs()
        self._call = _compiled(name, self.ddp, backend)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        """Compute the loss, for `backward`."""
        with torch._dynamo.config.patch(optimize_ddp=self.name == TORCH):
            self._loss = self._call(self._inputs).square().mean()

    def backward(self) -> None:
        """The backward of the last forward."""
        loss, self._loss = self._loss, None
        assert loss is not None  # there was a forward
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def update(self) -> None:
        """Use the gradients, and drop them."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Forward, backward, update."""
        self.forward()
        self.backward()
        self.update()


def _compiled(name: str, ddp: DistributedDataParallel, backend: str) -> Callable[[Tensor], Tensor]:
    if name == EAGER:
        return ddp
    if name in (WHOLE, TORCH):

        def own_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            # Dynamo reuses what it compiled for an equal backend, and all modes run the same code
            return torch._dynamo.lookup_backend(backend)(gm, list(example_inputs))

        compiled: Callable[[Tensor], Tensor] = torch.compile(ddp, backend=own_backend)
        return compiled
    strategy: Literal["split", "inline"] = "split" if name == SPLIT else "inline"
    step: Callable[[Tensor], Tensor] = ddpopt.compile(ddp, backend=backend, strategy=strategy)
    return step


def seconds(run: Callable[[], object]) -> float:
    """Time from when all ranks are ready until this rank is done."""
    dist.barrier()
    return _elapsed(run)


def _elapsed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compile_seconds(mode: Mode) -> float:
    """Time for the first steps, from empty caches."""
    from torch._inductor.utils import fresh_cache  # imports Inductor, which not every backend needs

    with fresh_cache():

        def first_steps() -> None:
            for _ in range(STEPS_TO_COMPILE):
                mode.step()

        return seconds(first_steps)


class Parts:
    """The parts of a step, each measured alone: what no step can be faster than.

    Args:
        whole: computes; its graph is compiled whole, and no gradient is sent.
        eager: tells when in backward the first bucket is complete.
    """

    def __init__(self, whole: Mode, eager: Mode) -> None:
        self._whole = whole
        self._eager = eager
        buckets = running_buckets(eager.ddp)
        self.buffers = [torch.zeros(bucket.numel) for bucket in buckets]
        parameters = dict(eager.ddp.module.named_parameters())
        self._first_bucket = [parameters[name] for name in buckets[0].params]

    def measure(self) -> dict[str, float]:
        """Measure each once.

        Returns:
            Seconds of ``forward``, ``backward``, ``update``, ``comm`` and ``last_bucket``; and
            ``first_bucket``, the share of the backward after which the first bucket is complete.
        """
        return {
            **self._compute(),
            "first_bucket": self._share_until_first_bucket(),
            "comm": seconds(lambda: _all_reduce(self.buffers)),
            "last_bucket": seconds(lambda: _all_reduce(self.buffers[-1:])),
        }

    def _compute(self) -> dict[str, float]:
        mode = self._whole
        phases = {"forward": mode.forward, "backward": mode.backward, "update": mode.update}
        with mode.ddp.no_sync():
            mode.step()
            dist.barrier()
            return {name: _elapsed(phase) for name, phase in phases.items()}

    def _share_until_first_bucket(self) -> float:
        mode = self._eager
        ready: list[float] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
            for parameter in self._first_bucket
        ]
        with mode.ddp.no_sync():
            mode.forward()
            start = time.perf_counter()
            backward_s = _elapsed(mode.backward)
            mode.update()
        for handle in handles:
            handle.remove()
        return (max(ready) - start) / backward_s


def _all_reduce(buffers: Sequence[Tensor]) -> None:
    """All at once and in order, as DDP launches them."""
    launched = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    for work in launched:
        work.wait()


def run(job: Job, tell: Callable[[str], None]) -> Figures:
    """Measure all modes.

    Args:
        job: what to do.
        tell: called with a few words when something is done.

    Returns:
        All figures, the same on both ranks; the timeline is this rank's own.
    """
    _warm_up(job.backend)
    # the parts of a step are measured in two modes, whether or not those are asked for
    names = [name for name in MODES if name in (*job.modes, EAGER, WHOLE)]
    modes = {name: Mode(name, WORKLOADS[job.model], job.backend) for name in names}
    first: dict[str, float] = {}
    for name, mode in modes.items():
        first[name] = compile_seconds(mode)
        tell(f"{job.model}: {name} compiled")
    parts = Parts(modes[WHOLE], modes[EAGER])
    steps: dict[str, list[float]] = {name: [] for name in job.modes}
    measured: list[dict[str, float]] = []
    with _collector_at_rest():
        for turn in range(job.rounds):
            first_mode = turn % len(job.modes)
            for name in (*job.modes[first_mode:], *job.modes[:first_mode]):
                modes[name].step()  # whatever ran before has left another model in the caches
                steps[name] += [seconds(modes[name].step) for _ in range(STEPS_A_TURN)]
            measured += [parts.measure() for _ in range(STEPS_A_TURN)]
            tell(f"{job.model}: round {turn + 1}")
        traces = _fastest_traces([modes[name] for name in job.modes]) if job.trace else {}
    return Figures(
        model=job.model,
        bucket_bytes=[buffer.numel() * buffer.element_size() for buffer in parts.buffers],
        first_steps_s={name: _slower([first[name]])[0] for name in job.modes},
        steps_s={name: _slower(values) for name, values in steps.items()},
        parts={key: _slower([values[key] for values in measured]) for key in measured[0]},
        traces=traces,
    )


def _fastest_traces(modes: Sequence[Mode]) -> dict[str, Trace]:
    """Of several traced steps of each mode the fastest, modes in turn."""
    traces: dict[str, list[Trace]] = {mode.name: [] for mode in modes}
    for _ in range(TRACES):
        for mode in modes:
            mode.step()
            dist.barrier()
            traces[mode.name].append(record(mode.forward, mode.backward, mode.update))
    return {name: min(found, key=lambda trace: trace.update[1]) for name, found in traces.items()}


def _slower(values: list[float]) -> list[float]:
    """For each value the larger one of both ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _warm_up(backend: str) -> None:
    """Compile something: no mode shall pay for what only the first one needs."""
    layer = nn.Linear(8, 8)
    compiled = torch.compile(lambda x: layer(x).relu(), backend=backend)
    compiled(torch.ones(2, 8)).sum().backward()


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


def main() -> None:
    """Do the job in the arguments."""
    rank, fields = int(sys.argv[1]), json.loads(sys.argv[2])
    job = Job(**{**fields, "modes": tuple(fields["modes"])})
    output = _own_output()
    _end_with_parent()
    torch.set_num_threads(1)

    def tell(words: str) -> None:
        if rank == 0:
            output.write(json.dumps({"done": words}) + "\n")

    with process_group(rank, WORLD_SIZE, job.rendezvous):
        figures = run(job, tell)
        dist.barrier()
        torch._dynamo.reset()
        gc.collect()  # reducers go before their process group
    if rank == 0:
        output.write(json.dumps({"figures": asdict(figures)}) + "\n")


if __name__ == "__main__":
    main()
