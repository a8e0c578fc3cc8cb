"""Time to plan and cut, beside torch's DDPOptimizer: ``python -m benchmarks.planning``.

Both get the same Dynamo graph of a GPT-like model in DDP, with a backend that does nothing, so what is timed
is all that an optimizer adds to compilation: for ddpopt facts, plan, partition, certificate and the search
for equal segments; for torch's optimizer bucketing, splitting and re-running the segments on fake tensors.
The cap is the size of one layer, so there is one segment a layer.

Growth is followed further for ddpopt alone (``--deep``): at 1700 layers the graph has about 50,000 nodes, for
which torch's optimizer, whose time grows faster than the graph, takes too long. No planner can grow slower
than the graph that it has to read: the limit is an exponent of 1.

Each timing has a trace of its own, inside a real Dynamo compile, because an optimizer may change the graph it
is given and reads the tracing context around it. Optimizers alternate within one process; only ratios count.

Exit code 1 where ddpopt is less than 20 times faster at 200 layers (the largest size of both if 200 is not
asked for), or where its time grows faster than layers ** 1.2 over all sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import pyperf_file
from benchmarks.gpt import GptLike
from benchmarks.group import single_rank
from benchmarks.planning_rows import OURS, THEIRS, Timing, Timings, Verdict, judge
from benchmarks.pyperf_file import add_option, store
from benchmarks.report import conditions, state, wide_console
from ddpopt.dynamo.backend import DdpoptBackend

TOKENS = 8
SIZES = "12,48,96,200"
DEEP = "1700"

Compiled = Callable[..., Any]
Optimize = Callable[[DistributedDataParallel, fx.GraphModule, Sequence[Any]], object]


def do_nothing(gm: fx.GraphModule, _: Sequence[Any]) -> Compiled:
    """A backend that costs nothing: the graph as it is."""
    return gm.forward


def run_ddpopt(_: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    """Everything that ddpopt does in a compile, but for compiling."""
    return DdpoptBackend(do_nothing, strategy="split")(gm, example_inputs)


def run_torch(ddp: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    """The same of torch's optimizer, told that in DDP an explicit cap holds for the first bucket too."""
    optimizer: Any = DDPOptimizer(ddp.bucket_bytes_cap, do_nothing, first_bucket_cap=ddp.bucket_bytes_cap)
    return optimizer.compile_fn(gm, list(example_inputs))


OPTIMIZERS: Mapping[str, Optimize] = {OURS: run_ddpopt, THEIRS: run_torch}


def time_one(layers: int, optimize: Optimize) -> Timing:
    """Trace a fresh model of `layers` layers and time one optimizer once, inside Dynamo's compile.

    Args:
        layers: number of transformer layers.
        optimize: what is timed.

    Returns:
        A `Timing` with a single figure.
    """
    model = GptLike(layers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=model.layer_bytes / 2**20)
    found: list[Timing] = []

    def stopwatch(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        nodes = len(gm.graph.nodes)
        gc.collect()  # else one optimizer pays for what the other left behind
        start = time.perf_counter()
        result = optimize(ddp, gm, example_inputs)
        seconds = time.perf_counter() - start
        found.append(Timing(layers, nodes, _segments(result), (seconds,)))
        return gm.forward

    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(optimize_ddp=False):
            torch.compile(ddp, backend=stopwatch)(torch.zeros(1, TOKENS, dtype=torch.long))
    finally:
        torch._dynamo.reset()
    (timing,) = found
    return timing


def _segments(result: object) -> int:
    """How many pieces an optimizer's result calls; 1 where it is not a stitched graph."""
    module = getattr(result, "__self__", result)
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return 1
    return len(graph.find_nodes(op="call_module"))


def measure_all(sizes: Sequence[int], deep: Sequence[int], repeat: int, console: Console) -> Timings:
    """Time optimizers at all sizes, in rounds, so that a busy minute does not meet one size only.

    Args:
        sizes: numbers of layers at which both are timed.
        deep: numbers of layers at which ddpopt alone is timed too.
        repeat: rounds, each of which times each optimizer once at each size.
        console: shows the progress.

    Returns:
        All timings.
    """
    for optimize in OPTIMIZERS.values():
        time_one(2, optimize)  # no timing shall pay for what only the first one needs
    alone = sorted({*deep} - {*sizes})
    pairs = [*((layers, name) for layers in sorted(sizes) for name in OPTIMIZERS)]
    pairs += [(layers, OURS) for layers in alone]
    found: dict[tuple[int, str], list[Timing]] = {pair: [] for pair in pairs}
    with Progress(console=console) as progress:
        task = progress.add_task("traces", total=len(pairs) * repeat)
        for layers, name in pairs * repeat:
            progress.update(task, description=f"{layers} layers, {name}")
            found[layers, name].append(time_one(layers, OPTIMIZERS[name]))
            progress.advance(task)
    gathered = {pair: _gathered(single) for pair, single in found.items()}
    return {
        name: [gathered[layers, name] for layers in sorted({*sizes, *alone}) if (layers, name) in gathered]
        for name in OPTIMIZERS
    }


def _gathered(single: Sequence[Timing]) -> Timing:
    """Repetitions of one measurement as one timing."""
    return replace(single[0], seconds=tuple(timing.seconds[0] for timing in single))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, store.

    Args:
        words: of the command line.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(words)
    console = wide_console()
    facts = conditions("benchmarks.planning")
    state(console, facts)
    # Dynamo notes at each compile that it leaves out DDP's profiler range.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with single_rank():
        timings = measure_all(arguments.layers, arguments.deep, arguments.repeat, console)
    verdict = judge(timings)
    console.print(_table(timings, verdict))
    for name, exponent in verdict.exponents.items():
        console.print(f"{name}: time grows as layers ** {exponent:.2f}", markup=False)
    for problem in verdict.problems:
        console.print(f"short of what is asked: {problem}", style="red", markup=False)
    if arguments.json:
        figures = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        document = {"conditions": facts, "timings": figures, "verdict": asdict(verdict)}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.pyperf:
        store(arguments.pyperf, timings_of(timings), facts)
    return int(bool(verdict.problems))


def timings_of(timings: Timings) -> pyperf_file.Timings:
    """All of them, by name: one process took them in turn."""
    return {
        f"{name}, {timing.layers} layers": [timing.seconds]
        for name, found in timings.items()
        for timing in found
    }


def _table(timings: Timings, verdict: Verdict) -> Table:
    table = Table(title="Seconds beside the backend: median (fastest – slowest)")
    table.add_column("layers", justify="right")
    table.add_column("nodes", justify="right")
    for name in timings:
        table.add_column(name, justify="right")
        table.add_column("segments", justify="right")
    table.add_column("times faster", justify="right")
    theirs = {timing.layers: timing for timing in timings[THEIRS]}
    for ours in timings[OURS]:
        cells = (text for timing in (ours, theirs.get(ours.layers)) for text in _cells(timing))
        ratio = verdict.ratios.get(ours.layers)
        table.add_row(str(ours.layers), str(ours.nodes), *cells, "–" if ratio is None else f"{ratio:.1f}")
    return table


def _cells(timing: Timing | None) -> tuple[str, str]:
    return ("–", "–") if timing is None else (_seconds(timing), str(timing.segments))


def _seconds(timing: Timing) -> str:
    return f"{timing.median:.3f} ({timing.fastest:.3f} – {max(timing.seconds):.3f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--layers", type=_sizes, default=SIZES, help=f"sizes ({SIZES})")
    parser.add_argument(
        "--deep", type=_deep, default=DEEP, help=f"sizes for ddpopt alone, or none ({DEEP}: 50,000 nodes)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, choices=range(1, 100), metavar="N", help="timings (3)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    add_option(parser)
    return parser


def _deep(text: str) -> tuple[int, ...]:
    return () if text == "none" else _sizes(text)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(sorted({int(part) for part in text.split(",")}))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of layers above 0, got {text!r}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
