"""How long does a data-parallel step take over a slow network? ``python -m benchmarks.step``.

Two ranks of one thread each train a model on two emulated hosts (`benchmarks.network`), in each mode:

- ``eager``: eager DDP;
- ``whole``: torch.compile without any optimizer for DDP;
- ``torch``: torch.compile as it comes, with torch's DDPOptimizer;
- ``split``, ``inline``: ``ddpopt.compile`` with this strategy.

All modes take turns in one run, a few steps each round, so that a busy minute meets all of them. Ratios are
of the fastest steps, for whatever else the machine does only ever adds. The compile time is that of the first
three steps, with every cache off.

The *physical limit* of a step is put together from parts that are measured alone, in the same rounds and as
often as a step; again the fastest count:

- forward, backward and update of the whole compiled graph, with nothing sent;
- all-reduce of eager DDP's buckets with nothing computed, and of the last bucket alone;
- the share of eager's backward after which the first bucket is complete (the median).

No network can start before the first bucket is complete, nor end before it has sent all buckets; and the last
bucket is complete only when the backward is over. The update needs all gradients. So

    limit = max(forward + share * backward + all-reduce, forward + backward + last all-reduce) + update

What sending costs the processor, and copying gradients into buckets and back, is not in it.

Exit code 1 where ``inline`` takes more than 1.05 times the limit (not judged on loopback, where sending costs
as much of the processor as computing does); 2 for arguments that cannot be; 3 where a rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.arguments import some_of
from benchmarks.network import Network, running, two_hosts
from benchmarks.report import conditions, state, wide_console
from benchmarks.step_rank import EAGER, INLINE, MODES, TORCH, WHOLE, WORKLOADS, Figures, Job
from benchmarks.timeline import Trace, draw
from ddpopt.errors import DdpoptError, InfrastructureError

ASKED_RATIO = 1.05
LIMIT_S = 600.0
LAST_LINES = 30


@dataclass(frozen=True)
class Row:
    """What one mode took.

    Attributes:
        mode: its name.
        fastest_s: the fastest step.
        step_s: median over all steps.
        spread_s: first and third quartile over all steps.
        to_eager: ratio of the fastest step to eager DDP's; None if that was not measured.
        to_torch: the same to torch's DDPOptimizer.
        to_limit: ratio of the fastest step to the physical limit.
        first_steps_s: the first three steps.
    """

    mode: str
    fastest_s: float
    step_s: float
    spread_s: tuple[float, float]
    to_eager: float | None
    to_torch: float | None
    to_limit: float
    first_steps_s: float


def limit(parts: Mapping[str, float]) -> float:
    """The physical limit of a step; see the top of this module.

    Args:
        parts: as `benchmarks.step_rank.Parts.measure` gives them.

    Returns:
        Seconds.

    >>> parts = {"forward": 2, "backward": 4, "first_bucket": 0.25, "comm": 9, "last_bucket": 1, "update": 1}
    >>> limit(parts), limit({**parts, "comm": 2})
    (13.0, 8)
    """
    forward, backward = parts["forward"], parts["backward"]
    by_network = forward + parts["first_bucket"] * backward + parts["comm"]
    by_computing = forward + backward + parts["last_bucket"]
    return max(by_network, by_computing) + parts["update"]


def fastest_parts(figures: Figures) -> dict[str, float]:
    """The fastest of each part, and the median of the share."""
    parts = {name: min(values) for name, values in figures.parts.items()}
    return {**parts, "first_bucket": statistics.median(figures.parts["first_bucket"])}


def rows(figures: Figures) -> list[Row]:
    """One row for each mode.

    Args:
        figures: of one model.

    Returns:
        In the order in which the modes were asked for.
    """
    fastest = {mode: min(steps) for mode, steps in figures.steps_s.items()}
    limit_s = limit(fastest_parts(figures))
    return [
        Row(
            mode=mode,
            fastest_s=fastest[mode],
            step_s=statistics.median(steps),
            spread_s=_quartiles(steps),
            to_eager=fastest[mode] / fastest[EAGER] if EAGER in fastest else None,
            to_torch=fastest[mode] / fastest[TORCH] if TORCH in fastest else None,
            to_limit=fastest[mode] / limit_s,
            first_steps_s=figures.first_steps_s[mode],
        )
        for mode, steps in figures.steps_s.items()
    ]


def _quartiles(steps: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(steps, n=4, method="inclusive")
    return first, third


def problems(model: str, found: Sequence[Row]) -> list[str]:
    """What falls short of what is asked."""
    return [
        f"{model}: {row.mode} takes {row.to_limit:.3f} times the physical limit, asked {ASKED_RATIO:g}"
        for row in found
        if row.mode == INLINE and row.to_limit > ASKED_RATIO
    ]


def measure(job: Job, network: Network, done: Callable[[str], None]) -> Figures:
    """Have both ranks do a job.

    Args:
        job: the same for both.
        network: what they talk over.
        done: called with a few words whenever rank 0 has done something.

    Returns:
        The figures.

    Raises:
        InfrastructureError: a rank failed, or gave no figures within ten minutes.
    """
    answers: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="ddpopt-step-") as folder:
        job = Job(**{**asdict(job), "rendezvous": f"{folder}/rendezvous"})
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


def figures_of(fields: Mapping[str, Any]) -> Figures:
    """Figures from what `asdict` made of them, by way of JSON."""
    traces = {
        mode: Trace(**{name: _tuples(value) for name, value in trace.items()})
        for mode, trace in fields["traces"].items()
    }
    return Figures(**{**fields, "traces": traces})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store.

    Args:
        arguments: of the command line.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(arguments)
    console = wide_console()
    load = os.getloadavg()[0]
    try:
        with two_hosts(asked.rate) as network:
            facts = {
                **conditions("benchmarks.step"),
                "threads": "1 a rank, 2 ranks",
                "network": network.description,
                "load before": f"{load:.2f}",
                "backend": asked.backend,
            }
            state(console, facts)
            found = _measure_all(asked, network, console)
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    short = _report(found, console)
    if not network.emulated:
        short = []
        console.print("not judged: there is no slow network between the ranks", markup=False)
    for problem in short:
        console.print(f"short of what is asked: {problem}", style="red", markup=False)
    if asked.json:
        tables = {figures.model: [asdict(row) for row in rows(figures)] for figures in found}
        document = {"conditions": facts, "rows": tables, "figures": [asdict(figures) for figures in found]}
        asked.json.write_text(json.dumps(document, indent=2) + "\n")
    if asked.timeline:
        asked.timeline.write_text(_timeline(found[0]))
    return int(bool(short))


def _measure_all(asked: argparse.Namespace, network: Network, console: Console) -> list[Figures]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    compiled = len({*asked.modes, EAGER, WHOLE})
    found = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("start", total=len(asked.models) * (compiled + asked.rounds))

        def done(words: str) -> None:
            progress.update(task, description=words, advance=1)

        for number, model in enumerate(asked.models):
            trace = bool(asked.timeline) and number == 0
            job = Job(model, asked.modes, asked.backend, asked.rounds, trace, rendezvous="")
            found.append(measure(job, network, done))
    return found


def _report(found: Sequence[Figures], console: Console) -> list[str]:
    """Print each model's table; returns what falls short."""
    short = []
    for figures in found:
        table_rows = rows(figures)
        console.print(table(figures, table_rows))
        console.print(parts_line(figures), markup=False, highlight=False)
        short += problems(figures.model, table_rows)
    return short


def table(figures: Figures, found: Sequence[Row]) -> Table:
    """The table of one model.

    Args:
        figures: what was measured.
        found: its `rows`.

    Returns:
        A table for the console.
    """
    result = Table(title=WORKLOADS[figures.model].about)
    result.add_column("mode", no_wrap=True)
    titles = ("fastest step, ms", "median (quartiles)", "to eager", "to torch's", "to the limit")
    for title in (*titles, "first 3 steps, s"):
        result.add_column(title, justify="right")
    for row in found:
        missed = row.mode == INLINE and row.to_limit > ASKED_RATIO
        to_limit = f"{row.to_limit:.3f}" + (f" (asked {ASKED_RATIO:g})" if row.mode == INLINE else "")
        result.add_row(
            row.mode,
            _ms(row.fastest_s),
            f"{_ms(row.step_s)} ({_ms(row.spread_s[0])} – {_ms(row.spread_s[1])})",
            _number(row.to_eager),
            _number(row.to_torch),
            f"[red]{to_limit}[/red]" if missed else to_limit,
            f"{row.first_steps_s:.1f}",
        )
    return result


def parts_line(figures: Figures) -> str:
    """The limit and its parts, in words."""
    parts = fastest_parts(figures)
    sent = sum(figures.bucket_bytes) / 2**20
    return (
        f"physical limit {_ms(limit(parts))} ms: forward {_ms(parts['forward'])}, "
        f"backward {_ms(parts['backward'])}, first bucket after {100 * parts['first_bucket']:.0f} % of it, "
        f"all-reduce of {sent:.1f} MiB in {len(figures.bucket_bytes)} buckets {_ms(parts['comm'])}, "
        f"of the last one {_ms(parts['last_bucket'])}, update {_ms(parts['update'])}"
    )


def _timeline(figures: Figures) -> str:
    about = f"One training step of each mode: {WORKLOADS[figures.model].about}"
    return draw(about, figures.traces, 1000 * limit(fastest_parts(figures)))


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.0f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    models, modes = ",".join(WORKLOADS), ",".join(MODES)
    parser.add_argument(
        "--models", type=partial(some_of, tuple(WORKLOADS)), default=models, help=f"({models})"
    )
    parser.add_argument("--modes", type=partial(some_of, MODES), default=modes, help=f"({modes})")
    parser.add_argument("--backend", type=_backend, default="inductor", help="of Dynamo (inductor)")
    parser.add_argument(
        "--rounds", type=int, default=8, choices=range(1, 1000), metavar="N", help="turns of each mode (8)"
    )
    parser.add_argument("--rate", type=_rate, default="1gbit", help="of the network, as tc writes it (1gbit)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--timeline", type=Path, help="draw a step of the first model to this file (SVG)")
    return parser


def _backend(text: str) -> str:
    known = torch.compiler.list_backends(exclude_tags=())
    if text not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
    return text


def _rate(text: str) -> str:
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)[kmg]?bit", text)
    if rate is None or not float(rate[1]) > 0:
        raise argparse.ArgumentTypeError(f"expected a rate such as 1gbit or 500mbit, got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
