"""What moved between a baseline and a run: from what, to what, for which case.

Invariant: whatever the baseline has and the run has not is a change, and so is the other way round. Nothing
that was not measured counts as unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ddpopt.gate.bands import Bands, is_margin_kept
from ddpopt.gate.buckets import bucket_changes
from ddpopt.gate.figures import CaseFigures, Figures, ModeFigures, PlanFigures, Ratio
from ddpopt.gate.measuring import Measured
from ddpopt.gate.moved import Change

NONE = "none"
MISSING = "missing"
NOT_THERE = "not in the baseline"
TIMES = "times"


def changes(before: Figures, measured: Measured, bands: Bands) -> tuple[Change, ...]:
    """Compare a run with a baseline.

    Args:
        before: the baseline's figures.
        measured: the run's, with its problems.
        bands: how far a figure may stray.

    Returns:
        All that moved, cases first, in the baseline's order.
    """
    return tuple(_changes(before, measured, bands))


def _changes(before: Figures, measured: Measured, bands: Bands) -> Iterator[Change]:
    now = measured.figures
    known = {(problem.subject, problem.where) for problem in measured.problems}
    if not now.cases:
        yield Change("the gate", "", "run", f"{len(before.cases)} cases", "no case was measured")
    for problem in measured.problems:
        yield Change(problem.subject, problem.where, "check", "passes", problem.message)
    for name in _both(before.cases, now.cases):
        if name not in now.cases or name not in before.cases:
            if (name, "plan") not in known:
                yield _presence(name, "", "case", is_there=name in now.cases)
        else:
            yield from _case(name, before.cases[name], now.cases[name], bands, known)
    for name in _both(before.ratios, now.ratios):
        due = {
            what: ratio for what, ratio in before.ratios.get(name, {}).items() if (name, what) not in known
        }
        yield from _ratios(name, due, now.ratios.get(name, {}), bands)
    for folder in _both(before.tests, now.tests):
        if (folder, "") not in known:
            yield from _tests(folder, before.tests.get(folder), now.tests.get(folder))


def _both(before: Collection[str], now: Collection[str]) -> list[str]:
    return [*before, *(name for name in now if name not in before)]


def _presence(subject: str, where: str, what: str, *, is_there: bool) -> Change:
    return Change(subject, where, what, *((NOT_THERE, "there") if is_there else ("there", MISSING)))


def _case(
    name: str, before: CaseFigures, now: CaseFigures, bands: Bands, known: Collection[tuple[str, str]]
) -> Iterator[Change]:
    yield from _plan(name, before.plan, now.plan)
    for where in _both(before.modes, now.modes):
        if where in before.modes and where in now.modes:
            yield from _mode(name, where, before.modes[where], now.modes[where], bands)
        elif (name, where) not in known:
            yield _presence(name, where, "mode", is_there=where in now.modes)


def _plan(name: str, before: PlanFigures, now: PlanFigures) -> Iterator[Change]:
    exact = (
        ("fingerprint", before.fingerprint, now.fingerprint),
        ("segments", str(before.segments), str(now.segments)),
        ("unread parameters", _listed(before.unread), _listed(now.unread)),
    )
    for what, was, has in exact:
        if was != has:
            yield Change(name, "plan", what, was, has)
    yield from bucket_changes(name, before.buckets, now.buckets)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or NONE


# ----------------------------------------------------------------------------------------------- of one mode


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in counts.items()) or NONE


EXACT: tuple[tuple[str, Callable[[ModeFigures], str]], ...] = (
    ("graphs", lambda mode: str(mode.graphs)),
    ("recompiles", lambda mode: str(mode.recompiles)),
    ("compiled by the backend", lambda mode: str(mode.compiled)),
    ("collectives of a backward", lambda mode: _counts(mode.backward)),
    ("collectives outside of backwards", lambda mode: _counts(mode.outside)),
    ("planned = observed buckets", lambda mode: "yes" if mode.aligned else "no"),
)


def _mode(name: str, where: str, before: ModeFigures, now: ModeFigures, bands: Bands) -> Iterator[Change]:
    for what, word in EXACT:
        if word(before) != word(now):
            yield Change(name, where, what, word(before), word(now))
    lowest = bands.lowest_potential(before.potential)
    if abs(now.potential - before.potential) > bands.potential:
        falls = now.potential < lowest
        band = f"at least {lowest:.3f} is asked" if falls else "better"
        yield Change(
            name,
            where,
            "overlap potential",
            f"{before.potential:.3f}",
            f"{now.potential:.3f} ({band})",
            falls,
        )
    for level in _both(before.margins, now.margins):
        yield from _margin(name, where, level, before.margins.get(level), now.margins.get(level), bands)


def _margin(
    name: str, where: str, level: str, before: float | None, now: float | None, bands: Bands
) -> Iterator[Change]:
    what = f"worst distance at {level}, as a share of its bound"
    if before is None or now is None:
        was, has = (
            (NOT_THERE if before is None else f"{before:.3f}"),
            (MISSING if now is None else f"{now:.3f}"),
        )
        yield Change(name, where, what, was, has)
    elif not is_margin_kept(before, now, bands):
        highest = bands.highest_margin(before)
        worse = now > highest
        band = f"at most {highest:.3f} is asked" if worse else "better"
        yield Change(name, where, what, f"{before:.3f}", f"{now:.3f} ({band})", worse)


# ---------------------------------------------------------------------------------------- ratios and numbers


def _ratios(
    name: str, before: Mapping[str, Ratio], now: Mapping[str, Ratio], bands: Bands
) -> Iterator[Change]:
    for what in _both(before, now):
        words = f"{what}, as a share of torch's time"
        was, has = before.get(what), now.get(what)
        if isinstance(was, float | int) and isinstance(has, float | int):
            yield from _ratio(
                name, words, was, has, bands.highest_ratio(what, was), bands.lowest_ratio(what, was)
            )
        elif was != has:
            yield Change(
                name,
                TIMES,
                words,
                NOT_THERE if was is None else str(was),
                MISSING if has is None else str(has),
            )


def _ratio(
    name: str, what: str, before: float, now: float, highest: float, lowest: float
) -> Iterator[Change]:
    if not lowest <= now <= highest:
        worse = now > highest
        band = f"at most {highest:.3f} is asked" if worse else "better"
        yield Change(name, TIMES, what, f"{before:.3f}", f"{now:.3f} ({band})", worse)


def _tests(folder: str, before: int | None, now: int | None) -> Iterator[Change]:
    if before is None or now is None:
        yield _presence(folder, "", "tests collected", is_there=now is not None)
    elif now != before:
        yield Change(folder, "", "tests collected", str(before), str(now), now < before)
