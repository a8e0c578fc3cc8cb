"""What counts as a reproduction, with scripts that need no torch."""

from pathlib import Path

import pytest
import torch

from ddpopt.judge.locating.reproduction import Draft, Written, shows, write

SHOWS = "print('the difference appears'); raise SystemExit(1)"
AGREES = "print('no difference')"
BREAKS = "raise RuntimeError('of its own')"
HANGS = "import time; time.sleep(60)"


def written(tmp_path: Path, *texts: str, seconds: float = 30.0) -> Written:
    drafts = [Draft(f"number {index}", text) for index, text in enumerate(texts)]
    return write(tmp_path / "shown.py", drafts, lambda: seconds)


def test_the_first_script_that_shows_it_stays(tmp_path: Path) -> None:
    assert written(tmp_path, AGREES, SHOWS, AGREES) == Written("shown.py", True, "the script runs number 1")
    assert (tmp_path / "shown.py").read_text() == SHOWS


@pytest.mark.parametrize("text", [AGREES, BREAKS, "raise SystemExit(1)", "print('the difference appears')"])
def test_a_script_that_ends_in_any_other_way_is_no_reproduction(tmp_path: Path, text: str) -> None:
    assert written(tmp_path, text) == Written("shown.py", False, "the script runs number 0")


@pytest.mark.parametrize(
    ("death", "text"),
    [("SIGKILL", "import os; os.kill(os.getpid(), 9)"), ("exit code 7", "raise SystemExit(7)")],
)
def test_a_script_that_dies_shows_it_where_dying_so_is_the_difference(
    tmp_path: Path, death: str, text: str
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(f"print('eager is done; compiled:', flush=True); {text}")
    assert shows(script, 1, 30.0, death=death)
    assert not shows(script, 1, 30.0, death="SIGSEGV")
    assert not shows(script, 1, 30.0)
    script.write_text(text)
    assert not shows(script, 1, 30.0, death=death)


def test_what_torchrun_gave_this_process_is_kept_from_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    script = tmp_path / "alone.py"
    unwanted = (
        "[n for n in os.environ if n in ('RANK', 'MASTER_ADDR') or n.startswith(('LOCAL_', 'TORCHEL'))]"
    )
    script.write_text(f"import os; assert not {unwanted}; {SHOWS}")
    assert shows(script, 1, 30.0)


def test_a_script_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    assert not shows(script, 1, 0.5)


def test_without_time_the_first_script_is_written_and_not_run(tmp_path: Path) -> None:
    found = written(tmp_path, SHOWS, seconds=0.0)
    assert found == Written("shown.py", False, "the script runs number 0; no time was left to run it")
    assert (tmp_path / "shown.py").read_text() == SHOWS


def test_tensors_lie_beside_the_script_as_long_as_it_reads_them(tmp_path: Path) -> None:
    script, beside = tmp_path / "shown.py", tmp_path / "shown.pt"
    saved = Draft("a segment", SHOWS, {"input x": torch.ones(2)})
    assert write(script, [saved], lambda: 30.0).note.endswith(
        "it reads what it needs from the file next to it"
    )
    assert torch.equal(torch.load(beside)["input x"], torch.ones(2))
    write(script, [Draft("another", SHOWS)], lambda: 30.0)
    assert not beside.exists()
