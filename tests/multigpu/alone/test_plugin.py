"""The plugin in a user's suite: a rank that fails, stalls or dies fails its test, and leaves nothing behind.

Each suite has a folder of its own, and runs as its user would run it: under plain pytest, under xdist,
and under torchrun.
"""

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from ddpopt.ranks.marked import marked
from tests.support.commands import TWO_RANKS, python

pytestmark = pytest.mark.timeout(240)

REPOSITORY = Path(__file__).parents[3]
SAMPLES = """
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)

made = []

@pytest.fixture(scope="module")
def made_once():
    made.append("made")

def test_sum(ddp_ranks, made_once):
    ones = torch.ones(1, device=ddp_ranks.device)
    dist.all_reduce(ones)
    assert ones.item() == ddp_ranks.size == 2

def test_one_rank_fails(ddp_ranks):
    assert ddp_ranks.rank != 1, "only rank 1 says this"

def test_one_rank_fails_and_its_peer_waits_for_it(ddp_ranks):
    assert ddp_ranks.rank != 1, "only rank 1 says this"
    dist.barrier()

@pytest.fixture
def broken(ddp_ranks):
    assert ddp_ranks.rank != 1, "only rank 1 says this"

@pytest.mark.usefixtures("broken")
def test_one_rank_fails_in_a_fixture():
    dist.barrier()

def test_gather(ddp_ranks, made_once):
    assert made == ["made"]
    assert ddp_ranks.gather(ddp_ranks.rank) == list(range(ddp_ranks.size))

def test_a_group_without_the_fixture():
    assert dist.get_world_size() == 2

@pytest.mark.world_size(2, timeout=2)
def test_one_rank_stalls(ddp_ranks):
    def sleep_here():
        time.sleep(1000)

    if ddp_ranks.rank == 1:
        sleep_here()

def test_one_rank_is_killed(ddp_ranks):
    if ddp_ranks.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_after(ddp_ranks):
    dist.barrier()
"""
OUTCOMES = [
    "ERROR one_rank_fails_in_a_fixture",
    "FAILED one_rank_fails",
    "FAILED one_rank_fails_and_its_peer_waits_for_it",
    "FAILED one_rank_is_killed",
    "PASSED gather",
    "PASSED sum",
]
DIFFERENT = """
import os

import pytest

@pytest.mark.parametrize("name", ["same", os.environ.get("RANK", "no rank")])
@pytest.mark.world_size(2)
def test_named(name): pass
"""
PLAIN = ("-m", "pytest")
TORCHRUN = (*TWO_RANKS, "-m", "pytest")


def run(folder: Path, suite: str, launcher: Sequence[str], *args: str) -> tuple[int, str]:
    """Run a user's suite, of which no process may stay; its exit code and everything that was written."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (folder / "test_samples.py").write_text(suite)
    mark = uuid4().hex
    words = [*launcher, "-p", "no:cacheprovider", "-rA", *args]
    done = python(*words, folder=folder, PYTHONPATH=str(REPOSITORY), DDPOPT_TEST_RUN=mark)
    assert marked(f"DDPOPT_TEST_RUN={mark}") == []
    return done.returncode, done.stdout + done.stderr


def outcomes(text: str) -> list[str]:
    lines = (line.split(" - ")[0] for line in text.splitlines())
    shown = [line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR test"))]
    return sorted(line.replace("test_samples.py::test_", "") for line in shown)


def test_plain_pytest_reports_each_test_and_survives_every_kind_of_failure(tmp_path: Path) -> None:
    code, text = run(tmp_path, SAMPLES, PLAIN)
    more = ["FAILED one_rank_stalls", "PASSED a_group_without_the_fixture", "PASSED after"]
    assert outcomes(text) == sorted([*OUTCOMES, *more]), text
    failures, _, _ = text.partition("short test summary info")  # which repeats them in full where CI is set
    assert failures.count("[rank 1] call failed:\ntest_samples.py") == 2, text
    assert "[rank 1] setup failed:" in text
    assert "only rank 1 says this" in text
    assert "this rank exceeded its time limit; it wrote:" in text
    assert "in sleep_here" in text
    assert "/pluggy/" not in text
    assert "this rank died of SIGKILL; it wrote:\nlast words" in text
    assert code == 1


def test_under_torchrun_rank_zero_shows_failures_until_a_rank_dies(tmp_path: Path) -> None:
    code, text = run(tmp_path, SAMPLES, TORCHRUN, "-k", "sum or fails or gather or killed or after")
    assert outcomes(text) == OUTCOMES, text
    assert "[rank 1] setup failed:" in text, text
    assert "only rank 1 says this" in text
    assert "[rank 1] call failed:\nthis rank sent no report: it died or was terminated" in text
    assert "a rank was lost; the tests after this one were not run" in text
    assert "in sleep_here" not in text
    assert code != 0


ALONE = """
import os

import pytest

@pytest.mark.world_size(2)
def test_both(ddp_ranks):
    assert ddp_ranks.rank == 0, "rank 1 fails in both"

def test_alone():
    assert os.environ["RANK"] == "0" or {passes}, "rank 1 fails alone"
"""


@pytest.mark.parametrize("passes", [True, False])
def test_under_torchrun_another_rank_prints_only_what_the_first_does_not_know(
    tmp_path: Path, passes: bool
) -> None:
    code, text = run(tmp_path, ALONE.format(passes=passes), TORCHRUN)
    assert text.count("short test summary info") == (1 if passes else 2), text
    assert ("[rank 1] printed:" in text, "rank 1 fails alone" in text) == (not passes, not passes)
    assert "[rank 1] call failed:" in text
    assert code == 1


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [PLAIN, TORCHRUN], ids=["plain", "torchrun"])
def test_no_test_runs_where_ranks_collected_others(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    code, text = run(tmp_path, DIFFERENT, launcher)
    difference = (
        "the ranks collected different tests:\n"
        "  rank 1 lacks 1 of rank 0's 2 tests: test_samples.py::test_named[0]\n"
        "  rank 1 has 1 that rank 0 lacks: test_samples.py::test_named[1]\n"
    )
    assert text.count(difference) >= 2, text  # plain: for each test; torchrun: by each rank
    assert "PASSED" not in text
    assert code != 0
