"""impose and defer on several ranks: DDP's own gradients, and the plan's buckets, at every iteration."""

import logging
from datetime import timedelta

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.deferral import defer
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import NoAnswerError, PlanMismatchError, UsageError
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from tests.support.models import arbitrary_plan, params_of, plan_of
from tests.support.training import (
    SETTINGS,
    STEPS,
    Buckets,
    Setting,
    alike,
    batch,
    build,
    raised,
    train,
    watch,
)

SOON_S = 20.0
"""On a busy machine too, but before ranks stop waiting for each other."""


def put_off(ddp: DistributedDataParallel, plan: Plan | None) -> None:
    defer(ddp, lambda: plan)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_plain_ddp_and_buckets_those_of_the_plan(ranks: Ranks, name: str) -> None:
    setting = SETTINGS[name]
    eager = build(setting, ranks)
    expected = [train(eager, setting, ranks, []) for _ in range(2)]
    outcomes = []
    for way in (impose, put_off):
        ddp = build(setting, ranks)
        first, second = (arbitrary_plan(ddp, seed) for seed in (1, 2))
        noted: list[Buckets] = []
        if way is impose:
            watch(ddp, noted)
        way(ddp, first)
        if way is put_off:
            watch(ddp, noted)
        gradients = [train(ddp, setting, ranks, noted)]
        if "static" in name:
            with pytest.raises(UsageError, match="can only be set before its first forward"):
                impose(ddp, second)
            second = first
        else:
            impose(ddp, second)  # between two iterations
        gradients.append(train(ddp, setting, ranks, noted))
        equal = [alike(ranks, *pair) for pair in zip(gradients, expected, strict=True)]
        wanted = [params_of(first)] * STEPS + [params_of(second)] * STEPS
        outcomes.append((imposed_plan(ddp) == second, all(equal), noted == wanted))
    assert outcomes == [(True, True, True)] * 2


# ------------------------------------------------------------------------------------- ranks that differ


def own_buckets_still_work(ddp: DistributedDataParallel, ranks: Ranks) -> bool:
    expected = train(build(Setting(), ranks), Setting(), ranks, [])
    return alike(ranks, train(ddp, Setting(), ranks, []), expected) and imposed_plan(ddp) is None


@pytest.mark.world_size(2)
def test_different_plans_are_an_error_on_every_rank_that_shows_the_difference(ranks: Ranks) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(ranks.device))
    w0, b0, w1, b1 = specs_from_ddp(ddp)
    buckets = [[w1, b1], [w0], [b0]] if ranks.rank == 0 else [[w1, b1], [b0, w0]]
    name, text, seconds = raised(lambda: impose(ddp, plan_of(buckets)))
    still = imposed_plan(ddp) is None
    others = ", ".join(str(rank) for rank in range(1, ranks.size))
    many = "ranks" if ranks.size > 2 else "rank"
    assert (name, still) == ("PlanMismatchError", True)
    assert seconds < SOON_S
    assert text == (
        "ddpopt.impose: the ranks' plans differ, so nothing was changed:\n"
        f"  bucket 1: rank 0: 0.weight; {many} {others}: 0.bias, 0.weight\n"
        f"  bucket 2: rank 0: 0.bias; {many} {others}: no such bucket\n"
        "Make the plan from the same model and the same arguments on every rank, or make it on one rank and "
        "send its to_json() to the others"
    )


@pytest.mark.world_size(2)
def test_a_rank_that_never_calls_impose_is_named_within_the_time_out(ranks: Ranks) -> None:
    ddp = build(Setting(), ranks)
    name, text, seconds = "", "", 0.0
    if ranks.rank != 1:
        plan = arbitrary_plan(ddp, 1)
        name, text, seconds = raised(lambda: impose(ddp, plan, timeout=timedelta(seconds=1)))
    works = own_buckets_still_work(ddp, ranks)
    # A later call is not confused by the one that failed.
    later = raised(lambda: impose(ddp, plan, timeout=timedelta(seconds=1)))[0] if name else "not called"
    assert works
    if ranks.rank != 1:
        assert name == NoAnswerError.__name__
        assert text == (
            f"ddpopt.impose: no answer from rank 1 of {ranks.size} within 1 s. Every rank of the process "
            "group must make this call: check the missing rank's log for what stopped it, or allow more "
            "time with timeout="
        )
        assert 1 <= seconds < SOON_S
    assert later in {"NoAnswerError", "not called"}


@pytest.mark.world_size(2)
def test_ranks_that_differ_use_the_plan_of_the_lowest(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpopt")
    expected = train(build(Setting(), ranks), Setting(), ranks, [])
    ddp = build(Setting(), ranks)
    plans = [None, *(arbitrary_plan(ddp, seed) for seed in range(1, ranks.size))]
    for lowest in (0, 1):
        ddp = build(Setting(), ranks)
        seen: list[Buckets] = []
        watch(ddp, seen)
        own = plans[ranks.rank] if lowest else arbitrary_plan(ddp, 20 + ranks.rank)
        wanted = plans[1] if lowest else arbitrary_plan(ddp, 20)
        put_off(ddp, own)
        gradients = train(ddp, Setting(), ranks, seen)
        assert wanted is not None
        assert alike(ranks, gradients, expected)
        assert seen == [params_of(wanted)] * STEPS
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("ddpopt")]
    assert [text.partition("\n")[0] for text in texts] == [
        "ddpopt: the ranks' plans differ; all ranks use that of rank 0:",
        "ddpopt: the ranks' plans differ; all ranks use that of rank 1:",
    ]


@pytest.mark.world_size(2)
def test_a_decision_that_raises_on_one_rank_raises_on_all_and_leaves_ddps_own_reducer(ranks: Ranks) -> None:
    ddp = build(Setting(), ranks)
    before = ddp.reducer, ddp.logger
    plan = arbitrary_plan(ddp, 1)

    def decide() -> Plan:
        if ranks.rank == 1:
            raise ValueError("no graph")
        return plan

    defer(ddp, decide)
    name, text, seconds = raised(lambda: ddp(batch(ranks, 0)))
    after = ddp.reducer, ddp.logger
    works = own_buckets_still_work(ddp, ranks)
    assert name == ("ValueError" if ranks.rank == 1 else PlanMismatchError.__name__)
    assert ("rank 1: ValueError: no graph" in text) == (ranks.rank != 1)
    assert after == before
    assert works
    assert seconds < SOON_S
