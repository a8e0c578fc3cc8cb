"""Write results to the terminal, and to files by their suffix.

Invariant: every file is known to be writable before anything runs, and one that cannot be written after all
keeps nothing else from being written; stdout has only results; no text can end its own block in a Markdown
page, and such a page stays far below GitHub's limit of 1 MiB.
"""

import html
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from ddpopt.errors import UsageError

STDOUT = "-"
RESULTS: ContextVar[TextIO] = ContextVar("RESULTS", default=sys.stdout)
"""Where `show` prints."""
SUFFIXES = (".xml", ".html", ".md")
SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that GitHub Actions sets to the file of a step's summary; the file has no suffix."""

SIGNS = {0: "\N{WHITE HEAVY CHECK MARK}", 1: "\N{CROSS MARK}", 3: "\N{WARNING SIGN}"}
AT_MOST = 2**18
"""Characters of the text that are shown."""


def require_writable(outputs: Iterable[tuple[str, str | None]]) -> None:
    """Check that files can be written, and no other output goes there, before minutes of work and not after.

    Args:
        outputs: each file with its option; None for none. The folder of ``--baseline`` will be made.

    Raises:
        UsageError: a file cannot be written, or is that of another option, or its suffix is not that of a
            report.
    """
    used: dict[Path, str] = {}
    for option, file in outputs:
        if file is None or (option, file) == ("--json", STDOUT):
            continue
        if option == "--report" and _suffix(file) not in SUFFIXES:
            raise UsageError(
                f"--report: expected a file name that ends in {', '.join(SUFFIXES)} (JUnit XML, an HTML "
                f"page, GitHub's Markdown), got {file!r}; for JSON use --json FILE"
            )
        path = Path(file).resolve()
        folder = path.parent
        while option == "--baseline" and not folder.exists():
            folder = folder.parent
        locked = not os.access(path if path.exists() else folder, os.W_OK)
        if not folder.is_dir() or locked or path.is_dir():
            raise UsageError(f"{option}: cannot write {file!r}; name a file in a writable folder")
        if path in used and (path.is_file() or not path.exists()):  # but /dev/null takes all
            raise UsageError(f"{option}: {file!r} is also the file of {used[path]}; name another")
        used[path] = option


def _suffix(file: str) -> str:
    return ".md" if file == os.environ.get(SUMMARY) else Path(file).suffix


def show(text: str, data: str, json: str | None, others: Sequence[Callable[[], None]] = ()) -> None:
    """Print a result, and write it as JSON and in other forms.

    Args:
        text: the result for people.
        data: the same as JSON.
        json: file for `data`; ``-`` for stdout, instead of the text; None for none.
        others: each writes another form.

    Raises:
        UsageError: something could not be written; everything else is.
    """
    with ExitStack() as outputs:  # calls all of them, the last one first
        for other in others:
            outputs.callback(other)
        if json is not None and json != STDOUT:
            outputs.callback(write, "--json", json, f"{data}\n")
        outputs.callback(_print, f"{data if json == STDOUT else text}\n")


def _print(text: str) -> None:
    out = RESULTS.get()
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:  # the reader has enough, as `head` does: Click ends quietly
        raise
    except OSError as error:
        with suppress(OSError):
            out.close()  # or the end of the process would try again
        raise UsageError(f"cannot write to stdout: {error.strerror}") from error


def write(option: str, file: str | Path, text: str, mode: str = "w") -> None:
    """Write a file, in a folder that is made if there is none.

    Args:
        option: the option that named it, for the error.
        file: the file.
        text: the text, written as UTF-8.
        mode: as for `open`.

    Raises:
        UsageError: it cannot be written; the message has the file and the reason.
    """
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise UsageError(f"{option}: cannot write {str(file)!r}: {error.strerror}; name another") from error


def write_page(file: str, page_of: Callable[[str], str]) -> None:
    """Write a report in the form that its suffix says.

    Args:
        file: the file to write. The report is appended to the file that GitHub sets for a step's summary.
        page_of: makes the text for a suffix.

    Raises:
        UsageError: it cannot be written.
    """
    page = page_of(_suffix(file))
    write("--report", file, f"{page}\n", "a" if file == os.environ.get(SUMMARY) else "w")


def step_summary(title: str, text: str, exit_code: int) -> str:
    r"""Write a report for GitHub's Markdown as HTML elements, inside which nothing is parsed as Markdown.

    Args:
        title: one line.
        text: the text that a terminal shows, of any number of lines.
        exit_code: of the command.

    Returns:
        A heading and a block, with an empty line after each: GitHub joins the summaries of several commands.

    >>> print(step_summary("WRONG: a_b", "two\nlines & more", 1), end="")
    <h2>❌ WRONG: a_b</h2>
    <BLANKLINE>
    <pre>
    two
    lines &amp; more
    </pre>
    <BLANKLINE>
    """
    shown = text if len(text) <= AT_MOST else f"{text[:AT_MOST]}\n... (the JSON has the rest)"
    heading = html.escape(" ".join(title.split()))
    block = html.escape(shown)
    return f"<h2>{SIGNS[exit_code]} {heading}</h2>\n\n<pre>\n{block}\n</pre>\n\n"
