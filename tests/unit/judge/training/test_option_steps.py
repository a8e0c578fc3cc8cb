"""ddpopt.judge.training.option_steps and option_cases: options keep to process groups of their own."""

from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.training.options import option
from ddpopt.observation.launches import Launch, LaunchMode
from ddpopt.ranks.group import Ranks


@pytest.mark.parametrize(("name", "sent"), [("nested", "allreduce"), ("all_to_all", "all_to_all_single")])
def test_what_a_run_sends_it_sends_in_a_group_of_its_own(name: str, sent: str, alone: Ranks) -> None:
    launches: list[Launch] = []
    c10d: Any = dist  # torch does not mark its re-exports
    bench = Bench(Subject(CASES[0], option(name), 3, alone.device), alone)
    with LaunchMode(launches.append, lambda: None):
        record = bench.run(mode("eager"), None)
        bench.close()
    assert record is not None, bench.failures
    assert str(c10d.group.WORLD.group_name) not in {launch.group for launch in launches}
    assert sent in {collective.op for collective in record.collectives}
