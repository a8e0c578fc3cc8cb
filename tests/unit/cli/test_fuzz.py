"""ddpopt fuzz and ddpopt minimize: what they refuse before a worker starts, and how they show progress."""

import pytest

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.minimize import Minimized
from ddpopt.fuzz.questions import Setting
from ddpopt.fuzz.signatures import Signature
from ddpopt.fuzz.text import searching_line
from ddpopt.judge.report.progress import StatusLine
from ddpopt.testing.drawn import DrawnModel, step

CASE = FoundCase(
    DrawnModel(steps=(step("residual", body=(step("linear"),)),)),
    "torch",
    Setting(),
    Signature("error", "KeyError", "graph.py in find"),
)


# -------------------------------------------------------------------------------------------- how it goes


def test_a_search_says_how_many_models_were_tried_and_what_is_left() -> None:
    assert searching_line(Minimized(CASE, CASE, 7)) == (
        "7 models tried, down to 2 steps at width 8, 1 rank, aot_eager"
    )


def test_without_a_terminal_a_line_is_written_now_and_then_and_made_only_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("ddpopt.judge.report.progress.time.monotonic", lambda: now)
    made: list[float] = []

    def line() -> str:
        made.append(now)
        return f"at {now:g} [not markup] {'x' * 100}"

    with StatusLine("at first") as shown:
        for second in range(25):
            now = float(second)
            shown.show(line)
        shown.say("found")
    assert made == [10, 20]
    output = capsys.readouterr()
    assert output.out == ""
    tail = " [not markup] " + "x" * 100
    assert output.err.splitlines() == [f"at 10{tail}", f"at 20{tail}", "found"]
