"""Workers: a model that takes its process down, or does not end, is an answer; the next one is judged."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from ddpopt.fuzz import workers
from ddpopt.fuzz.questions import WHOLE, Answer, Kind, Setting, Task
from ddpopt.fuzz.workers import PATIENCE, Worker, _Clock, _Process, _processor_s

LIMIT_S = 3.0
SOURCE = '''"""A model that does something once it is compiled.

It has a line of docstring more.
"""

import os
import signal

import torch
from torch import nn


@torch._dynamo.disable
def act():
    {act}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if torch.compiler.is_compiling():
            act()
        return self.linear(x)


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    return (torch.ones(2, 4),), {{}}


def loss(output):
    return output.square().mean()


DDP_KWARGS = {{}}
'''


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(1, LIMIT_S)
    yield made
    made.close()


def answered(worker: Worker, act: str) -> list[Answer]:
    task = Task(SOURCE.format(act=act), (), 1, (WHOLE,), Setting(steps=1))
    found = []
    for answer in worker.ask(task):
        if answer is None:
            time.sleep(0.01)
        else:
            found.append(answer)
    return found


def test_a_model_that_does_not_end_is_ended_and_told_with_its_stacks(worker: Worker) -> None:
    assert [one.kind for one in answered(worker, "pass")] == [Kind.OK]
    before = worker.deaths
    (answer,) = answered(worker, "while True: pass")
    assert (answer.kind, str(answer.signature)) == (Kind.BACKEND, "no end: within its limit")
    assert "in act" in answer.detail
    assert worker.deaths == before + 1


def test_a_model_that_takes_the_process_down_is_told_by_signal_and_frame(worker: Worker) -> None:
    (answer,) = answered(worker, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert (answer.kind, str(answer.signature)) == (Kind.BACKEND, "death: SIGSEGV in the model in act")


def test_what_a_model_leaves_broken_is_not_held_against_the_next_one(worker: Worker) -> None:
    answered(worker, "nn.Linear.forward = None")
    assert [one.kind for one in answered(worker, "pass")] == [Kind.OK]


# ------------------------------------------------------------------------------------------------- the clock


class Times:
    """In the place of both clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.busy = 100.0, {1: 3.0, 2: 5.0}
        monkeypatch.setattr("ddpopt.fuzz.workers.time.monotonic", lambda: self.wall)
        monkeypatch.setattr(workers, "_processor_s", lambda pid: self.busy[pid])


class Numbered:
    """A process as far as a clock looks at it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def clock() -> _Clock:
    found: list[_Process] = []
    for pid in (1, 2):
        process = _Process.__new__(_Process)
        process.process = Numbered(pid)  # type: ignore[assignment]  # no more is looked at
        found.append(process)
    return _Clock(found)


def test_a_limit_counts_the_processor_of_the_busiest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    counted = clock()
    times.wall += 20
    times.busy = {1: 12.9, 2: 14.9}
    assert not counted.is_past(10.0)
    times.wall += 20
    times.busy = {1: 13.1, 2: 14.9}
    assert counted.is_past(10.0)


def test_who_waits_for_good_is_past_the_limit_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    counted = clock()
    times.wall += PATIENCE * 10 - 0.1
    assert not counted.is_past(10.0)
    times.wall += 0.6
    assert counted.is_past(10.0)


def test_the_processor_is_that_of_a_process_and_of_those_that_it_ended() -> None:
    before = _processor_s(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10**7))"], check=True)
    assert _processor_s(os.getpid()) - before >= 0.05
    assert _processor_s(2**22 + 1) == 0.0  # there is none


def test_a_worker_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    folder = tmp_path / "worker"
    folder.mkdir()
    sleeping = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    ours, _theirs = Pipe()
    worker = Worker(1, LIMIT_S, _folder=folder)
    worker._processes.append(_Process(sleeping, ours, folder / "log"))
    worker.close()
    assert sleeping.returncode == -signal.SIGKILL
    assert not folder.exists()
