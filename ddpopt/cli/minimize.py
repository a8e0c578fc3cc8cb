"""``ddpopt minimize``: read the arguments, search, show how it goes, write the small case and its script.

Invariant: every argument is checked before a worker starts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ddpopt.cli.fuzz import import_blocks, require_hypothesis
from ddpopt.errors import UsageError, VerificationError
from ddpopt.judge.report.passing_line import PassingLine

if TYPE_CHECKING:
    from ddpopt.fuzz.minimize import Minimized


def minimize(
    file: str, out: str | None, tries: int, minutes: float | None, limit_s: float, blocks: Sequence[str]
) -> int:
    """Make a case small, and write the script that shows it.

    Args:
        file: the case.
        out: where the script goes, with the small case beside it; by default beside the case.
        tries: how many models may be tried.
        minutes: how long the search may take; None for no limit.
        limit_s: of one model, in seconds.
        blocks: modules that register blocks.

    Returns:
        The exit code: 0 if the script shows the failure in a fresh interpreter, else 1.

    Raises:
        UsageError: the case is none, or does not fail as it says.
        VerificationError: the smallest model fails in another way in a fresh interpreter.
    """
    require_hypothesis()
    from ddpopt.fuzz.asking import Asking, confirmed, write_script
    from ddpopt.fuzz.cases import FoundCase, write_whole
    from ddpopt.fuzz.minimize import minimized
    from ddpopt.fuzz.text import minimized_text

    for name, number in (("--tries", tries), ("--minutes", minutes), ("--limit", limit_s)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{name}: expected a positive number, got {number!r}")
    import_blocks(blocks)
    case = FoundCase.read(Path(file))
    script = Path(out) if out is not None else Path(file).with_suffix(".small.py")
    if script.suffix != ".py" or not script.absolute().parent.is_dir():
        raise UsageError(f"--out: expected the name of a Python file in a folder that exists, got {out!r}")
    small = script.with_suffix(".json")
    if small.absolute() == Path(file).absolute():
        raise UsageError(f"--out: {out!r} would put the small case in place of {file!r}; name another file")
    seconds = None if minutes is None else minutes * 60
    with PassingLine(f"looking for a smaller model: {case.signature}") as progress, Asking(limit_s) as ask:
        tell = functools.partial(_tell, progress)
        result = minimized(case, ask, tries=tries, seconds=seconds, tell=tell)
    confirmed(result.case, limit_s)
    write_whole(small, result.case.to_json())
    ran, reproduces = write_script(result.case, script, limit_s)
    typer.echo(minimized_text(result, script.name, ran, reproduces))
    return 0 if reproduces else VerificationError.exit_code


def _tell(progress: PassingLine, found: Minimized) -> None:
    from ddpopt.fuzz.text import searching_line

    progress.show(lambda: searching_line(found))
