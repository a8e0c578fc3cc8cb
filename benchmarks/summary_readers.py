"""From the JSON of each measurement to its section of the summary.

Invariant: a file that lacks a part of what is asked gives a claim that is not held, never one claim fewer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import compile as compiling
from benchmarks.alignment_rows import ASKED as ASKED_POTENTIAL
from benchmarks.compile_once import Start
from benchmarks.planning_rows import ASKED_EXPONENT, ASKED_RATIO, OURS, THEIRS, Timing
from benchmarks.step_modes import INLINE, SPLIT, TORCH, WHOLE
from benchmarks.step_rows import ASKED_TO_LIMIT
from benchmarks.step_table import milliseconds, percent, ratio
from benchmarks.step_workloads import MIB, WORKLOADS
from benchmarks.summary_sections import Claim, Grid, Section, at_least, at_most

Document = Mapping[str, Any]
RATES = ("1gbit", "10gbit")
ASKED_LAYERS = 200
ASKED_NODES = 50_000


def read_planning(document: Document) -> Section:
    """The section of `benchmarks.planning`."""
    found = {name: [Timing(**fields) for fields in timings] for name, timings in document["timings"].items()}
    theirs = {timing.layers: timing for timing in found[THEIRS]}
    ours = {timing.layers: timing for timing in found[OURS]}
    exponent = document["verdict"]["exponents"].get(OURS)
    nodes = max(timing.nodes for timing in found[OURS])
    sizes = f"{min(ours)} to {max(ours)} layers"
    times_faster = None
    if ASKED_LAYERS in ours and ASKED_LAYERS in theirs:
        times_faster = _over(theirs[ASKED_LAYERS].seconds, ours[ASKED_LAYERS].seconds)
    claims = (
        at_least(
            f"GPT of {ASKED_LAYERS} layers",
            "torch's time to ddpopt's",
            None if times_faster is None else statistics.median(times_faster),
            ASKED_RATIO,
            spread=_ends(times_faster),
        ),
        at_most(sizes, "growth: exponent over layers", exponent, ASKED_EXPONENT, limit=1.0),
        at_least(sizes, "nodes of the largest graph", nodes, ASKED_NODES),
        at_least(sizes, "segments a layer, the fewest", min(t.segments / t.layers for t in ours.values()), 1),
    )
    rows = tuple(
        (str(t.layers), str(t.nodes), _seconds(t), _seconds(theirs.get(t.layers)), _faster(t, theirs))
        for t in found[OURS]
    )
    columns = ("layers", "nodes", "ddpopt, s", "torch's DDPOptimizer, s", "times faster")
    title = "Seconds beside the backend, median (fastest – slowest); times faster, of the medians"
    return Section("planning", document["conditions"], claims, (Grid(title, columns, rows),))


def _seconds(timing: Timing | None) -> str:
    if timing is None:
        return "–"
    return f"{timing.median:.3f} ({timing.fastest:.3f} – {max(timing.seconds):.3f})"


def _faster(ours: Timing, theirs: Mapping[int, Timing]) -> str:
    return f"{theirs[ours.layers].median / ours.median:.1f}" if ours.layers in theirs else "–"


def _over(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def _ends(values: Sequence[float] | None) -> tuple[float, float] | None:
    """Lowest and highest; None where there are no two."""
    return (min(values), max(values)) if values and len(values) > 1 else None


def read_compile(document: Document) -> Section:
    """The section of `benchmarks.compile`."""
    figures = {
        compiling.Setting(fields["model"], fields["layers"], fields["mode"]): compiling.Starts(
            *(tuple(Start(**start) for start in fields[kind]) for kind in ("uncached", "cold", "warm"))
        )
        for fields in document["starts"]
    }
    claims = tuple(_compile_claims(figures))
    of_kinds = (
        f"{kind}{what}" for kind in compiling.KINDS for what in (", s", " to torch's", " to one graph")
    )
    columns = ("model", "layers", "mode", *of_kinds, "warm, s", "warm: anew")
    rows = tuple(
        (
            *(setting.model, str(setting.layers), setting.mode),
            *(cell for kind in compiling.KINDS for cell in _of_kind(figures, setting, kind)),
            _cpu_seconds(starts.warm),
            str(starts.anew),
        )
        for setting, starts in figures.items()
    )
    title = "First three steps, processor seconds, fastest (slowest); graphs that a warm start compiled anew"
    return Section("compile", document["conditions"], claims, (Grid(title, columns, rows),))


def _of_kind(
    figures: compiling.Figures, setting: compiling.Setting, kind: compiling.Kind
) -> tuple[str, str, str]:
    ratios = (compiling.ratio(figures, setting, mode, kind) for mode in (TORCH, WHOLE))
    to_torch, to_whole = map(ratio, ratios)
    return _cpu_seconds(figures[setting].of(kind)), to_torch, to_whole


def _cpu_seconds(starts: Sequence[Start]) -> str:
    found = sorted(start.cpu_s for start in starts)
    return f"{found[0]:.1f}" + (f" ({found[-1]:.1f})" if len(found) > 1 else "")


def _compile_claims(figures: compiling.Figures) -> Iterator[Claim]:
    deepest = 2 * compiling.ASKED_AT
    for model in ("gpt", "resnet"):
        depths = sorted({setting.layers for setting in figures if setting.model == model})
        where = f"{model}, {compiling.ASKED_AT} layers"
        torchs = compiling.Setting(model, compiling.ASKED_AT, TORCH)
        for kind in compiling.KINDS:
            found, spread = _ratio(figures, torchs, SPLIT, kind)
            what = f"torch's {kind} start to split's"
            yield at_least(where, what, found, compiling.ASKED_SPLIT, spread=spread)
        for layers, kind in itertools.product(depths or [compiling.ASKED_AT], compiling.KINDS):
            inline = compiling.Setting(model, layers, INLINE)
            found, spread = _ratio(figures, inline, WHOLE, kind)
            where, what = f"{model}, {layers} layers", f"inline's {kind} start to one graph's"
            yield at_most(where, what, found, compiling.ASKED_INLINE, spread=spread, limit=1.0)
        for mode in (SPLIT, INLINE):
            anew = _compiled_anew(figures, model, mode)
            yield at_most(f"{model}, all depths", f"{mode}: compiled in a warm start", anew, 0, limit=0)
    deep, half = (compiling.Setting("gpt", n, SPLIT) for n in (deepest, compiling.ASKED_AT))
    for kind in compiling.KINDS:
        found, spread = _growth(figures, deep, half, kind)
        where, what = f"gpt, {compiling.ASKED_AT} to {deepest} layers", f"growth of split's {kind} start"
        yield at_most(where, what, found, compiling.ASKED_GROWTH, spread=spread, limit=1.0)


def _ratio(
    figures: compiling.Figures, setting: compiling.Setting, mode: str, kind: compiling.Kind
) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of starts of a kind to those of another mode, and the ends over all rounds."""
    rounds = compiling.ratios(figures, setting, mode, kind)
    return compiling.ratio(figures, setting, mode, kind), _ends(rounds)


def _growth(
    figures: compiling.Figures, deep: compiling.Setting, half: compiling.Setting, kind: compiling.Kind
) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of the fastest starts of a kind at two depths, and the ends of the ratios of all rounds."""
    if deep not in figures or half not in figures:
        return None, None
    ours, theirs = figures[deep], figures[half]
    rounds = _over([start.cpu_s for start in ours.of(kind)], [start.cpu_s for start in theirs.of(kind)])
    return ours.seconds(kind) / theirs.seconds(kind), _ends(rounds)


def _compiled_anew(figures: compiling.Figures, model: str, mode: str) -> int | None:
    starts = [found for setting, found in figures.items() if (setting.model, setting.mode) == (model, mode)]
    return max((found.anew for found in starts), default=None)


def read_step(document: Document) -> Section:
    """The section of `benchmarks.step`."""
    claims, grids = [], []
    for table in document["tables"]:
        claims += [_step_claim(table, asked) for asked in table["asked"]]
        grids.append(_step_grid(table))
    measured = {(table["model"], table["rate"]) for table in document["tables"] if table["asked"]}
    claims += [
        at_most(f"{model} at {rate}", "inline to the limit", None, ASKED_TO_LIMIT)
        for rate in RATES
        for model in WORKLOADS
        if (model, rate) not in measured
    ]
    return Section("step", document["conditions"], tuple(claims), tuple(grids))


def _step_claim(table: Mapping[str, Any], asked: Mapping[str, Any]) -> Claim:
    return Claim(
        case=f"{table['model']} at {table['rate']}",
        what=asked["what"],
        found=asked["found"],
        spread=(asked["spread"][0], asked["spread"][1]),
        limit=asked["possible"],
        asked=asked["asked"],
        held=asked["held"],
    )


def _step_grid(table: Mapping[str, Any]) -> Grid:
    columns = (
        "mode",
        "fastest step, ms",
        "median (quartiles)",
        "to the limit",
        "exposed",
        "peak, MiB",
        "to whole's",
    )
    rows = tuple(
        (
            row["mode"] + ("" if row["graphs"] is None else f" (graphs: {row['graphs']})"),
            milliseconds(row["fastest_s"]),
            f"{milliseconds(row['step_s'])} ({'–'.join(map(milliseconds, row['spread_s']))})",
            ratio(row["to_limit"]),
            percent(row["exposed"]),
            f"{row['peak_bytes'] / MIB:.1f}",
            ratio(row["to_whole_peak"]),
        )
        for row in table["rows"]
    )
    limit_ms = milliseconds(table["limit_s"])
    return Grid(f"{table['about']}; {table['network']}; physical limit {limit_ms} ms", columns, rows)


def read_alignment(document: Document) -> Section:
    """The section of `benchmarks.alignment`."""
    rows = document["rows"]
    modes = list(dict.fromkeys(mode for row in rows for mode in row["cells"]))
    cells = {mode: [row["cells"][mode] for row in rows] for mode in modes}
    claims = []
    for mode in ("split", "inline"):
        where = f"{len(rows)} runs"
        found = _potentials(cells.get(mode, ()))
        failing = sum(bool(cell["problems"]) for cell in cells[mode]) if mode in cells else None
        what = f"{mode}: lowest overlap potential"
        claims.append(at_least(where, what, min(found, default=None), ASKED_POTENTIAL, spread=_ends(found)))
        claims.append(at_most(where, f"{mode}: runs that fail", failing, 0, limit=0))
    grid_rows = tuple((mode, *_alignment_cells(cells[mode])) for mode in modes)
    columns = ("mode", "mean", "lowest", f"at least {ASKED_POTENTIAL:g}", "runs that crash")
    title = f"Overlap potential to eager DDP's, {len(rows)} runs"
    return Section("alignment", document["conditions"], tuple(claims), (Grid(title, columns, grid_rows),))


def _potentials(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    return [cell["ratio"] for cell in cells if cell["ratio"] is not None]


def _alignment_cells(cells: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    found = _potentials(cells)
    kept = sum(value >= ASKED_POTENTIAL for value in found)
    crashed = sum(bool(cell["crash"]) for cell in cells)
    mean = ratio(statistics.fmean(found) if found else None)
    return mean, ratio(min(found, default=None)), f"{kept} of {len(cells)}", str(crashed)


READERS: Mapping[str, Callable[[Document], Section]] = {
    "planning": read_planning,
    "compile": read_compile,
    "step": read_step,
    "alignment": read_alignment,
}
"""By the name of the measurement, which is that of its file too."""
