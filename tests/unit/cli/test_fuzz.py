"""ddpopt fuzz and ddpopt minimize: what they refuse before a worker starts, and how they show progress."""

import sys

import pytest

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.minimize import Minimized
from ddpopt.fuzz.questions import Setting
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.fuzz.text import searching_line
from ddpopt.judge.report.files import status_line
from ddpopt.testing.drawn import DrawnModel, step

CASE = FoundCase(
    DrawnModel(steps=(step("residual", body=(step("linear"),)),)),
    "torch",
    Setting(),
    FailureSignature("error", "KeyError", "graph.py in find"),
)


# -------------------------------------------------------------------------------------------- how it goes


def test_a_search_says_how_many_models_were_tried_and_what_is_left() -> None:
    assert searching_line(Minimized(CASE, CASE, 7)) == (
        "7 models tried, down to 2 steps at width 8, 1 rank, aot_eager"
    )


@pytest.mark.parametrize(
    ("variables", "holds", "lacks"),
    [
        ({}, "", "at"),  # no terminal
        ({"FORCE_COLOR": "1", "COLUMNS": "80"}, "\x1b[32m", "\\[not markup]"),
        ({"FORCE_COLOR": "1", "COLUMNS": "80", "NO_COLOR": "1"}, "[not markup]", "\x1b[32m"),
    ],
)
def test_a_line_is_shown_in_a_terminal_alone_on_stderr_and_without_colours_where_nobody_wants_them(
    variables: dict[str, str],
    holds: str,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with status_line("first") as show:
        show("at 10 [not markup]")
        sys.stderr.write("found\n")
    output = capsys.readouterr()
    assert output.out == ""
    assert "found\n" in output.err
    assert holds in output.err
    assert lacks not in output.err
