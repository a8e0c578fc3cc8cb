"""Graph breaks of the model: the reason, the source line, and what Dynamo says to do.

DDP's own forward breaks graphs too, before the model's begins. Nobody can change that, so it is left out.

Invariant: one entry for each place and reason, in the order in which they were met.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddpopt.doctor.diagnosis import Break, Finding, Weight
from ddpopt.doctor.dynamo import Notes, is_machinery

_SECOND_REASON = re.compile(r"\n\*{3} While handling .*\*{3}\n")
_LINK = re.compile(r"https?://\S+")
_JUMP = "generic_jump "
"""All that Dynamo says of a branch after which it goes on."""
_BRANCH = """Python branches on the value of a tensor
  Hint: Compute both sides and choose by torch.where, or put the sides into torch.cond."""
_EMPTY_HINTS = ("file an issue", "report an issue", "may have been caused by an earlier", "fundamental")
"""Parts of Dynamo's hints that name nothing to do in a model."""


def find_breaks(notes: Notes) -> tuple[Break, ...]:
    """The graph breaks of the model in one trial.

    Args:
        notes: what Dynamo wrote down in it.

    Returns:
        Them; first those after which Dynamo went on, then those for which it gave a whole frame up.
    """
    return tuple(_merge([*_passed(notes), *_abandoned(notes)]))


def break_findings(breaks: Iterable[Break]) -> Iterator[Finding]:
    """One finding for each break."""
    for found in breaks:
        where = f"{found.file}:{found.line}"
        cost = (
            f"{found.abandons}(), the function around it, then runs in eager ({found.because}), and what it "
            "calls is compiled apart"
            if found.abandons
            else "The model is compiled as separate graphs before and after it"
        )
        what = f"Graph break at {where}: {found.reason}. {cost}."
        if found.code:
            what += f" The line: {found.code}"
        yield Finding("graph break", Weight.SLOW, what, _step(found))


def _step(found: Break) -> str:
    useful = [hint for hint in found.hints if not any(part in hint for part in _EMPTY_HINTS)]
    steps = useful[:2] or ["Rewrite this line without it, or move it out of the model's forward."]
    if found.link:
        steps.append(f"See {found.link}")
    return " ".join(steps)


def _passed(notes: Notes) -> Iterator[Break]:
    for stop in notes.stops:
        frame = next(f for f in reversed(stop.stack) if not is_machinery(f.filename))
        yield _break(stop.reason, frame.filename, frame.lineno or 0)


def _abandoned(notes: Notes) -> Iterator[Break]:
    for frame in notes.frames:
        if not frame.failure or frame.is_ddps:
            continue
        file, line = frame.failed_at
        at = (file, line) if file and not is_machinery(file) else (frame.file, frame.line)
        first, *later = _SECOND_REASON.split(frame.failure)
        because = _break(later[0], *at).reason if later else "Dynamo cannot go on after it"
        yield replace(_break(first, *at), abandons=frame.function, because=because)


def _break(text: str, file: str, line: int) -> Break:
    title, *rest = text.strip().splitlines()
    if title.startswith(_JUMP):
        title, *rest = _BRANCH.splitlines()
    lines = [part.strip() for part in rest]
    link = next((found[0] for part in lines if (found := _LINK.search(part))), "")
    return Break(
        reason=title.strip().rstrip("."),
        explanation=" ".join(_after("Explanation: ", lines)),
        hints=tuple(_after("Hint: ", lines)),
        link=link,
        file=file,
        line=line,
        code=linecache.getline(file, line).strip(),
    )


def _after(label: str, lines: Iterable[str]) -> list[str]:
    return [line.removeprefix(label) for line in lines if line.startswith(label)]


def _merge(breaks: Iterable[Break]) -> Iterator[Break]:
    merged: dict[tuple[str, int, str], Break] = {}
    for found in breaks:
        key = found.file, found.line, found.reason
        known = merged.get(key)
        if known is None:
            merged[key] = found
        else:
            merged[key] = replace(
                known,
                times=known.times + 1,
                abandons=known.abandons or found.abandons,
                because=known.because or found.because,
            )
    yield from merged.values()
