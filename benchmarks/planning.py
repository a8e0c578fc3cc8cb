"""Time to plan and cut, compared with torch's DDPOptimizer: ``python -m benchmarks.planning``.

Both get the same Dynamo graph of a GPT-like model in DDP, with a backend that does nothing. So the timing
covers everything that an optimizer adds to compilation: for ddpopt facts, plan, partition, certificate and
the search for equal segments; for torch's optimizer bucketing, splitting and re-running the segments on fake
tensors. The cap is the size of one layer, so there is one segment per layer.

Growth is measured further for ddpopt alone (``--deep``): at 1700 layers the graph has about 50,000 nodes, and
torch's optimizer, whose time grows faster than the graph, would take too long. No planner can grow slower
than the graph that it has to read, so the limit is an exponent of 1.

Each timing has its own trace, inside a real Dynamo compile, because an optimizer may change its graph and
reads the surrounding tracing context. Optimizers alternate within one process; only ratios count.

Exit code 1 if ddpopt is less than 20 times faster at 200 layers, if its time grows faster than layers ** 1.2
over all sizes, or if it makes fewer cuts than there are layers, because it then did less work.
"""

import argparse
import gc
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpt import GptLike
from benchmarks.report import (
    Grid,
    Section,
    Timings,
    at_least,
    at_most,
    conditions,
    ends,
    finish,
    over,
    parser_of,
    show_grid,
    state,
    wide_console,
)
from ddpopt.dynamo.backend import DdpoptBackend
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import one_rank
from ddpopt.split.partition import partition

TOKENS = 8
SIZES = "12,48,96,200"
DEEP = "1700"

ASKED_RATIO, ASKED_AT = 20.0, 200
ASKED_EXPONENT = 1.2
ASKED_NODES = 50_000
OURS = "ddpopt"
THEIRS = "DDPOptimizer"

Compiled = Callable[..., Any]
Optimize = Callable[[DistributedDataParallel, fx.GraphModule, Sequence[Any]], object]


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one optimizer at one size.

    Attributes:
        layers: the number of transformer layers.
        nodes: the number of nodes in the Dynamo graph.
        segments: the number of pieces the graph was cut into.
        seconds: one figure for each repetition.
    """

    layers: int
    nodes: int
    segments: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The smallest of `seconds`."""
        return min(self.seconds)


def growth_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares slope of log(seconds) over log(size): 1 is linear, 2 quadratic.

    >>> round(growth_exponent([10, 20, 40], [1.0, 4.0, 16.0]), 6)
    2.0
    """
    slope, _ = statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds])
    return slope


Found = Mapping[str, Sequence[Timing]]
"""By optimizer, one timing for each size, in ascending order; ddpopt may have more sizes."""


def do_nothing(gm: fx.GraphModule, _: Sequence[Any]) -> Compiled:
    """A backend that costs nothing and returns the graph uncompiled."""
    return gm.forward


def run_ddpopt(_: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    """Everything that ddpopt does in a compile, except compiling; returns the cut graph."""
    cut: list[fx.GraphModule] = []

    def noting(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        cut.append(partition(gm, plan))
        return cut[-1]

    with patch("ddpopt.split.strategy.partition", noting):
        DdpoptBackend(do_nothing, strategy="split")(gm, example_inputs)
    return cut[0] if cut else gm


def run_torch(ddp: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    """The same for torch's optimizer, with an explicit cap applied to the first bucket too, as in DDP."""
    optimizer: Any = DDPOptimizer(ddp.bucket_bytes_cap, do_nothing, first_bucket_cap=ddp.bucket_bytes_cap)
    return optimizer.compile_fn(gm, list(example_inputs))


OPTIMIZERS: Mapping[str, Optimize] = {OURS: run_ddpopt, THEIRS: run_torch}


def time_one(layers: int, optimize: Optimize) -> Timing:
    """Trace a fresh model of `layers` layers and time one optimizer once, inside Dynamo's compile.

    Args:
        layers: number of transformer layers.
        optimize: the optimizer to time.

    Returns:
        A `Timing` with a single figure.
    """
    model = GptLike(layers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=model.layer_bytes / 2**20)
    found: list[Timing] = []

    def stopwatch(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        nodes = len(gm.graph.nodes)
        gc.collect()  # otherwise one optimizer pays for the other's garbage
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
    """The number of pieces that an optimizer's result calls; 1 if it is not a split graph."""
    module = getattr(result, "__self__", result)
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return 1
    return len(graph.find_nodes(op="call_module"))


def measure_all(sizes: Sequence[int], deep: Sequence[int], repeat: int, console: Console) -> Found:
    """Time optimizers at all sizes, in rounds, so that a busy minute does not affect only one size.

    Args:
        sizes: numbers of layers at which both are timed.
        deep: numbers of layers at which ddpopt alone is timed too.
        repeat: rounds, each of which times each optimizer once at each size.
        console: shows the progress.

    Returns:
        All timings.
    """
    for optimize in OPTIMIZERS.values():
        time_one(2, optimize)  # keep one-time costs out of the timings
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


def section(found: Found, facts: Mapping[str, str]) -> Section:
    """The requirements and the results.

    Ratios are of medians, because both optimizers were measured in turn. Growth is fitted to the fastest
    timings, because sizes were measured in different minutes and other load only adds time.

    Args:
        found: the timings of `OURS` and `THEIRS`; the sizes of the second are among those of the first.
        facts: the conditions.
    """
    ours, theirs = ({timing.layers: timing for timing in found[name]} for name in (OURS, THEIRS))
    sizes = f"{min(ours)} to {max(ours)} layers"
    exponent = growth_exponent([*ours], [t.fastest for t in ours.values()]) if len(ours) > 1 else None
    nodes, rounds = max(t.nodes for t in ours.values()), None
    if ASKED_AT in ours and ASKED_AT in theirs:
        rounds = over(theirs[ASKED_AT].seconds, ours[ASKED_AT].seconds)
    claims = (
        at_least(
            f"GPT of {ASKED_AT} layers",
            "torch's time to ddpopt's",
            None if rounds is None else statistics.median(rounds),
            ASKED_RATIO,
            spread=ends(rounds),
        ),
        at_most(sizes, "growth: exponent over layers", exponent, ASKED_EXPONENT, limit=1.0),
        at_least(sizes, "nodes of the largest graph", nodes if nodes >= ASKED_NODES else None, ASKED_NODES),
        at_least(sizes, "segments a layer, the fewest", min(t.segments / t.layers for t in ours.values()), 1),
    )
    rows = tuple(
        (str(t.layers), str(t.nodes), _seconds(t), _seconds(theirs.get(t.layers)), _faster(t, theirs))
        for t in ours.values()
    )
    columns = ("layers", "nodes", "ddpopt, s", "torch's DDPOptimizer, s", "times faster")
    title = "Seconds without the backend, median (fastest – slowest); times faster, from the medians"
    return Section("planning", facts, claims, (Grid(title, columns, rows),))


def _seconds(timing: Timing | None) -> str:
    if timing is None:
        return "–"
    return f"{timing.median:.3f} ({timing.fastest:.3f} – {max(timing.seconds):.3f})"


def _faster(ours: Timing, theirs: Mapping[int, Timing]) -> str:
    return f"{theirs[ours.layers].median / ours.median:.1f}" if ours.layers in theirs else "–"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, store.

    Args:
        words: the command-line arguments.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(words)
    console = wide_console()
    facts = conditions("benchmarks.planning")
    state(console, facts)
    # Dynamo warns at each compile that it drops DDP's profiler range.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with one_rank():
        found = measure_all(asked.layers, asked.deep, asked.repeat, console)
    report = section(found, facts)
    show_grid(console, report.grids[0])
    figures = {name: [asdict(timing) for timing in timings] for name, timings in found.items()}
    return finish(console, report, asked, figures, timings_of(found))


def timings_of(found: Found) -> Timings:
    """All timings by name; one process took them in turn."""
    return {
        f"{name}, {timing.layers} layers": [timing.seconds]
        for name, timings in found.items()
        for timing in timings
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.planning", __doc__)
    parser.add_argument("--layers", type=_sizes, default=SIZES, help=f"numbers of layers ({SIZES})")
    parser.add_argument(
        "--deep", type=_deep, default=DEEP, help=f"layers for ddpopt alone, or none ({DEEP}: 50,000 nodes)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, choices=range(1, 100), metavar="N", help="timings of each (3)"
    )
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
