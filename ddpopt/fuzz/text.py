"""The text of a fuzzing campaign: what was judged, what failed, and which features were covered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpopt.explanation.tables import Column, Noted, paragraph, table
from ddpopt.judge.report.wording import count_of

if TYPE_CHECKING:
    from ddpopt.fuzz.cases import FoundCase
    from ddpopt.fuzz.minimize import Minimized, SoFar
    from ddpopt.fuzz.sizes import Size
    from ddpopt.fuzz.summary import Summary


def fuzz_text(summary: Summary, cases: str, known_features: frozenset[str]) -> str:
    """Write what a campaign came to.

    Args:
        summary: the campaign's.
        cases: the folder that has the failures.
        known_features: all that could have been drawn.

    Returns:
        Lines of at most 80 columns.
    """
    return "\n".join(_lines(summary, cases, known_features))


def _lines(summary: Summary, cases: str, known_features: frozenset[str]) -> Iterator[str]:
    plan = summary.plan
    yield paragraph(
        f"{count_of(summary.models, 'model')} in {summary.seconds:.0f} s ({summary.rate:.2f} a second): "
        f"backend {plan.backend}, {count_of(plan.nproc, 'rank')}, {count_of(plan.workers, 'worker')}, "
        f"seed {plan.seed}"
    )
    yield ""
    kinds = list(dict.fromkeys(kind for counts in summary.kinds.values() for kind in counts))
    columns = [Column("mode"), *(Column(kind, "right") for kind in kinds)]
    yield table(
        columns,
        [(mode, *(counts.get(kind, "-") for kind in kinds)) for mode, counts in summary.kinds.items()],
    )
    yield ""
    if summary.failures:
        columns = [Column("failure", fills=True), Column("models", "right"), Column("first", "right")]
        rows = [(Noted(one.signature, one.owner), one.times, one.first) for one in summary.failures]
        yield table(columns, rows)
        yield ""
    for what, times in summary.refused.items():
        yield paragraph(f"not judged, {times} times: {what}", "  ")
    yield from _features(summary, known_features)
    found = count_of(summary.distinct, "distinct failure")
    others = len(summary.failures) - summary.distinct
    more = f", {others} of the backend alone" if others else ""
    kept = f"; cases and scripts in {cases}" if summary.failures else ""
    yield paragraph(f"{found}{more}{kept}")


def _features(summary: Summary, known_features: frozenset[str]) -> Iterator[str]:
    missing = sorted(known_features - set(summary.features) - set(summary.plan.without))
    seen = len(known_features & set(summary.features))
    words = f"; not yet: {', '.join(missing)}" if missing else ""
    yield paragraph(f"{seen} of {len(known_features)} features covered{words}", "  ")


def progress_line(summary: Summary, features: int) -> str:
    """How far a campaign is, in one line."""
    failures = ", ".join(
        (f"{summary.distinct} failures", *_others(summary)) if summary.failures else ("no failure",)
    )
    return (
        f"{summary.models} models, {summary.rate:.2f} a second, "
        f"{len(summary.features)} of {features} features, {failures}"
    )


def _others(summary: Summary) -> Iterator[str]:
    others = len(summary.failures) - summary.distinct
    if others:
        yield f"{others} of the backend"


def searching_line(found: SoFar) -> str:
    """How far a search for a small model is, in one line."""
    model, setting = found.case.model, found.case.setting
    steps = count_of(sum(1 for _ in model.all_steps()), "step")
    how = f"{count_of(setting.nproc, 'rank')}, {setting.backend}"
    drifted = f", {found.drifted} failed in another way" if found.drifted else ""
    return f"{count_of(found.tries, 'model')} tried, down to {steps} at width {model.width}, {how}{drifted}"


def minimized_text(result: Minimized, script: str, ran: FoundCase, reproduces: bool) -> str:
    """Write what a search for a small model came to.

    Args:
        result: the search's.
        script: name of the script.
        ran: the case that the script runs.
        reproduces: whether the script showed the failure in a fresh interpreter.

    Returns:
        Lines of at most 80 columns.
    """
    return "\n".join(_of_search(result, script, ran, reproduces))


def _sized(name: str, case: FoundCase, size: Size) -> tuple[str | int, ...]:
    setting = case.setting
    model = (size.ops, size.parameters, size.nbytes, size.lines, case.model.cap_bytes)
    return (name, *model, setting.nproc, setting.steps, setting.backend)


def _of_search(result: Minimized, script: str, ran: FoundCase, reproduces: bool) -> Iterator[str]:
    yield paragraph(f"{result.case.owner}: {result.case.signature}")
    yield ""
    titles = ("ops", "parameters", "bytes", "lines", "bucket cap", "ranks", "steps")
    columns = [Column(""), *(Column(title, "right") for title in titles), Column("backend")]
    yield table(
        columns, [_sized("before", result.given, result.before), _sized("after", result.case, result.after)]
    )
    yield ""
    yield paragraph(repr(result.case.model), "  ")
    yield ""
    ended = "nothing smaller fails so" if result.ended else "the search was ended before nothing was left"
    yield paragraph(f"{count_of(result.tries, 'model')} tried; {ended}")
    for other, times in result.drifted.items():
        yield paragraph(f"left alone, {times} times, for it is another failure: {other}", "  ")
    given, size = result.case.setting, ""
    if ran.setting.lowers_limit != given.lowers_limit:
        size = f", at width {ran.model.width}, with torch's own limits"
    elif ran.setting.steps != given.steps:
        size = f", with {ran.setting.steps} steps"
    shows = "shows it in a fresh interpreter" if reproduces else "DOES NOT SHOW IT in a fresh interpreter"
    yield paragraph(f"{script} {shows}{size}")
