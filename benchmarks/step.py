"""How long does a data-parallel step take over a slow network? ``python -m benchmarks.step``.

Two ranks of one thread each train a model on two emulated hosts (`benchmarks.network`), in each mode:

- ``eager``: eager DDP;
- ``whole``: torch.compile without any optimizer for DDP;
- ``torch``: default torch.compile, with torch's DDPOptimizer;
- ``split``, ``inline``: ``ddpopt.compile`` with this strategy;
- ``step``: ``ddpopt.train_step``, the whole step in one graph (from torch 2.13 on).

All modes take turns in one run, a few steps each round, so that a busy minute affects all of them. Ratios use
the fastest steps, because other load only adds time. *Exposed* is the share of all-reduce time that is not
hidden by computation, the median of some steps under torch's profiler
(`benchmarks.step_trace.exposed_share`); *peak* is the peak memory of a step beyond the weights, with DDP's
buckets where they take memory (a CPU's pages that are never written, as in `step`, do not).

The *physical limit* of a step is computed from parts that are measured separately, in the same rounds and as
often as a step; again the fastest count:

- forward, backward and update of the whole compiled graph, with nothing sent;
- all-reduce of eager DDP's buckets with nothing computed, and of the last bucket alone;
- the share of eager's backward after which the first bucket is complete (the median).

No network can start before the first bucket is complete, or finish before it has sent all buckets; and the
last bucket is complete only when the backward ends. The update needs all gradients. So

    limit = max(forward + share * backward + all-reduce, forward + backward + last all-reduce) + update

It leaves out the processor time of sending, and of copying gradients into buckets and back.

With ``--device cuda`` both ranks compute on a GPU: gloo sends over the emulated link if there is one, NCCL
between GPUs if each rank has its own. Exposed communication is not traced there.

Exit code 1 if ``inline`` takes more than 1.05 times the limit, takes more than 1.02 times as long as the best
other mode but ``step``, if ``step`` takes longer than ``inline``, or, where torch's optimizer compiles one
graph, ``inline`` is less than 1.15 times faster than it (none of this is judged without an emulated link:
over loopback, sending needs as much of the processor as computing); 2 for invalid arguments; 3 if a rank
fails, or if there is no GPU.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.devices import CPU, DEVICES, WORLD_SIZE, description, group_backend, require
from benchmarks.network import Network, loopback, two_hosts
from benchmarks.report import (
    Timings,
    conditions,
    finish,
    parser_of,
    show_grid,
    some_of,
    state,
    wide_console,
)
from benchmarks.step_modes import EAGER, MODES, STEP, WHOLE
from benchmarks.step_rank import Figures, Job, run
from benchmarks.step_rows import RATES, Measured, grid, parts_line, section
from benchmarks.step_workloads import WORKLOADS
from ddpopt.errors import DdpoptError
from ddpopt.ranks.pool import OnEvent, Pool
from ddpopt.ranks.process import RankProcess

LIMIT_S = 1200.0
Value = TypeVar("Value")
COLLECTIVE_LIMIT_S = 60.0
ENVIRONMENT = ("OMP_NUM_THREADS=1", "TORCHINDUCTOR_COMPILE_THREADS=1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1")
"""One thread, and no cache of compiled code."""


def measure(job: Job, network: Network, done: OnEvent) -> Figures:
    """Run a job on both ranks, in separate processes.

    Args:
        job: the job of both ranks.
        network: the network between them.
        done: called with a short message whenever rank 0 has finished a part.

    Returns:
        The figures.

    Raises:
        InfrastructureError: a rank failed, or returned no figures within twenty minutes.
    """
    return on_hosts(network, group_backend(job.device), done, run, job)


def on_hosts(network: Network, backend: str, done: OnEvent, task: Callable[..., Value], *args: Any) -> Value:
    """What a task returns on the first of two ranks; see `measure`, and `ddpopt.ranks.pool.Pool.run`."""
    prefixes = [
        (*words, "env", f"GLOO_SOCKET_IFNAME={interface}", *ENVIRONMENT)
        for words, interface in zip(network.prefixes, network.interfaces, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="ddpopt-step-") as folder:
        host = partial(serve, str(Path(folder) / "rendezvous"), backend)
        with Pool(WORLD_SIZE, host=host, prefixes=prefixes) as pool:
            return pool.run(task, *args, limit_s=LIMIT_S, on_event=done)[0]


def serve(rendezvous: str, backend: str, process: RankProcess) -> None:
    """Serve in a group that meets in a file: the pool's store is not reachable from the other host's network.

    Args:
        rendezvous: path of a file that does not exist yet.
        backend: the backend of the process group.
        process: the rank.
    """

    def joined(_: float) -> AbstractContextManager[Any]:
        c10d: Any = dist  # torch does not mark its re-exports
        return process.joined(COLLECTIVE_LIMIT_S, c10d.FileStore(rendezvous, WORLD_SIZE), backend)

    process.serve(joined)


@contextmanager
def hosts(rate: str, device: str) -> Iterator[Network]:
    """Yield the network of the ranks: an emulated link, except for NCCL, which uses its own transports.

    Args:
        rate: rate of the link, in ``tc``'s notation.
        device: one of `benchmarks.devices.DEVICES`.

    Yields:
        The network.
    """
    if group_backend(device) == "nccl":
        yield loopback("NCCL joins the GPUs of one machine")
        return
    with two_hosts(rate) as network:
        yield network


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(arguments)
    console = wide_console()
    try:
        require(asked.device)
        facts = {
            **conditions("benchmarks.step"),
            "threads": "1 per rank, 2 ranks",
            **description(asked.device),
            "rates": ", ".join(asked.rate),
            "backend": asked.backend,
        }
        state(console, facts)
        found = _measure_all(asked, console)
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    figures = [{"rate": each.rate, **asdict(each.figures)} for each in found]
    return finish(console, section(found, facts), asked, figures, timings_of(found))


def timings_of(measured: Sequence[Measured]) -> Timings:
    """All steps by name; two processes took each step together, and the longer time counts."""
    return {
        f"{each.figures.model} at {each.rate}, {mode}": [steps]
        for each in measured
        for mode, steps in each.figures.steps_s.items()
    }


def _measure_all(asked: argparse.Namespace, console: Console) -> list[Measured]:
    """Every model at every rate; only one rate if links cannot be emulated."""
    found: list[Measured] = []
    for rate in asked.rate:
        with hosts(rate, asked.device) as network:
            console.print(f"network: {network.description}", markup=False, highlight=False)
            name = rate if network.emulated else "no rate"
            for figures in _measure_models(asked, network, console):
                found.append(Measured(name, network, figures))
                show_grid(console, grid(found[-1]))
                console.print(parts_line(figures), markup=False, highlight=False)
        if not network.emulated:
            console.print("not judged: there is no slow network between the ranks", markup=False)
            break
    return found


def _measure_models(asked: argparse.Namespace, network: Network, console: Console) -> Iterator[Figures]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    compiled = len({*asked.modes, EAGER, WHOLE})
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("start", total=len(asked.models) * (compiled + asked.rounds))

        def done(words: object) -> None:
            progress.update(task, description=str(words), advance=1)

        for model in asked.models:
            job = Job(model, asked.modes, asked.backend, asked.rounds, asked.device)
            yield measure(job, network, done)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.step", __doc__)
    models = ",".join(WORKLOADS)
    modes = ",".join(mode for mode in MODES if mode != STEP or torch.__version__ >= "2.13")
    parser.add_argument(
        "--models", type=partial(some_of, tuple(WORKLOADS)), default=models, help=f"({models})"
    )
    parser.add_argument("--modes", type=partial(some_of, MODES), default=modes, help=f"({modes})")
    parser.add_argument("--backend", type=_backend, default="inductor", help="Dynamo backend (inductor)")
    parser.add_argument("--device", choices=DEVICES, default=CPU, help="device of both ranks (cpu)")
    parser.add_argument(
        "--rounds", type=int, default=8, choices=range(1, 1000), metavar="N", help="rounds for each mode (8)"
    )
    rates = ",".join(RATES)
    parser.add_argument(
        "--rate", type=_rates, default=rates, help=f"network rates as tc writes them, a table each ({rates})"
    )
    return parser


def _backend(text: str) -> str:
    known = torch.compiler.list_backends(exclude_tags=())
    if text not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
    return text


def _rates(text: str) -> tuple[str, ...]:
    rates = tuple(dict.fromkeys(text.split(",")))
    for rate in rates:
        number = re.fullmatch(r"(\d+(?:\.\d+)?)[kmg]?bit", rate)
        if number is None or not float(number[1]) > 0:
            raise argparse.ArgumentTypeError(f"expected a rate such as 1gbit or 500mbit, got {rate!r}")
    return rates


if __name__ == "__main__":
    sys.exit(main())
