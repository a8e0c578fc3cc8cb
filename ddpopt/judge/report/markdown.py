"""A report as GitHub's Markdown, for the summary of a step: a heading, and the text that a terminal shows.

Invariant: nothing in the text can end its block, and a summary stays far below the 1 MiB that GitHub takes.
"""

from __future__ import annotations

import html
import re

SIGNS = {0: ":white_check_mark:", 1: ":x:", 3: ":warning:"}
AT_MOST = 2**18
"""Characters of the text that are shown."""
SPECIAL = re.compile(r"([\\`*_\[\]#|~])")


def step_summary(title: str, text: str, exit_code: int) -> str:
    r"""Write a report as GitHub's Markdown.

    Args:
        title: one line.
        text: what a terminal shows, of any number of lines.
        exit_code: of the command.

    Returns:
        A heading and a block, with an empty line after each: GitHub joins the summaries of several commands.

    >>> print(step_summary("WRONG: a_b", "two\nlines", 1), end="")
    ## :x: WRONG: a\_b
    <BLANKLINE>
    ```text
    two
    lines
    ```
    <BLANKLINE>
    """
    plain = SPECIAL.sub(r"\\\1", html.escape(" ".join(title.split()), quote=False))
    shown = text if len(text) <= AT_MOST else f"{text[:AT_MOST]}\n... (the JSON has the rest)"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"## {SIGNS[exit_code]} {plain}\n\n{fence}text\n{shown}\n{fence}\n\n"
