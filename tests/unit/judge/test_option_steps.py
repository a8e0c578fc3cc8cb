"""ddpopt.judge.option_steps and option_cases: options keep to process groups of their own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Bench, Subject
from ddpopt.judge.matrix import CASES
from ddpopt.judge.modes import mode
from ddpopt.judge.option_steps import LATE
from ddpopt.judge.options import option
from ddpopt.observation.launches import Launch, LaunchMode
from ddpopt.ranks.group import Ranks, joined, one_rank


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank(), joined() as ranks:
        yield ranks


def run(name: str, ranks: Ranks, how: str = "eager", backend: str | None = None) -> Record:
    bench = Bench(Subject(CASES[0], option(name), 3, ranks.device), ranks)
    record = bench.run(mode(how), backend)
    bench.close()
    assert record is not None, bench.failures
    return record


@pytest.mark.parametrize(("name", "sent"), [("nested", "allreduce"), ("all_to_all", "all_to_all_single")])
def test_what_a_run_sends_it_sends_in_a_group_of_its_own(name: str, sent: str, ranks: Ranks) -> None:
    launches: list[Launch] = []
    c10d: Any = dist  # torch does not mark its re-exports
    with LaunchMode(launches.append, lambda: None):
        record = run(name, ranks)
    assert str(c10d.group.WORLD.group_name) not in {launch.group for launch in launches}
    assert sent in {collective.op for collective in record.collectives}


def test_the_group_that_training_went_on_with_is_given_back(ranks: Ranks) -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    run("new_group", ranks)
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_powersgd_with_a_bucket_for_each_dtype_is_refused_before_ranks_wait_for_one_another(
    ranks: Ranks,
) -> None:
    mixed = next(case for case in CASES if case.name == "mixed")
    bench = Bench(Subject(mixed, option("hook_powersgd"), 3, ranks.device), ranks)
    assert bench.run(mode("eager"), None) is None
    bench.close()
    (failure,) = bench.failures
    assert "expected gradients of one dtype, got torch.bfloat16, torch.float32" in failure.text


@pytest.mark.parametrize(("how", "backend", "late"), [("eager", None, False), ("whole", "aot_eager", True)])
def test_a_delayed_gradient_that_comes_after_its_all_reduce_is_told_from_one_that_does_not(
    how: str, backend: str | None, late: bool, ranks: Ranks
) -> None:
    record = run("delay_all_reduce", ranks, how, backend)
    assert [step.extras[LATE] for step in record.steps] == [late] * 3
