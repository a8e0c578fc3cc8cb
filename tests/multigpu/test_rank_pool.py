"""The machinery under this folder's tests: a rank that fails, stalls or dies fails its test and nothing else.

Each claim is tried on a small folder of its own, with ranks that plain pytest starts and with torchrun's.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multigpu.rank_pool import environment_of_no_rank

pytestmark = [pytest.mark.one_process, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[2]
SAMPLES = """
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.multigpu.ranks import Ranks


def test_sum(ranks: Ranks) -> None:
    ones = torch.ones(1, device=ranks.device)
    dist.all_reduce(ones)
    assert ones.item() == ranks.size == int(os.environ["EXPECTED_RANKS"])


def test_one_rank_fails(ranks: Ranks) -> None:
    assert ranks.rank != 1, "only rank 1 says this"


def test_one_rank_fails_and_its_peer_waits_for_it(ranks: Ranks) -> None:
    assert ranks.rank != 1, "only rank 1 says this"
    dist.barrier()


@pytest.fixture
def broken(ranks: Ranks) -> None:
    assert ranks.rank != 1, "only rank 1 says this"


@pytest.mark.usefixtures("broken")
def test_one_rank_fails_in_a_fixture() -> None:
    dist.barrier()


def test_gather(ranks: Ranks) -> None:
    assert ranks.gather(ranks.rank) == list(range(ranks.size))


@pytest.mark.timeout(3)
def test_one_rank_stalls(ranks: Ranks) -> None:
    def sleep_here() -> None:
        time.sleep(1000)

    if ranks.rank == 1:
        sleep_here()


def test_one_rank_dies(ranks: Ranks) -> None:
    if ranks.rank == 1:
        print("last words", flush=True)
        os._exit(9)
    dist.barrier()


def test_after(ranks: Ranks) -> None:
    dist.barrier()


@pytest.mark.world_size(3)
def test_needs_three(ranks: Ranks) -> None:
    assert ranks.gather(1) == [1] * ranks.size
    assert ranks.size >= 3


@pytest.mark.skip(reason="not today")
def test_skipped(ranks: Ranks) -> None:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project of its own, whose tests run on ranks as those of this folder do."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_samples.py").write_text(SAMPLES)
    return tmp_path


def run(folder: Path, launcher: Sequence[str], tests: str, ranks: int = 2) -> tuple[int, str]:
    """The exit code and everything that was written."""
    environment = environment_of_no_rank()
    environment |= {"PYTHONPATH": str(REPOSITORY), "EXPECTED_RANKS": str(ranks), "OMP_NUM_THREADS": "1"}
    environment |= {"DDPOPT_NPROC": str(ranks)}
    command = [sys.executable, "-m", *launcher, "-p", "no:cacheprovider", "-rA", "-k", tests, str(folder)]
    # Nothing here may hang: this limit is far above those of the samples.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


PLAIN = ("pytest",)


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "pytest")


def test_plain_pytest_reports_each_test_and_survives_every_kind_of_failure(folder: Path) -> None:
    code, text = run(folder, PLAIN, "not three")
    outcomes = sorted(
        line.split(" - ")[0].replace("test_samples.py::test_", "")
        for line in text.splitlines()
        if line.startswith(("PASSED", "FAILED", "ERROR"))
    )
    assert outcomes == [
        "ERROR one_rank_fails_in_a_fixture",
        "FAILED one_rank_dies",
        "FAILED one_rank_fails",
        "FAILED one_rank_fails_and_its_peer_waits_for_it",
        "FAILED one_rank_stalls",
        "PASSED after",
        "PASSED gather",
        "PASSED sum",
    ], text
    assert "SKIPPED [1] test_samples.py" in text
    failures, _, _ = text.partition("short test summary info")  # which repeats them in full where CI is set
    assert failures.count("[rank 1] call failed:\ntest_samples.py") == 2, text
    assert "[rank 1] setup failed:" in text
    assert "only rank 1 says this" in text
    assert "no report within 3 s" in text
    assert "in sleep_here" in text
    assert "last words" in text
    assert code == 1


def test_under_torchrun_a_failure_on_one_rank_is_shown_by_rank_zero_and_the_run_goes_on(folder: Path) -> None:
    code, text = run(folder, torchrun(2), "sum or fails or gather")
    failed = {line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))}
    assert failed == {
        "FAILED test_samples.py::test_one_rank_fails",
        "FAILED test_samples.py::test_one_rank_fails_and_its_peer_waits_for_it",
        "ERROR test_samples.py::test_one_rank_fails_in_a_fixture",
    }, text
    passed = [line for line in text.splitlines() if line.startswith("PASSED")]
    assert passed == ["PASSED test_samples.py::test_sum", "PASSED test_samples.py::test_gather"], text
    assert "[rank 1] call failed:" in text, text
    assert "only rank 1 says this" in text
    assert code == 1


def test_under_torchrun_a_rank_that_stalls_ends_the_run_and_shows_where_it_was(folder: Path) -> None:
    code, text = run(folder, torchrun(2), "stalls")
    assert "in sleep_here" in text, text
    assert code != 0


def test_torchrun_decides_how_many_ranks_there_are(folder: Path) -> None:
    code, text = run(folder, torchrun(3), "sum or gather or three", ranks=3)
    assert code == 0, text
    assert text.count("3 passed") == 1, text


def test_an_xdist_worker_starts_as_many_ranks_as_a_test_needs(folder: Path) -> None:
    code, text = run(folder, (*PLAIN, "-n", "1"), "gather or three")
    assert code == 0, text
    assert "2 passed" in text, text
