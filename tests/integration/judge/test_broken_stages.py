"""Each stage of the judge is broken in turn: no verdict may then be right, refused or not possible."""

import json
from pathlib import Path

import pytest

from ddpopt.judge.verdict import Status
from tests.support.commands import python

TARGET = """
import os
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import ddpopt

STAGE = os.environ["STAGE"]
IS_RANK = "RANK" in os.environ
# a fault of the judge is raised in its own code
FILE = str(Path(ddpopt.__file__).parent / "judge" / "training" / "record.py")
exec(compile("def fails(*_, **__): raise KeyError('this stage is broken')", FILE, "exec"))


PLACES = {
    "engine": "ddpopt.judge.engines.engine.Engine.gradients",
    "engine's state": "ddpopt.judge.engines.engine.Engine.state",
    "trainer": "ddpopt.judge.training.train.record_training_step",
    "evaluation": "ddpopt.judge.training.train.evaluate",
    "sight": "ddpopt.judge.training.visible.Sight.after_step",
    "record": "ddpopt.judge.training.train.RecordedStep",
    "observation": "ddpopt.observation.observe.Observation.__exit__",
    "reference": "ddpopt.judge.rules.reference.Reference.__init__",
    "peers": "ddpopt.judge.rules.bench.peer_of",
    "ladder": "ddpopt.judge.rules.ladder.Ladder.climb",
    "structure": "ddpopt.judge.trials.judge.structure",
    "collectives": "ddpopt.judge.rules.collectives._bucketless",
    "report": "ddpopt.judge.report.text._title",
    "rank's trial": "ddpopt.judge.trials.on_rank.Bench",
    "rank exit": "ddpopt.ranks.group.dist.destroy_process_group",
}
if STAGE in PLACES and (IS_RANK or STAGE == "report"):
    patch(PLACES[STAGE], fails).start()
if STAGE == "rank start" and IS_RANK:
    fails()
if STAGE == "rank death" and IS_RANK:
    patch("ddpopt.judge.rules.ladder.Ladder.climb", lambda *_: os._exit(7)).start()


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(4, 8)
"""
STAGES = (
    "engine", "engine's state", "trainer", "evaluation", "sight", "record", "observation", "reference",
    "peers", "ladder", "structure", "collectives", "report", "rank start", "rank's trial", "rank exit",
    "rank death",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    (folder / "staged.py").write_text(TARGET)
    return folder


BY_DAY = ("reference",)


@pytest.mark.parametrize(
    "stage", [pytest.param(each, marks=() if each in BY_DAY else pytest.mark.nightly) for each in STAGES]
)
def test_a_stage_that_fails_is_never_taken_for_a_judgement(stage: str, folder: Path) -> None:
    words = (
        "verify",
        "staged:make",
        "--json",
        "out.json",
        "--no-locate",
        "--backend",
        "eager",
        "--timeout",
        "60",
    )
    (folder / "out.json").unlink(missing_ok=True)
    done = python("-m", "ddpopt", *words, folder=folder, STAGE=stage)
    assert done.returncode in (1, 3), done.stdout + done.stderr
    if (folder / "out.json").exists():
        (trial,) = json.loads((folder / "out.json").read_text())["trials"]
        assert trial["status"] in (Status.WRONG, Status.BROKEN)


@pytest.mark.nightly
def test_a_target_without_a_broken_stage_is_right(folder: Path) -> None:
    words = ("verify", "staged:make", "--no-locate", "--backend", "eager")
    assert python("-m", "ddpopt", *words, folder=folder, STAGE="").returncode == 0
