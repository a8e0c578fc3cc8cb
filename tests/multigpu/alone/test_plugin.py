"""The plugin in a user's suite: a rank that fails, stalls or dies fails its test, and leaves nothing behind.

Each suite stands in a folder of its own, and runs as its user would run it: under plain pytest, under xdist,
and under torchrun.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from ddpopt.ranks.environment import environment_of_no_rank
from ddpopt.ranks.marked import marked

pytestmark = pytest.mark.timeout(240)

REPOSITORY = Path(__file__).parents[3]
RUN_KEY = "DDPOPT_TEST_RUN"
# Nothing here may hang: this limit is far above those of the samples.
RUN_LIMIT_S = 200.0
GONE_LIMIT_S = 60.0
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
DIFFERENT = """
import os

import pytest

@pytest.mark.parametrize("name", ["same", os.environ.get("RANK", "no rank")])
@pytest.mark.world_size(2)
def test_named(name): pass
"""
PLAIN = ("pytest",)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pytest")


class Suite:
    """A user's suite, and the processes of its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{RUN_KEY}={uuid4().hex}"
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")

    def write(self, text: str, name: str = "test_samples.py") -> None:
        (self.folder / name).write_text(text)

    def start(self, launcher: Sequence[str], *args: str) -> "subprocess.Popen[str]":
        name, _, value = self.mark.partition("=")
        environment = environment_of_no_rank() | {name: value, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "-p", "no:cacheprovider", "-rA", *args],
            cwd=self.folder,
            env=environment | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, launcher: Sequence[str], *args: str) -> tuple[int, str]:
        """The exit code and everything that was written."""
        process = self.start(launcher, *args)
        text, _ = process.communicate(timeout=RUN_LIMIT_S)
        assert marked(self.mark) == []
        return process.returncode, text


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    made = Suite(tmp_path)
    yield made
    wait_until(lambda: not marked(made.mark))


def wait_until(sign: Callable[[], bool], limit_s: float = GONE_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not sign():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def outcomes(text: str) -> list[str]:
    lines = (line.split(" - ")[0] for line in text.splitlines())
    shown = [line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR test"))]
    return sorted(line.replace("test_samples.py::test_", "") for line in shown)


def test_plain_pytest_reports_each_test_and_survives_every_kind_of_failure(suite: Suite) -> None:
    suite.write(SAMPLES)
    code, text = suite.run(PLAIN)
    assert outcomes(text) == [
        "ERROR one_rank_fails_in_a_fixture",
        "FAILED one_rank_fails",
        "FAILED one_rank_fails_and_its_peer_waits_for_it",
        "FAILED one_rank_is_killed",
        "FAILED one_rank_stalls",
        "PASSED a_group_without_the_fixture",
        "PASSED after",
        "PASSED gather",
        "PASSED sum",
    ], text
    failures, _, _ = text.partition("short test summary info")  # which repeats them in full where CI is set
    assert failures.count("[rank 1] call failed:\ntest_samples.py") == 2, text
    assert "[rank 1] setup failed:" in text
    assert "only rank 1 says this" in text
    assert "this rank exceeded its time limit; it wrote:" in text
    assert "in sleep_here" in text
    assert "/pluggy/" not in text
    assert "this rank died of SIGKILL; it wrote:\nlast words" in text
    assert code == 1


def test_under_torchrun_a_failure_is_shown_by_rank_zero_and_the_run_goes_on_until_a_rank_dies(
    suite: Suite,
) -> None:
    suite.write(SAMPLES)
    code, text = suite.run(TORCHRUN, "-k", "sum or fails or gather or killed or after")
    assert outcomes(text) == [
        "ERROR one_rank_fails_in_a_fixture",
        "FAILED one_rank_fails",
        "FAILED one_rank_fails_and_its_peer_waits_for_it",
        "FAILED one_rank_is_killed",
        "PASSED gather",
        "PASSED sum",
    ], text
    assert "[rank 1] setup failed:" in text, text
    assert "only rank 1 says this" in text
    assert "[rank 1] call failed:\nthis rank sent no report: it died or was terminated" in text
    assert "a rank was lost; the tests after this one were not run" in text
    assert "in sleep_here" not in text
    assert code != 0


@pytest.mark.nightly
def test_under_torchrun_a_rank_that_stalls_ends_the_run_and_says_where_it_was(suite: Suite) -> None:
    suite.write(SAMPLES)
    code, text = suite.run(TORCHRUN, "-k", "stalls or after")
    assert "[rank 1] call failed:\nthis rank sent no report: it died or was terminated" in text, text
    assert "in sleep_here" in text
    assert "a rank was lost; the tests after this one were not run" in text
    assert outcomes(text) == ["FAILED one_rank_stalls"]
    assert code != 0


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [PLAIN, TORCHRUN], ids=["plain", "torchrun"])
def test_no_test_runs_where_the_ranks_collected_different_ones(
    suite: Suite, launcher: tuple[str, ...]
) -> None:
    suite.write(DIFFERENT)
    code, text = suite.run(launcher)
    difference = (
        "the ranks collected different tests:\n"
        "  rank 1 lacks 1 of rank 0's 2 tests: test_samples.py::test_named[0]\n"
        "  rank 1 has 1 that rank 0 lacks: test_samples.py::test_named[1]\n"
    )
    assert text.count(difference) >= 2, text  # plain: for each test; torchrun: by each rank
    assert "PASSED" not in text
    assert code != 0
