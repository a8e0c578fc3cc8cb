"""How long does a data-parallel step take over a slow network? ``python -m benchmarks.step``.

Two ranks of one thread each train a model on two emulated hosts (`benchmarks.network`), in each mode:

- ``eager``: eager DDP;
- ``whole``: torch.compile without any optimizer for DDP;
- ``torch``: torch.compile as it comes, with torch's DDPOptimizer;
- ``split``, ``inline``: ``ddpopt.compile`` with this strategy.

All modes take turns in one run, a few steps each round, so that a busy minute meets all of them. Ratios are
of the fastest steps, for whatever else the machine does only ever adds. The compile time is that of the first
three steps, with every cache off. *Exposed* is the share of all-reduce time that no computing hides, the
median of some steps under torch's profiler (`benchmarks.step_trace.exposed_share`); *peak* is the most memory
that a step holds at once, over what is held before it: weights and buckets.

The *physical limit* of a step is put together from parts that are measured alone, in the same rounds and as
often as a step; again the fastest count:

- forward, backward and update of the whole compiled graph, with nothing sent;
- all-reduce of eager DDP's buckets with nothing computed, and of the last bucket alone;
- the share of eager's backward after which the first bucket is complete (the median).

No network can start before the first bucket is complete, nor end before it has sent all buckets; and the last
bucket is complete only when the backward is over. The update needs all gradients. So

    limit = max(forward + share * backward + all-reduce, forward + backward + last all-reduce) + update

What sending costs the processor, and copying gradients into buckets and back, is not in it.

With ``--device cuda`` both ranks compute on a GPU: gloo sends over the emulated link where there is one, NCCL
between GPUs where each rank has its own. Exposed communication is not traced there.

Exit code 1 where ``inline`` takes more than 1.05 times the limit, is more than 1.02 times as slow as the best
other mode, or, where torch's optimizer compiles one graph, is less than 1.15 times faster than it (nothing of
this is judged without an emulated link: over loopback sending costs as much of the processor as computing);
2 for arguments that cannot be; 3 where a rank fails, or where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import pyperf_file
from benchmarks.arguments import some_of
from benchmarks.devices import CPU, CUDA, DEVICES, description, group_backend, require
from benchmarks.network import Network, loopback, running, two_hosts
from benchmarks.pyperf_file import add_option, store
from benchmarks.report import conditions, state, wide_console
from benchmarks.step_figures import Figures, Job, figures_of
from benchmarks.step_modes import EAGER, MODES, WHOLE
from benchmarks.step_rows import asked_of, fastest_parts, limit, problems, rows
from benchmarks.step_table import parts_line, table
from benchmarks.step_workloads import WORKLOADS
from benchmarks.timeline import draw
from ddpopt.errors import DdpoptError, InfrastructureError

LIMIT_S = 1200.0
LAST_LINES = 30


@dataclass(frozen=True)
class Measured:
    """The figures of one model over one network."""

    rate: str
    network: Network
    figures: Figures

    def problems(self) -> list[str]:
        """What falls short; nothing where there is no slow network, for then nothing is asked."""
        name = f"{self.figures.model} at {self.rate}"
        return problems(name, rows(self.figures)) if self.network.emulated else []

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        found, parts = rows(self.figures), fastest_parts(self.figures)
        asked = asked_of(found) if self.network.emulated else []
        return {
            "rate": self.rate,
            "network": self.network.description,
            "emulated": self.network.emulated,
            "model": self.figures.model,
            "about": WORKLOADS[self.figures.model].about,
            "limit_s": limit(parts),
            "parts": parts,
            "rows": [asdict(row) for row in found],
            "asked": [{**asdict(one), "asked": one.asked, "held": one.held} for one in asked],
            "figures": asdict(self.figures),
        }


def measure(job: Job, network: Network, done: Callable[[str], None]) -> Figures:
    """Have both ranks do a job.

    Args:
        job: the same for both.
        network: what they talk over.
        done: called with a few words whenever rank 0 has done something.

    Returns:
        The figures.

    Raises:
        InfrastructureError: a rank failed, or gave no figures within twenty minutes.
    """
    answers: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="ddpopt-step-") as folder:
        job = replace(job, rendezvous=f"{folder}/rendezvous")
        words = (sys.executable, "-m", "benchmarks.step_rank")
        commands = [(*words, str(rank), json.dumps(asdict(job))) for rank in range(2)]
        with running(network, commands, rank_environment(folder), Path(folder), LIMIT_S) as processes:
            output = processes[0].stdout
            assert output is not None  # a pipe
            for line in output:
                answer = json.loads(line)
                if "figures" in answer:
                    answers.append(figures_of(answer["figures"]))
                else:
                    done(answer["done"])
            processes[0].wait()
        if not answers:
            raise InfrastructureError(f"{job.model}: no figures.\n{_last_words(Path(folder))}")
    return answers[0]


def rank_environment(folder: str) -> dict[str, str]:
    """What is set for the ranks: one thread, and no cache of compiled code."""
    return {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TMPDIR": folder,
    }


def _last_words(folder: Path) -> str:
    words = []
    for rank, path in enumerate(sorted(folder.glob("stderr-*"))):
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        words.append(f"rank {rank}:\n" + "\n".join(lines))
    return "\n".join(words)


@contextmanager
def hosts(rate: str, device: str) -> Iterator[Network]:
    """What the ranks talk over: an emulated link, but for NCCL, which goes its own ways.

    Args:
        rate: of the link, as ``tc`` writes it.
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
        arguments: of the command line.

    Returns:
        The exit code.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.timeline and asked.device == CUDA:
        parser.error("--timeline: steps are traced with --device cpu only")
    console = wide_console()
    try:
        require(asked.device)
        facts = {
            **conditions("benchmarks.step"),
            "threads": "1 a rank, 2 ranks",
            **description(asked.device),
            "rates": ", ".join(asked.rate),
            "load before": f"{os.getloadavg()[0]:.2f}",
            "backend": asked.backend,
        }
        state(console, facts)
        found = _measure_all(asked, console)
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    short = [problem for measured in found for problem in measured.problems()]
    for problem in short:
        console.print(f"short of what is asked: {problem}", style="red", markup=False)
    if asked.json:
        document = {"conditions": facts, "tables": [measured.document() for measured in found]}
        asked.json.write_text(json.dumps(document, indent=2) + "\n")
    if asked.pyperf:
        store(asked.pyperf, timings_of(found), facts)
    if asked.timeline:
        asked.timeline.write_text(_timeline(found[0].figures))
    return int(bool(short))


def timings_of(measured: Sequence[Measured]) -> pyperf_file.Timings:
    """All steps, by name: two processes took them together, of each step the longer time."""
    return {
        f"{each.figures.model} at {each.rate}, {mode}": [steps]
        for each in measured
        for mode, steps in each.figures.steps_s.items()
    }


def _measure_all(asked: argparse.Namespace, console: Console) -> list[Measured]:
    """Every model at every rate; one rate is enough where none can be emulated."""
    found: list[Measured] = []
    for rate in asked.rate:
        with hosts(rate, asked.device) as network:
            console.print(f"network: {network.description}", markup=False, highlight=False)
            name = rate if network.emulated else "no rate"
            for figures in _measure_models(asked, network, console):
                found.append(Measured(name, network, figures))
                console.print(table(figures, rows(figures), network.description))
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

        def done(words: str) -> None:
            progress.update(task, description=words, advance=1)

        for model in asked.models:
            job = Job(model, asked.modes, asked.backend, asked.rounds, asked.device, rendezvous="")
            yield measure(job, network, done)


def _timeline(figures: Figures) -> str:
    about = f"One training step of each mode: {WORKLOADS[figures.model].about}"
    return draw(about, figures.traces, 1000 * limit(fastest_parts(figures)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    models, modes = ",".join(WORKLOADS), ",".join(MODES)
    parser.add_argument(
        "--models", type=partial(some_of, tuple(WORKLOADS)), default=models, help=f"({models})"
    )
    parser.add_argument("--modes", type=partial(some_of, MODES), default=modes, help=f"({modes})")
    parser.add_argument("--backend", type=_backend, default="inductor", help="of Dynamo (inductor)")
    parser.add_argument("--device", choices=DEVICES, default=CPU, help="where both ranks compute (cpu)")
    parser.add_argument(
        "--rounds", type=int, default=8, choices=range(1, 1000), metavar="N", help="turns of each mode (8)"
    )
    rates = "1gbit,10gbit"
    parser.add_argument(
        "--rate", type=_rates, default=rates, help=f"of the network, a table each, as tc writes it ({rates})"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    add_option(parser)
    parser.add_argument("--timeline", type=Path, help="draw a step of the first model to this file (SVG)")
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
