"""ddpopt.hang on real ranks: whatever keeps ranks waiting is named, also if one was killed or stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpopt.hang import diagnose, read
from ddpopt.ranks.environment import environment_of_no_rank

LIMIT_S = 60.0
JOB = """\
import os, signal, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpopt import hang


def recorded():
    # until the file of this rank has what it sent so far
    while not os.path.exists(file) or len(hang.read([file])[0].sent) < 2:
        time.sleep(0.1)


def train(kind, other):
    for step in range(2):
        dist.all_reduce(torch.ones(4))
    recorded()
    if rank == 1:
        if kind == "another size":
            dist.all_reduce(torch.ones(5))
        if kind == "another kind":
            dist.broadcast(torch.ones(4), 1)
        if kind == "another group":
            dist.all_reduce(torch.ones(4), group=other)
        if kind == "leaves":
            return
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))


kind, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
file = os.path.join(folder, f"rank_{rank}")
dist.init_process_group("gloo", timeout=timedelta(seconds=300))
other = dist.new_group([0, 1])
with hang.recording(folder, every_s=0.2):
    train(kind, other)
"""
LAST = "rank 1 has not entered it; the last before was 2, all_reduce of Float [4]"
KINDS = {
    "another kind": "rank 1 sent broadcast of Float [4]",
    "stopped": LAST,
    "killed": LAST,
    "leaves": LAST,
    "another group": "group 1, collective 1: rank 1 sent all_reduce of Float [4]",
    "another size": "",
}
"""What each kind of job says. gloo itself ends ranks that send other sizes, often before that is written."""
BY_DAY = ("another kind", "stopped")
"""The others by night."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A job of two ranks that hangs; its folder of dumps."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folder = tmp_path / "dumps"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), request.param, str(folder)],
            env=environment_of_no_rank() | where | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    yield folder
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.wait()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("job", "kind"),
    [pytest.param(k, k, marks=() if k in BY_DAY else pytest.mark.nightly) for k in KINDS],
    indirect=["job"],
)
def test_where_a_job_hangs_is_said_while_it_hangs(job: Path, kind: str) -> None:
    until = time.monotonic() + LIMIT_S
    said = ""
    while time.monotonic() < until:
        if job.is_dir() and len([*job.glob("rank_*")]) == 2:
            said = str(diagnose(read([job]), 2))
            if "collective 3: rank 0 sent all_reduce of Float [4] (train.py:" in said and KINDS[kind] in said:
                break
            if kind == "another size" and "collective 3" in said:
                break
        time.sleep(0.2)
    else:
        pytest.fail(said or f"{os.listdir(job) if job.is_dir() else 'no folder'}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("job", [pytest.param("another kind", marks=pytest.mark.nightly)], indirect=True)
def test_torchs_own_tool_opens_the_files(job: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while len([*job.glob("rank_*")]) < 2 or not all(flight.sent for flight in read([job])):
        assert time.monotonic() < until
        time.sleep(0.5)
    tool = Path(sys.executable).parent / "torchfrtrace"
    done = subprocess.run([tool, "--prefix", "rank_", job], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all_reduce" in done.stdout + done.stderr
