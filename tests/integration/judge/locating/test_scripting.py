"""The script that shows a difference: what it says, what it does, and what counts as showing it."""

from pathlib import Path
from typing import Any

import pytest

from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom
from ddpopt.judge.locating.scripting import script_of, shows
from tests.support import miscompiled

MODULE = miscompiled.__name__  # which registers its backends
NUMBERS = Symptom("numbers")
SHOWS = "print('the difference appears'); raise SystemExit(1)"
REACHED = "print('eager is done; compiled:', flush=True); "
KILLED = f"{REACHED}import os; os.kill(os.getpid(), 9)"


def script(stage: Stage, symptom: Symptom = NUMBERS, **more: Any) -> str:
    asked = Question(f"{MODULE}:short", "default", "whole", stage.backend, **{"steps": 1, **more})
    known = Known(segments=("graph 0, segment 5 of 8",))
    return script_of(asked, stage, symptom, known, "the backend that is wrong", Path("shown.py"), "cpu")


def test_a_script_says_what_is_wrong_and_how_to_run_it() -> None:
    text = script(Stage("local", "scaling_tanh"), Symptom("died", "SIGSEGV"))
    said = "The backend that is wrong crashes the process (SIGSEGV)."
    assert text.startswith(f'"""{said}\n\nFound by `ddpopt verify`:\n')
    assert "\ngraph 0, segment 5 of 8\n" in text
    assert "Run it with 'python shown.py'; it starts its own ranks.\n" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "'SIGSEGV' in trial.reason" in text


@pytest.mark.parametrize(
    ("stage", "question", "lines"),
    [
        (Stage("torch", "eager", 2), {"steps": 3}, ["nproc=2,", "mode='torch',", "steps=3,"]),
        (Stage("local", "eager"), {"rank": 2, "dtype": "bfloat16"}, ["nproc=3,", "dtype='bfloat16',"]),
        (
            Stage("local", f"{MODULE}:scaling_tanh"),
            {"ddp_kwargs": {"bucket_cap_mb": 0.5}},
            [f"from {MODULE} import scaling_tanh", "backend=scaling_tanh,", "{'bucket_cap_mb': 0.5}"],
        ),
    ],
)
def test_a_script_verifies_its_own_stage(stage: Stage, question: dict[str, Any], lines: list[str]) -> None:
    text = script(stage, **question)
    compile(text, "shown.py", "exec")
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize(
    ("text", "death", "shown"),
    [
        (SHOWS, "", True),
        ("raise SystemExit(1)", "", False),
        ("print('the difference appears')", "", False),
        ("import time; time.sleep(60)", "", None),
        ("raise SystemExit(7)", "exit code 7", False),  # before eager was done
        (KILLED, "SIGKILL", True),
        (KILLED, "SIGSEGV", False),
    ],
)
def test_a_script_counts_if_it_ends_as_it_should(
    tmp_path: Path, text: str, death: str, shown: bool | None
) -> None:
    (tmp_path / "shown.py").write_text(text)
    assert shows(tmp_path / "shown.py", 1, 0.5 if "sleep" in text else 30.0, death=death) is shown
