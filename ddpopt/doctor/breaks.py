"""Graph breaks of the model: the reason, the source line, and Dynamo's hint.

DDP's own forward breaks graphs too, before the model's forward begins. Users cannot change that, so it is
left out.

Invariant: one finding for each place and reason, in order of occurrence.
"""

import linecache
import re
from collections.abc import Iterator

from ddpopt.doctor.diagnosis import Advice, Weight
from ddpopt.doctor.dynamo import Notes, is_machinery

_SECOND_REASON = re.compile(r"\n\*{3} While handling .*\*{3}\n")
_LINK = re.compile(r"https?://\S+")
_JUMP = "generic_jump "
"""Dynamo's whole message for a branch after which it continues."""
_BRANCH = """Python branches on the value of a tensor
  Hint: Compute both sides and choose with torch.where, or use torch.cond."""
_EMPTY_HINTS = ("file an issue", "report an issue", "may have been caused by an earlier", "fundamental")
"""Parts of Dynamo's hints that suggest no change of the model."""
_DIVIDED = "The model is compiled as separate graphs before and after it"
_HINT = "Hint: "
_REWRITE = "Rewrite this line without the break, or move it out of the model's forward."


def break_findings(notes: Notes) -> tuple[Advice, ...]:
    """The graph breaks of the model in one trial.

    Args:
        notes: Dynamo's records of the trial.

    Returns:
        One finding for each place: first the breaks after which Dynamo continued, then those for which it
        gave up a whole frame.
    """
    return tuple(dict.fromkeys([*_passed(notes), *_abandoned(notes)]))


def _passed(notes: Notes) -> Iterator[Advice]:
    for stop in notes.stops:
        frame = next(f for f in reversed(stop.stack) if not is_machinery(f.filename))
        yield _finding(stop.reason, frame.filename, frame.lineno or 0, _DIVIDED)


def _abandoned(notes: Notes) -> Iterator[Advice]:
    for frame in notes.frames:
        if not frame.failure or frame.is_ddps:
            continue
        file, line = frame.failed_at
        at = (file, line) if file and not is_machinery(file) else (frame.file, frame.line)
        first, *later = _SECOND_REASON.split(frame.failure)
        because = _title(later[0])[0] if later else "Dynamo cannot continue after it"
        cost = (
            f"{frame.function}(), the function that contains it, then runs in eager ({because}), and the "
            "functions it calls are compiled separately"
        )
        yield _finding(first, *at, cost)


def _title(text: str) -> list[str]:
    """Dynamo's title for a break, without its full stop, and the lines after it."""
    title, *rest = text.strip().splitlines()
    if title.startswith(_JUMP):
        title, *rest = _BRANCH.splitlines()
    return [title.strip().rstrip("."), *(line.strip() for line in rest)]


def _finding(text: str, file: str, line: int, cost: str) -> Advice:
    reason, *lines = _title(text)
    code = linecache.getline(file, line).strip()
    what = f"Graph break at {file}:{line}: {reason}. {cost}."
    hints = [line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)]
    steps = [hint for hint in hints if not any(part in hint for part in _EMPTY_HINTS)][:2] or [_REWRITE]
    links = [found[0] for each in lines if (found := _LINK.search(each))]
    steps += [f"See {links[0]}"] if links else []
    shown = f"{what} The line: {code}" if code else what
    return Advice("graph break", Weight.SLOW, shown, " ".join(steps), place=f"{file}:{line}")
