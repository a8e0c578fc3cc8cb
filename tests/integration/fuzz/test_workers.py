"""Workers: a model that takes its process down, or does not end, is an answer; the next one is judged."""

from collections.abc import Iterator

import pytest

from ddpopt.fuzz import workers
from ddpopt.fuzz.questions import WHOLE, Answer, Outcome, Setting, Task
from ddpopt.fuzz.workers import Worker
from ddpopt.ranks.failures import RankFailure, RanksFailed
from ddpopt.testing.drawn import DrawnModel, step

LIMIT_S = 5.0
ACT = """
import os
import signal


@torch._dynamo.disable
def act():
    {act}


class Model"""
"""Something that a model does once it is compiled."""


def acting(act: str) -> str:
    source = DrawnModel((step("linear"),), width=4).source.replace("class Model", ACT.format(act=act))
    forward = "def forward(self, x):\n"
    return source.replace(forward, f"{forward}        if torch.compiler.is_compiling():\n            act()\n")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(LIMIT_S) as made:
        yield made


def answered(worker: Worker, act: str) -> list[Answer]:
    task = Task(acting(act), 1, (WHOLE,), Setting(steps=1))
    return list(worker.ask(task))


# in this order a process that is lost is started again only where the next test needs one
def test_damage_that_one_model_leaves_is_not_attributed_to_the_next(worker: Worker) -> None:
    answered(worker, "nn.Linear.forward = None")
    assert [one.kind for one in answered(worker, "pass")] == [Outcome.OK]


@pytest.mark.nightly
def test_a_model_that_does_not_end_is_stopped_and_reported_with_its_stacks(worker: Worker) -> None:
    (answer,) = answered(worker, "while True: pass")
    assert (answer.kind, str(answer.signature)) == (Outcome.BACKEND, "no end: within the time limit")
    assert "in act" in answer.detail


def test_a_model_that_crashes_the_process_is_identified_by_signal_and_frame(worker: Worker) -> None:
    (answer,) = answered(worker, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert (answer.kind, str(answer.signature)) == (Outcome.BACKEND, "death: SIGSEGV in the model in act")


def test_a_failure_before_any_mode_is_no_answer() -> None:
    task = Task("", 1, (WHOLE,), Setting())
    failed = RanksFailed([RankFailure(0, "died", "starting", exit_code=1)], 1)
    with pytest.raises(RanksFailed):
        workers._lost(task, failed)
    failed = RanksFailed([RankFailure(0, "died", workers.EAGER, exit_code=1)], 1)
    assert [answer.kind for answer in workers._lost(task, failed)] == [Outcome.EAGER]
