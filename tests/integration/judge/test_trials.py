"""ddpopt.judge.trials: what is asked for, judged in a process group."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.judge import trials as under_test
from ddpopt.judge.judging.reference import Bench, Reference
from ddpopt.judge.matrix import CASES
from ddpopt.judge.trials import Asked, Settings, run_trials
from ddpopt.ranks.group import Ranks, joined
from tests.multigpu.single import single_rank


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with single_rank(), joined() as found:
        yield found


def groups() -> int:
    c10d: Any = dist  # private: torch counts its groups nowhere else
    return len(c10d.distributed_c10d._world.pg_map)


def test_a_trial_that_raises_leaves_no_process_group_behind(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ValueError("no judgement")

    monkeypatch.setattr(under_test, "judge", failing)
    with pytest.raises(ValueError, match="no judgement"):
        run_trials(ranks, [Asked(CASES[0], "default", ("whole",))], Settings("eager", steps=1), ())
    assert groups() == 1


def test_ranks_wait_for_each_other_as_long_as_the_limit_of_a_trial_says(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def noting(bench: Bench) -> None:
        waits.append(bench.collective_limit_s)
        bench.failures = []

    monkeypatch.setattr(Reference, "make", noting)
    run_trials(ranks, [Asked(CASES[0], "default", ("whole",))], Settings("eager", trial_limit_s=1000), ())
    assert waits == [800]
