"""Ask workers about single cases, and write scripts that were seen to show them.

Invariant: a script counts as showing its case only if it did so in a fresh interpreter.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import STEPS, TORCH, Answer
from ddpopt.fuzz.scripting import FIRST_BUCKET_BYTES, script_of
from ddpopt.fuzz.workers import Worker
from ddpopt.judge.locating.scripting import shows as shows_in_fresh_interpreter
from ddpopt.terminal.files import write

STARTING_S = 60.0
"""Seconds for a script's interpreter to import torch; it then runs eager and the mode."""
WIDE = (512, 1024)
"""Widths at which a layer fills torch's own smallest bucket."""


def write_script(case: FoundCase, file: Path, limit_s: float) -> tuple[FoundCase, bool | None]:
    """Write the script of a case, with torch's own limits if possible, as a user would run it.

    Args:
        case: a failure.
        file: the file to write.
        limit_s: limit of one mode of one model, in seconds.

    Returns:
        The case that the script runs, and whether it showed the failure in a fresh interpreter; None if a
        run did not end in time.

    Raises:
        UsageError: the file cannot be written.
    """
    death = case.signature.what if case.signature.kind == "death" else ""
    ended = True
    with Worker(limit_s) as worker:
        for candidate in as_scripted(case):
            if candidate is not case and not candidate.fails_so(answer_of(worker, candidate)):
                continue
            write("--out", file, script_of(candidate, file.name))
            all_s = STARTING_S + 2 * limit_s
            shown = shows_in_fresh_interpreter(file, candidate.setting.nproc, all_s, death=death)
            if shown:
                return candidate, True
            ended = ended and shown is not None
    write("--out", file, script_of(case, file.name))
    return case, False if ended else None


def answer_of(worker: Worker, case: FoundCase) -> Answer:
    """Return the answer to a case."""
    return next(worker.ask(case.task))


def as_scripted(case: FoundCase) -> Iterator[FoundCase]:
    """Yield the cases that a script may run instead, the best first.

    These are the case enlarged so that torch cuts it without a changed limit, the case itself, and the case
    with more steps: verification may run a step more than once, which a script does not.
    """
    yield from unlowered(case)
    yield case
    for steps in range(case.setting.steps + 1, STEPS + 1):
        yield replace(case, setting=replace(case.setting, steps=steps))


def unlowered(case: FoundCase) -> Iterator[FoundCase]:
    """Yield the case enlarged so that torch cuts it without a changed limit, if its limit was changed."""
    if case.owner_mode != TORCH or not case.setting.lowers_limit:
        return
    for width in WIDE:
        model = replace(case.model, width=width, cap_bytes=max(case.model.cap_bytes, FIRST_BUCKET_BYTES))
        yield replace(case, model=model, setting=replace(case.setting, lowers_limit=False))
