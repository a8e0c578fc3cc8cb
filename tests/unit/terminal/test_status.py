"""How ddpopt fuzz and ddpopt minimize show progress."""

import sys

import pytest

from ddpopt.terminal.status import status_line

SHOWN: dict[str, tuple[dict[str, str], str, str]] = {
    "no terminal": ({"FORCE_COLOR": "1"}, "ddpopt: at 10 [not markup]\nfound\n", "\x1b["),
    "another rank": ({"RANK": "1"}, "", "ddpopt"),
    "colors": ({"TERM": "xterm", "COLUMNS": "80"}, "\x1b[32m", "\\[not markup]"),
    "no colors": ({"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}, "[not markup]", "\x1b[32m"),
}


@pytest.mark.parametrize("where", SHOWN)
def test_progress_is_shown_on_stderr_and_without_colors_where_nobody_wants_them(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, holds, lacks = SHOWN[where]
    for name in ("RANK", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: "TERM" in variables)
    with status_line("first") as show:
        show("at 10 [not markup]")
        show("at 11 [not markup]")  # of the same phase
        sys.stderr.write("found\n")
    output = capsys.readouterr()
    assert output.out == ""
    assert "found\n" in output.err
    assert holds in output.err
    assert lacks not in output.err
