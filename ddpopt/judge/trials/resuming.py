"""Take the remaining steps of a run in new processes, as a training that was ended and started again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.bench import CALM_LIMIT_S
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.train import train
from ddpopt.judge.training.trainer import Course, Place
from ddpopt.ranks.group import Ranks
from ddpopt.ranks.pool import launch


def resume(course: Course, engine: Engine, checkpoints: Sequence[Any], device: str) -> list[Record]:
    """Go on from a checkpoint of each rank, on new ranks of this machine.

    Args:
        course: how to train, from the first step on.
        engine: the mode.
        checkpoints: what the run left on each rank.
        device: type of the device to compute on.

    Returns:
        The record of each rank.

    Raises:
        RanksFailed: a rank failed.
    """
    task = (_resumed_on_rank, course, engine, checkpoints)
    return launch(*task, nproc=len(checkpoints), limit_s=CALM_LIMIT_S, device=device)


def _resumed_on_rank(ranks: Ranks, course: Course, engine: Engine, checkpoints: Sequence[Any]) -> Record:
    group: Any = dist.group.WORLD
    place = Place(ranks.rank, ranks.size, group, ranks.device)
    return train(replace(course, checkpoint=checkpoints[ranks.rank]), engine, place)
