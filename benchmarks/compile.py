"""What does it cost to start training? ``python -m benchmarks.compile``.

Measures the first three steps of a model in each mode, compiled by Inductor, each in a separate process:

- ``whole``: torch.compile without any optimizer for DDP, one graph;
- ``torch``: default torch.compile, with torch's DDPOptimizer, which compiles every segment;
- ``split``, ``inline``: ``ddpopt.compile`` with this strategy.

Every mode starts three times: *uncached*, with Inductor's caches off; *cold*, with empty caches; and *warm*,
a second process with the caches that the cold one left. The figure is processor time, including the C++
compiler; it still varies by a fifth between quarters of an hour on a shared machine. So modes that are
compared start together, each on its own processor: ``whole`` with ``inline``, and ``torch`` with ``split``.
They swap processors from round to round. Ratios are medians over the rounds; growth uses the fastest of each.

A cold start of torch's optimizer already benefits from a cache: the segments of equal layers are equal
graphs, and Inductor takes all but the first from the cache that this start fills.

The cap is the size of one layer, so torch's optimizer and ``split`` cut once per layer. Costs that do not
belong to a graph (imports, and a first compilation of something else) come before the clock starts.

Exit code 1 if ``split``, uncached or cold, is less than 4 times faster than torch's optimizer at 24 layers,
if ``inline`` costs more than 1.05 times one whole graph, if ``split`` grows by more than 1.25 times from 24
to 48 layers of GPT, or if a warm start of either compiles anything; 3 if a process fails.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from benchmarks.compile_once import WORKLOADS, Start
from benchmarks.report import (
    Claim,
    Ends,
    Grid,
    Section,
    Timings,
    at_least,
    at_most,
    conditions,
    ends,
    finish,
    number,
    over,
    parser_of,
    show_grid,
    some_of,
    state,
    wide_console,
)
from benchmarks.step_modes import EAGER, INLINE, MODES, SPLIT, TORCH, WHOLE
from ddpopt.errors import InfrastructureError

COMPILED = tuple(mode for mode in MODES if mode != EAGER)
ASKED_SPLIT = 4.0
ASKED_AT = 24
ASKED_INLINE = 1.05
ASKED_GROWTH = 1.25
Caching = Literal["uncached", "cold"]
KINDS: tuple[Caching, ...] = ("uncached", "cold")
LIMIT_S = 3600
LAST_LINES = 30


@dataclass(frozen=True)
class Setting:
    """One model at one depth in one mode."""

    model: str
    layers: int
    mode: str


@dataclass(frozen=True)
class Starts:
    """All starts of one setting: an uncached, a cold and a warm one for each round."""

    uncached: tuple[Start, ...]
    cold: tuple[Start, ...]
    warm: tuple[Start, ...]

    @property
    def anew(self) -> int:
        """The largest number of graphs that a warm start compiled."""
        return max(start.compiled or 0 for start in self.warm)

    def of(self, kind: Caching) -> tuple[Start, ...]:
        """The uncached or the cold starts."""
        return self.uncached if kind == "uncached" else self.cold

    def seconds(self, kind: Caching) -> float:
        """The fastest start of a kind, in processor seconds."""
        return min(start.cpu_s for start in self.of(kind))


Figures = Mapping[Setting, Starts]


def start_once(setting: Setting, caches: str, processor: int, *, cached: bool = True) -> Start:
    """Start a process that trains for a few steps.

    Args:
        setting: what it compiles.
        caches: the folder of its caches.
        processor: the processor it runs on.
        cached: whether Inductor and AOTAutograd may use them.

    Raises:
        InfrastructureError: the process failed, or took more than an hour.
    """
    words = (setting.model, str(setting.layers), setting.mode)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # otherwise each start iterates its sets in another order
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": caches,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0" if cached else "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.compile_once", *words, str(processor)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{' '.join(words)}: took more than {LIMIT_S} seconds") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        raise InfrastructureError(f"{' '.join(words)}: exit code {done.returncode}.\n{last}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def measure(settings: Sequence[Setting], repeat: int, done: Callable[[Setting], None]) -> Figures:
    """Run all starts, in rounds.

    Args:
        settings: the settings to measure.
        repeat: the number of rounds.
        done: called after the starts of each setting.

    Returns:
        The starts of each setting, in the order of `settings`.
    """
    processors = _processors()
    uncached: dict[Setting, list[Start]] = {setting: [] for setting in settings}
    cold: dict[Setting, list[Start]] = {setting: [] for setting in settings}
    warm: dict[Setting, list[Start]] = {setting: [] for setting in settings}
    for turn in range(repeat):
        for heat in heats(settings, len(processors)):
            own = processors[: len(heat)]
            places = dict(zip(heat, own if turn % 2 == 0 else reversed(own), strict=True))
            for setting, found in _together(places, cached=False).items():
                uncached[setting].append(found[0])
            for setting, found in _together(places, cached=True).items():
                cold[setting].append(found[0])
                warm[setting].append(found[1])
            for setting in heat:
                done(setting)
    return {s: Starts(tuple(uncached[s]), tuple(cold[s]), tuple(warm[s])) for s in settings}


def _processors() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def heats(settings: Sequence[Setting], processors: int) -> list[tuple[Setting, ...]]:
    """Settings that start together: for each model and depth, the compared modes; alone on one processor.

    >>> [[s.mode for s in heat] for heat in heats([Setting("gpt", 2, mode) for mode in COMPILED], 2)]
    [['whole', 'inline'], ['torch', 'split']]
    """
    found: dict[tuple[str, int, bool], list[Setting]] = {}
    for setting in settings:
        found.setdefault((setting.model, setting.layers, setting.mode in (TORCH, SPLIT)), []).append(setting)
    if processors < 2:
        return [(setting,) for heat in found.values() for setting in heat]
    return [tuple(heat) for heat in found.values()]


def _together(places: Mapping[Setting, int], *, cached: bool) -> dict[Setting, list[Start]]:
    """Start each once, at the same time; with caches, start each again once all have ended."""
    with contextlib.ExitStack() as stack:
        folders = {
            setting: stack.enter_context(tempfile.TemporaryDirectory(prefix="ddpopt-compile-"))
            for setting in places
        }
        pool = stack.enter_context(ThreadPoolExecutor(len(places)))
        found: dict[Setting, list[Start]] = {setting: [] for setting in places}
        for _ in range(2 if cached else 1):
            running = {
                setting: pool.submit(start_once, setting, folders[setting], place, cached=cached)
                for setting, place in places.items()
            }
            for setting, future in running.items():
                found[setting].append(future.result())
    return found


def ratios(figures: Figures, setting: Setting, mode: str, kind: Caching) -> list[float]:
    """The cost of a start as a ratio to another mode's, by round; empty if that was not measured."""
    other = figures.get(Setting(setting.model, setting.layers, mode))
    if other is None or setting not in figures:
        return []
    both = zip(figures[setting].of(kind), other.of(kind), strict=True)
    return [ours.cpu_s / theirs.cpu_s for ours, theirs in both]


def ratio(figures: Figures, setting: Setting, mode: str, kind: Caching) -> float | None:
    """The median of `ratios`; None if there are none."""
    rounds = ratios(figures, setting, mode, kind)
    return statistics.median(rounds) if rounds else None


def _claims(figures: Figures) -> Iterator[Claim]:
    deepest = 2 * ASKED_AT
    for model in ("gpt", "resnet"):
        depths = sorted({setting.layers for setting in figures if setting.model == model})
        where = f"{model}, {ASKED_AT} layers"
        torchs = Setting(model, ASKED_AT, TORCH)
        for kind in KINDS:
            found, spread = _ratio(figures, torchs, SPLIT, kind)
            what = f"torch's {kind} start to split's"
            yield at_least(where, what, found, ASKED_SPLIT, spread=spread)
        for layers, kind in itertools.product(depths or [ASKED_AT], KINDS):
            inline = Setting(model, layers, INLINE)
            found, spread = _ratio(figures, inline, WHOLE, kind)
            where, what = f"{model}, {layers} layers", f"inline's {kind} start to one graph's"
            yield at_most(where, what, found, ASKED_INLINE, spread=spread, limit=1.0)
        for mode in (SPLIT, INLINE):
            anew = _compiled_anew(figures, model, mode)
            yield at_most(f"{model}, all depths", f"{mode}: compiled in a warm start", anew, 0, limit=0)
    deep, half = (Setting("gpt", n, SPLIT) for n in (deepest, ASKED_AT))
    for kind in KINDS:
        found, spread = _growth(figures, deep, half, kind)
        where, what = f"gpt, {ASKED_AT} to {deepest} layers", f"growth of split's {kind} start"
        yield at_most(where, what, found, ASKED_GROWTH, spread=spread, limit=1.0)


def _ratio(figures: Figures, setting: Setting, mode: str, kind: Caching) -> tuple[float | None, Ends]:
    """The ratio of a kind of start to another mode's, with the lowest and highest over all rounds."""
    rounds = ratios(figures, setting, mode, kind)
    return ratio(figures, setting, mode, kind), ends(rounds)


def _growth(figures: Figures, deep: Setting, half: Setting, kind: Caching) -> tuple[float | None, Ends]:
    """The ratio of the fastest starts at two depths, with the lowest and highest ratio over all rounds."""
    if deep not in figures or half not in figures:
        return None, None
    ours, theirs = figures[deep], figures[half]
    rounds = over([start.cpu_s for start in ours.of(kind)], [start.cpu_s for start in theirs.of(kind)])
    return ours.seconds(kind) / theirs.seconds(kind), ends(rounds)


def _compiled_anew(figures: Figures, model: str, mode: str) -> int | None:
    starts = [found for setting, found in figures.items() if (setting.model, setting.mode) == (model, mode)]
    return max((found.anew for found in starts), default=None)


def section(figures: Figures, facts: Mapping[str, str]) -> Section:
    """The requirements and the results.

    Args:
        figures: all starts.
        facts: the conditions.
    """
    of_kinds = (f"{kind}{what}" for kind in KINDS for what in (", s", " to torch's", " to one graph"))
    columns = ("model", "layers", "mode", *of_kinds, "warm, s", "warm: recompiled")
    rows = tuple(
        (
            *(setting.model, str(setting.layers), setting.mode),
            *(cell for kind in KINDS for cell in _cells(figures, setting, kind)),
            _seconds(starts.warm),
            str(starts.anew),
        )
        for setting, starts in figures.items()
    )
    title = "First three steps, processor seconds, fastest (slowest); graphs that a warm start compiled again"
    return Section("compile", facts, tuple(_claims(figures)), (Grid(title, columns, rows),))


def _cells(figures: Figures, setting: Setting, kind: Caching) -> tuple[str, ...]:
    others = (ratio(figures, setting, mode, kind) for mode in (TORCH, WHOLE))
    return _seconds(figures[setting].of(kind)), *map(number, others)


def _seconds(starts: Sequence[Start]) -> str:
    found = sorted(start.cpu_s for start in starts)
    return f"{found[0]:.1f}" + (f" ({found[-1]:.1f})" if len(found) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit code.
    """
    asked = _parser().parse_args(arguments)
    console = wide_console()
    facts = conditions("benchmarks.compile")
    state(console, facts)
    settings = [
        Setting(model, layers, mode)
        for model in asked.models
        for layers in asked.layers or WORKLOADS[model].depths
        for mode in asked.modes
    ]
    try:
        figures = _measured(settings, asked.repeat, console)
    except InfrastructureError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    report = section(figures, facts)
    show_grid(console, report.grids[0])
    starts = [{**asdict(setting), **asdict(found)} for setting, found in figures.items()]
    return finish(console, report, asked, starts, timings_of(figures))


def timings_of(figures: Figures) -> Timings:
    """Processor seconds of all starts, by name; each start is a separate process."""
    return {
        f"{setting.model}, {setting.layers} layers, {setting.mode}, {kind}": [[s.cpu_s] for s in found]
        for setting, starts in figures.items()
        for kind, found in (("uncached", starts.uncached), ("cold", starts.cold), ("warm", starts.warm))
    }


def _measured(settings: Sequence[Setting], repeat: int, console: Console) -> Figures:
    with Progress(console=console) as progress:
        task = progress.add_task("starts", total=len(settings) * repeat)

        def done(setting: Setting) -> None:
            words = f"{setting.model}, {setting.layers} layers, {setting.mode}"
            progress.update(task, description=words, advance=1)

        return measure(settings, repeat, done)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.compile", __doc__)
    models, modes = ",".join(WORKLOADS), ",".join(COMPILED)
    parser.add_argument(
        "--models", type=partial(some_of, tuple(WORKLOADS)), default=models, help=f"({models})"
    )
    parser.add_argument("--modes", type=partial(some_of, COMPILED), default=modes, help=f"({modes})")
    parser.add_argument("--layers", type=_depths, help=f"numbers of layers for each model ({_own_depths()})")
    parser.add_argument(
        "--repeat", type=int, default=1, choices=range(1, 100), metavar="N", help="starts per mode (1)"
    )
    return parser


def _own_depths() -> str:
    return "; ".join(f"{name} {','.join(map(str, each.depths))}" for name, each in WORKLOADS.items())


def _depths(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of layers such as 12,24, got {text!r}")
    return tuple(sorted({int(part) for part in text.split(",")}))


if __name__ == "__main__":
    sys.exit(main())
