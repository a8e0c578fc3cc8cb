"""ddpopt.judge.rules.refusals: each refusal has a row, a page that says so, and a test that shows it."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

import ddpopt
from ddpopt.cases import corpus
from ddpopt.errors import UsageError
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.frameworks import Framework
from ddpopt.judge.engines.meshes import Grid
from ddpopt.judge.engines.modes import StepReplicate
from ddpopt.judge.engines.sharded import FullyShard, managed_by_block, mesh_of, require_one_dtype, required
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.failing import failure_of
from ddpopt.judge.rules.refusals import HERE, REFUSALS, Refusal, refusal_of
from ddpopt.judge.training.options import option
from ddpopt.judge.training.updating import Recipe, Updates
from ddpopt.ranks.group import Ranks
from ddpopt.step.graphs import slots_of
from ddpopt.step.wrapped import DdpReplica

ROOT = Path(__file__).parents[4]
GROUP: Any = SimpleNamespace(size=lambda: 3)
SETTINGS = {"lr": 0.1}


def own_step() -> None:
    Updates(Recipe(SGD, SETTINGS), Engine(step=lambda learning_rate: None))


def own_optimizer() -> None:
    engine = Engine(optimizer=lambda kind, **settings: object())
    Updates(Recipe(SGD, SETTINGS, schedule=ConstantLR), engine)


def resumed(ranks: Ranks) -> None:
    grid = Grid((1, 1), 0, 1)
    subject = Subject(corpus.case("tp_mlp"), option("resumed"), 3, ranks.device, grid=grid)
    bench = Bench(subject, ranks)
    bench.run(Engine(), None)
    (failure,) = bench.failures
    raise UsageError(failure.text)


def of_two_dtypes() -> None:
    require_one_dtype("zero", nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half()]))


def sparse() -> None:
    ddp = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    slots_of([DdpReplica("model", ddp)])


def without_ddp() -> None:
    engine = StepReplicate("plain")
    engine.ddp_kwargs = {"static_graph": True}
    engine.prepare(nn.Linear(2, 2), GROUP)


def without_submodule(ranks: Ranks) -> None:
    engine = FullyShard("blocks", by_block=True)
    engine.backend = "eager"
    managed_by_block(engine, nn.ParameterList([nn.Parameter(torch.ones(2))]), dist.group.WORLD)  # type: ignore[arg-type]  # it is one


PROVOKED: dict[str, Callable[[Ranks], object]] = {
    "no_sync": lambda _: Engine().no_sync(),
    "of its own": lambda _: own_step(),
    "a scheduler": lambda _: own_optimizer(),
    "the default group of": lambda _: Framework("framed").prepare(nn.Linear(2, 2), GROUP),
    "x N ranks": lambda _: FullyShard("hsdp", rows=2).managed(nn.Linear(2, 2), dist.group.WORLD),  # type: ignore[arg-type]  # it is one
    "no submodule": without_submodule,
    "rows need": lambda _: in_part_of_the_ranks(),
    "one dtype": lambda _: of_two_dtypes(),
    "no static_graph": lambda _: without_ddp(),
    "not installed": lambda _: required("a_package_that_nobody_has"),
    "resumes": resumed,
    "2.13": lambda _: on_an_old_release(),
    "sparse": lambda _: sparse(),
}
"""What raises each refusal that no other test shows, by a part of its message."""


def in_part_of_the_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group=None: 1 if group else 4)
        mesh_of(nn.Linear(2, 2), GROUP, rows=2)


def on_an_old_release() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", type(torch.__version__)("2.12.0"))
        ddpopt.train_step(lambda: None)


@pytest.mark.parametrize("words", PROVOKED)
def test_each_refusal_is_known_by_its_row(words: str, alone: Ranks) -> None:
    with pytest.raises(UsageError) as caught:
        PROVOKED[words](alone)
    row = refusal_of(str(caught.value))
    assert row is not None
    assert row.test == HERE
    assert words in str(caught.value)
    assert failure_of(0, caught.value).refused


def test_each_row_that_is_shown_here_is_provoked() -> None:
    own = [row for row in REFUSALS if row.test == HERE]
    assert len(own) == len(PROVOKED)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.pattern)
def test_each_row_has_a_page_that_says_so_and_a_test_that_exists(row: Refusal) -> None:
    page = (ROOT / "docs" / row.page).read_text(encoding="utf-8")
    file, _, name = row.test.partition("::")
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert row.words in page
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)


def test_what_an_engine_calls_unsupported_in_its_own_words_is_no_refusal() -> None:
    failure = failure_of(0, ddpopt.errors.UnsupportedError("I would rather not"))
    assert not failure.refused


def test_ranks_that_differ_are_refused_only_where_they_may() -> None:
    failure = failure_of(0, ddpopt.errors.PlanMismatchError("the ranks' steps do not communicate alike: ..."))
    assert (failure.refused, failure.if_ranks_differ) == (True, True)
    assert not failure_of(0, ddpopt.errors.PlanMismatchError("the plan does not fit the DDP module")).refused
