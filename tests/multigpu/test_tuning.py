"""Tuning on several ranks: eager DDP's gradients in every step, and one plan on all ranks."""

import contextlib
import copy
import gc
import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.ddp.fit import ddp_within
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import specs_by_id
from ddpopt.graph.artifacts import say_once
from ddpopt.planning.plan import Plan
from ddpopt.ranks import pool
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.group import Ranks
from ddpopt.tuning import comparing, online, recording
from ddpopt.tuning.comparing import WARM_UP, tuned_on
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import plan_of, tune
from tests.support import training
from tests.support.models import arbitrary_plan, params_of
from tests.support.training import (
    SETTINGS,
    UNUSED,
    Buckets,
    Setting,
    alike,
    batch,
    build,
    loss,
    raised,
    train,
    watch,
)
from tests.support.turns import at_night, in_turn

LINK = Link(1e-4, 1e-9, 0.0, 1.0, 0.0, "gloo", 2, {})
SKIPPED = {"skip_all_reduce_unused_params": True}
SLOWER = ("default", "unused somewhere", "one backward")
TUNED = ("accumulation",)
BY_NIGHT = ("one backward", "more forwards somewhere", "unused somewhere", "default")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps for each part of the tuning."""
    for key, value in {"WARM_UP": 2, "PROFILED": 2, "MEASURED": 3}.items():
        monkeypatch.setattr(online, key, value)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What is said of the tuning."""
    caplog.set_level(logging.INFO, "ddpopt")
    return lambda: [message for message in caplog.messages if "tuned" in message]


def trained(setting: Setting, times: int, ranks: Ranks, *hook: Any) -> tuple[Any, list[bool], list[Any]]:
    """A module that is tuned; whether it has DDP's gradients, and its plan, after each of some trainings."""
    eager, tuned = (build(setting, ranks) for _ in range(2))
    for each in (eager, tuned) if hook else ():
        each.register_comm_hook(*hook)
    model, equal, plans = ddpopt.compile(tuned, backend="aot_eager", buckets="auto"), [], []
    for _ in range(times):
        equal.append(alike(ranks, train(model, setting, ranks, []), train(eager, setting, ranks, [])))
        plans.append(imposed_plan(tuned))
    return model, equal, plans


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*TUNED, *(pytest.param(n, marks=pytest.mark.nightly) for n in BY_NIGHT)])
def test_gradients_are_those_of_ddp_while_a_model_is_tuned_and_after_it_went_back(
    ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    slower = name in SLOWER  # than before, beyond noise
    times = iter([(2.0, 0.5), (2.6 if slower else 2.4, 0.5)])
    setting = SETTINGS[name]
    best = plan_of(([spec] for spec in reversed(specs_by_id(build(setting, ranks)).values())), "one each")
    chosen: dict[str, Any] = {"WORTH": float("-inf"), "_centre": lambda _: next(times)}
    for key, value in {**chosen, "tune": lambda *_: best}.items():
        monkeypatch.setattr(online, key, value)
    _, equal, plans = trained(setting, 7, ranks, *((None, allreduce_hook) if name == "default" else ()))
    assert equal == [True] * 7
    assert best in plans[2:5]
    assert plans[6] == (plans[0] if slower else best)
    assert told()[0].startswith("ddpopt: tuned to 11 buckets (first 0.00 MiB, last 0.00 MiB), from ")
    end, took = ("went back to the former", "2,600.0") if slower else ("the tuned", "2,400.0")
    end += " buckets" if slower else " buckets stay"
    assert told()[1:] == [f"ddpopt: {end}: a step took {took} ms with the tuned ones, and 2,000.0 ms before"]


def unused_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return loss(ddp(batch(ranks, step), use_optional=False))


REFUSED = {
    "static graph": (SETTINGS["static graph"], "A static graph's buckets can only be set before its first"),
    "bucket view": (SETTINGS["bucket view"], "with gradient_as_bucket_view, a gradient's memory would"),
    "PowerSGD": (Setting(), "or with a state, such as PowerSGD's, cannot be held back"),
    "skipped": (Setting(unused_step, UNUSED | SKIPPED), "skip_all_reduce_unused_params skips buckets"),
    "accumulated": (Setting(training.accumulating_somewhere_step, UNUSED), "cannot change now"),
}


WITH_STATE: Any = (object(), lambda _, bucket: allreduce_hook(None, bucket))  # type: ignore[arg-type]  # torch's None is the default group


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", REFUSED)
def test_where_the_buckets_cannot_change_nothing_is_tuned_and_gradients_are_those_of_ddp(
    ranks: Ranks, name: str, told: Callable[[], list[str]]
) -> None:
    torch._dynamo.reset()  # a graph above the limit of recompiles is not planned
    setting, why = REFUSED[name]
    model, equal, plans = trained(setting, 6, ranks, *(WITH_STATE if name == "PowerSGD" else ()))
    assert (equal, plans) == ([True] * 6, plans[:1] * 6)
    [said] = told()
    assert said.startswith("ddpopt: nothing more is tuned: ")
    assert why in said
    assert copy.deepcopy(model)._compile.keywords["buckets"] == "auto"


def hooked(ddp: DistributedDataParallel, _: contextlib.ExitStack) -> None:
    ddp.register_comm_hook(None, allreduce_hook)


def renamed(ddp: DistributedDataParallel, _: contextlib.ExitStack) -> None:
    prune.identity(ddp.module.layers[0], "weight")  # type: ignore[no-untyped-call]  # of torch


def joined(ddp: DistributedDataParallel, stack: contextlib.ExitStack) -> None:
    stack.enter_context(ddp.join())


def accumulating(*_: object) -> None:
    """It begins; see `train_with`."""


def late(*_: object) -> None:
    if dist.get_rank() == 1:
        time.sleep(2.0)


def regrouped(ddp: Any, *_: object) -> None:
    """Each rank alone from now on."""
    c10d: Any = dist  # torch does not mark its re-exports
    alone = [[rank] for rank in range(dist.get_world_size())]
    ddp._update_process_group(c10d.new_subgroups_by_enumeration(alone)[0])


def replaced(ddp: Any, *_: object) -> None:
    """DDP goes on with the former parameters, which get no more gradients."""
    ddp.module.layers[0] = copy.deepcopy(ddp.module.layers[0])


def imposing(ddp: Any, *_: object) -> None:
    ddpopt.impose(ddp, plan_of([[*specs_by_id(ddp).values()]], "the user's"))


def compiling_again(ddp: Any, *_: object) -> None:
    ddpopt.compile(ddp, backend="eager", buckets="auto")
    if dist.get_rank() == 0:
        gc.collect()


EVENTS = (hooked, renamed, replaced, joined, accumulating, late, regrouped, imposing, compiling_again)
LAST = 18


def train_with(model: Any, event: Any, at: int, ranks: Ranks) -> list[Any]:
    """Train with an event before a step; rank 1 calls the DDP module itself in some steps."""
    ddp, found = ddp_within(model), list[Any]()
    with contextlib.ExitStack() as stack:
        for step in range(LAST - 2 * (event is joined and ranks.rank == 1)):
            if step == at:
                event(ddp, stack)
            if step >= at and event is accumulating:  # some parameters only here
                with ddp.no_sync():
                    training.backward(loss(model(batch(ranks, step + 100))))
            called = ddp if ranks.rank == 1 and step % 4 == 3 else model
            training.backward(loss(called(batch(ranks, step), use_optional=event is not accumulating)))
            found.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
            ddp.zero_grad()
    return found


def by_event() -> list[Any]:
    """By day every second event, at one of two steps."""
    events = [(event,) for event in EVENTS]
    return [*in_turn(events[::2], (7, 10)), *at_night(events[1::2], (7, 10))]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("event", "at"), by_event())
def test_whatever_ends_the_tuning_gradients_are_those_of_ddp_and_the_buckets_are_given_back(
    ranks: Ranks, event: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "WORTH", float("inf"))
    monkeypatch.setattr(recording, "patience", lambda _: timedelta(seconds=1))
    torch._dynamo.reset()
    unused = UNUSED if event in (accumulating, replaced) else {}
    eager, tuned = (build(Setting(arguments=unused), ranks) for _ in range(2))
    model = ddpopt.compile(tuned, backend="eager", buckets="auto")
    assert alike(ranks, train_with(model, event, at, ranks), train_with(eager, event, at, ranks))
    plan = imposed_plan(tuned)
    assert plan is not None
    assert len(plan.buckets) < len([*tuned.parameters()])


@pytest.mark.parametrize(
    "way", ["the backend alone", pytest.param("instead of torch's optimizer", marks=pytest.mark.nightly)]
)
def test_tuning_begins_however_the_backend_is_chosen(
    ranks: Ranks, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddpopt")
    torch._dynamo.reset()
    monkeypatch.setattr(online, "WORTH", float("inf"))  # no other buckets are worth a change
    setting = SETTINGS["default"]
    eager, tuned = (build(setting, ranks) for _ in range(2))
    with contextlib.ExitStack() as stack:
        backend: Any = ddpopt.DdpoptBackend("eager", buckets="auto")
        if way != "the backend alone":
            stack.enter_context(ddpopt.replacing_ddp_optimizer(buckets="auto"))
            backend = "eager"
        model = torch.compile(tuned, backend=backend)
        for _ in range(5):
            assert alike(ranks, train(model, setting, ranks, []), train(eager, setting, ranks, []))
    assert [text for text in caplog.messages if "the buckets stay" in text]


@pytest.mark.parametrize("way", ["compile", "backend"])
def test_a_module_that_lost_parameters_is_not_tuned_and_the_reason_is_said(
    ranks: Ranks, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddpopt")
    torch._dynamo.reset()
    say_once.cache_clear()
    ddp = build(Setting(arguments=UNUSED), ranks)
    ddp.module.layers[0] = copy.deepcopy(ddp.module.layers[0])
    if way == "compile":
        model = ddpopt.compile(ddp, backend="eager", buckets="auto")
    else:
        model = torch.compile(ddp, backend=ddpopt.DdpoptBackend("eager", buckets="auto"))
    training.backward(loss(model(batch(ranks, 0))))
    assert [
        text for text in caplog.messages if text.startswith("ddpopt: nothing is tuned: the module has lost")
    ]


def test_a_wrapper_is_not_changed_where_torch_compile_is_disabled(ranks: Ranks) -> None:
    wrapper = nn.Sequential(build(SETTINGS["default"], ranks))
    assert ddpopt.compile(wrapper, buckets="auto", disable=True) is wrapper
    assert "forward" not in vars(wrapper)


def test_a_plan_in_a_file_is_imposed_if_each_rank_has_it(ranks: Ranks, tmp_path: Path) -> None:
    setting = SETTINGS["default"]
    eager, ddp, other = (build(setting, ranks) for _ in range(3))
    plan = arbitrary_plan(ddp, 1)
    file = tmp_path / f"plan{ranks.rank}.json"
    file.write_text(json.dumps({**json.loads(plan.to_json()), "link": {}}))
    seen: list[Buckets] = []
    watch(ddp, seen)
    model = ddpopt.compile(ddp, backend="aot_eager", plan=file)
    equal = alike(ranks, train(model, setting, ranks, seen), train(eager, setting, ranks, []))
    assert (equal, seen) == (True, [params_of(plan)] * len(seen))
    own = {ranks.size - 1: tmp_path / "absent.json"}.get(ranks.rank, file)
    kind, said, _ = raised(lambda: ddpopt.compile(other, plan=own))
    assert kind == ("PlanMismatchError" if own is file else "UsageError")
    assert "plan: cannot read" in said
    assert imposed_plan(other) is None


def test_ranks_whose_profiles_differ_choose_one_plan(ranks: Ranks) -> None:
    specs = [*specs_by_id(build(SETTINGS["default"], ranks)).values()]
    slow = [1 + (ranks.rank + step) % ranks.size for step in range(3)]
    own = [[by * place * 1e-4 for place in range(len(specs))] for by in slow]
    ready = recording.slowest(own, dist.group.WORLD, ranks.device)
    assert ready == [ranks.size * place * 1e-4 for place in range(len(specs))]
    gradients = tuple(Gradient(spec, at) for spec, at in zip(specs, ready, strict=True))
    profile = Profile(gradients, 0.1, ready[-1], 0.0, "eager", ranks.size, {})
    plans = ranks.gather(tune(profile, LINK))
    assert plans == [plans[0]] * ranks.size


def case() -> Case:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    inputs: Any = (torch.ones(2, 8),), {}
    return Case("small", lambda: layers, lambda *_: inputs, "", ddp_kwargs={"bucket_cap_mb": 1e-5})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "strategy", ["inline", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("split", "eager"))]
)
def test_what_is_found_is_a_table_and_a_file_to_use_again(ranks: Ranks, strategy: str) -> None:
    compile = None if strategy == "eager" else partial(ddpopt.compile, backend="aot_eager")
    tuned = tuned_on(ranks, case(), strategy, compile, LINK if strategy == "split" else None)
    text = tuned.to_json()
    assert Plan.from_json(text) == tuned.chosen.plan
    assert tune(tuned.profile, tuned.link) == tuned.rows[-1].plan
    assert (Profile.from_json(text), Link.from_json(text)) == (tuned.profile, tuned.link)
    assert [row.name for row in tuned.rows] == ["DDP's default", "bucket_cap_mb=1e-05", "tuned"]
    assert [len(row.plan.buckets) for row in tuned.rows][:2] == [1, 6]
    assert ranks.gather(text) == [text] * ranks.size
    assert all(row.predicted == simulate(row.plan, tuned.profile, tuned.link) for row in tuned.rows)


def test_ranks_that_are_slow_in_different_parts_wait_for_each_other_once(ranks: Ranks) -> None:
    def slow(_: nn.Module, __: Any, output: Tensor) -> None:
        """In backward on rank 1, in forward on all others."""
        if ranks.rank == 1:
            output.register_hook(lambda _: time.sleep(0.1))  # type: ignore[no-untyped-call]  # of torch
        else:
            time.sleep(0.1)

    trainee = comparing._Trainee(ranks, case(), "eager", None)
    trainee.watch.ddp.module.register_forward_hook(slow)
    trainee.step()
    trainee.use(ranks.gather(trainee.watch.one_each())[0], holds=True)
    profile = trainee.run(trainee.watch.profiled(3, "eager"))
    assert 0.1 <= profile.forward_s + profile.backward_s + profile.update_s < 0.2


def dies_while_profiled(ranks: Ranks, folder: Path) -> None:
    calls = itertools.count()

    def loss(output: Tensor) -> Tensor:
        if next(calls) == WARM_UP + 3 and ranks.rank == 1:
            os._exit(7)
        return output.mean()

    try:
        tuned_on(ranks, replace(case(), loss=loss), "eager", None, LINK)
    except Exception as error:
        (folder / f"{ranks.rank}").write_text(type(error).__name__)
        raise


@pytest.mark.one_process
@pytest.mark.timeout(120)
def test_a_rank_that_dies_in_a_profile_ends_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", 60.0)  # so that nothing else ends them
    with pytest.raises(RanksFailed, match=r"rank 1 .*7"):
        pool.launch(dies_while_profiled, tmp_path, nproc=2, limit_s=100.0)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["RuntimeError"]
