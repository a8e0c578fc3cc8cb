"""The text of a fuzzing campaign: what was judged, what failed, and which features were covered."""

from collections.abc import Iterator

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.journal import Summary
from ddpopt.fuzz.minimize import Minimized
from ddpopt.judge.report.wording import count_of
from ddpopt.terminal.tables import Column, Noted, numbers, paragraph, table


def fuzz_lines(summary: Summary, cases: str, known_features: frozenset[str]) -> Iterator[str]:
    """Write the results of a campaign.

    Args:
        summary: summary of the campaign.
        cases: the folder with the failures.
        known_features: all features that could have been drawn.

    Yields:
        Pieces of text, of at most 80 columns.
    """
    plan = summary.plan
    yield paragraph(
        f"{count_of(summary.models, 'model')} in {summary.seconds:.0f} s ({summary.rate:.2f} a second): "
        f"backend {plan.backend}, {count_of(plan.nproc, 'rank')}, seed {plan.seed}"
    )
    yield ""
    kinds = list(dict.fromkeys(kind for counts in summary.kinds.values() for kind in counts))
    rows = [(mode, *(counts.get(kind, "-") for kind in kinds)) for mode, counts in summary.kinds.items()]
    yield table([Column("mode"), *numbers(*kinds)], rows)
    yield ""
    if summary.failures:
        found = [(Noted(one.signature, one.owner), one.times, one.first) for one in summary.failures]
        yield table([Column("failure"), *numbers("models", "first")], found)
        yield ""
    for what, times in summary.refused.items():
        yield paragraph(f"not judged, {times} times: {what}", "  ")
    missing = sorted(known_features - set(summary.features) - set(plan.without))
    seen = f"{len(known_features & set(summary.features))} of {len(known_features)} features covered"
    yield paragraph(f"{seen}; not yet: {', '.join(missing)}" if missing else seen, "  ")
    for reason in summary.unjudged:
        yield paragraph(f"NOT JUDGED: {reason}", "  ")
    kept = f"; cases and scripts in {cases}" if summary.failures else ""
    yield paragraph(f"{_failures(summary)}{kept}")


def _failures(summary: Summary) -> str:
    others = len(summary.failures) - summary.distinct
    more = f", {others} in the backend alone" if others else ""
    return f"{count_of(summary.distinct, 'distinct failure')}{more}"


def progress_line(summary: Summary, features: int) -> str:
    """The progress of a campaign, in one line."""
    return (
        f"{summary.models} models, {summary.rate:.2f} a second, "
        f"{len(summary.features)} of {features} features, {_failures(summary)}"
    )


def minimized_lines(result: Minimized, script: str, ran: FoundCase, reproduces: bool | None) -> Iterator[str]:
    """Write the result of a search for a small model.

    Args:
        result: result of the search.
        script: name of the script.
        ran: the case that the script runs.
        reproduces: whether the script showed the failure in a fresh interpreter; None if it did not end.

    Yields:
        Pieces of text, of at most 80 columns.
    """
    yield paragraph(f"{result.case.owner}: {result.case.signature}")
    yield ""
    sizes = numbers("parameters", "lines", "bucket cap", "ranks", "steps")
    columns = [Column(""), *sizes, Column("backend")]
    yield table(columns, [_sized("before", result.given), _sized("after", result.case)])
    yield ""
    yield paragraph(repr(result.case.model), "  ")
    yield ""
    ended = "no smaller failure was found" if result.ended else "the search ran out of tries or time"
    yield paragraph(f"{count_of(result.tries, 'model')} tried; {ended}")
    given = result.case.setting
    how = ""
    if ran.setting.lowers_limit != given.lowers_limit:
        how = f", at width {ran.model.width}, with torch's own limits"
    elif ran.setting.steps != given.steps:
        how = f", with {ran.setting.steps} steps"
    shows = "reproduces the failure" if reproduces else "DOES NOT REPRODUCE the failure"
    if reproduces is None:
        shows = "did not end in its time limit (--timeout)"
    yield paragraph(f"{script} {shows} in a fresh interpreter{how}")


def _sized(name: str, case: FoundCase) -> tuple[str | int, ...]:
    model = case.model
    setting = case.setting
    parameters = sum(each.numel() for each in model.program.model().parameters())
    lines = len(model.source.splitlines())
    return (name, parameters, lines, model.cap_bytes, setting.nproc, setting.steps, setting.backend)
