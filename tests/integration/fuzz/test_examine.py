"""Judging one model: the cheapest look that decides, and whose failure it is."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compilers import nop
from torch.nn.parallel import DistributedDataParallel

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Outcome, Setting
from ddpopt.fuzz.signatures import ROUNDING, FailureSignature
from ddpopt.judge.judging.reference import Bench
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel, step
from tests.found import examined

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
FAILURE = FailureSignature("error", "AssertionError", "distributed.py in __init__")
# torch's optimizer takes no cap below 1 MiB
CASE = FoundCase(
    DrawnModel(width=4, cap_bytes=1), "torch", Setting("eager", steps=1, lowers_limit=False), FAILURE
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that are run, in order."""
    found: list[str] = []
    run = Bench.run

    def noted(bench: Bench, how: Any, backend: Any, **more: Any) -> Any:
        found.append(how.name)
        return run(bench, how, backend, **more)

    monkeypatch.setattr(Bench, "run", noted)
    return found


def test_a_model_that_is_right_takes_one_run_of_eager_and_one_of_the_mode(
    alone: Ranks, runs: list[str]
) -> None:
    writing = replace(CASE.model, steps=(step("decayed"),))
    (answer,) = examined(alone, writing, "ddpopt-split", setting=Setting("eager", steps=2))
    assert answer.kind is Outcome.OK
    assert runs == ["eager", "ddpopt-split"]


def test_an_exception_is_attributed_to_the_backend_alone_and_needs_no_second_run(
    alone: Ranks, runs: list[str]
) -> None:
    (answer,) = examined(alone, CASE.model, "torch", setting=CASE.setting)
    assert (answer.kind, answer.signature) == (Outcome.WRONG, FAILURE)
    assert CASE.fails_so(answer)
    assert runs == ["eager", "torch", "whole"]
    assert DistributedDataParallel._active_ddp_module is None


OPEN = (
    FailureSignature("error", "NotImplementedError", "collect_metadata_analysis.py in inner")
    if torch.__version__ >= "2.12"
    else FailureSignature("error", "RuntimeError", "eval_frame.py in compile_wrapper")
)
"""How torch's optimizer fails inside a transform."""


def test_what_torch_leaves_open_when_it_fails_inside_a_transform_fails_nothing_else(alone: Ranks) -> None:
    inside = DrawnModel((step("transformed", by="grad"),), width=4, cap_bytes=1)
    torchs, ours = examined(alone, inside, "torch", "ddpopt-split", setting=Setting("aot_eager", steps=1))
    assert torchs.signature == OPEN
    assert ours.kind is Outcome.OK


ROUNDED = DrawnModel((step("linear"),), width=16, cap_bytes=1)


def _rounded(gm: fx.GraphModule, _: object) -> Any:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.target = _product
    gm.recompile()
    return make_boxed_func(gm.forward)


def _product(left: Tensor, right: Tensor) -> Tensor:
    made = torch.mm(left, right)
    return torch.nextafter(made, made + 1)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A backend whose backward is off by a unit in the last place, where equality is asked for."""
    name = "rounds_otherwise"
    if name not in torch.compiler.list_backends():
        register_backend(aot_autograd(fw_compiler=nop, bw_compiler=_rounded), name)
    for module in ("ddpopt.fuzz.examine", "ddpopt.judge.judge"):
        monkeypatch.setattr(importlib.import_module(module), "EXACT", (name,))
    return Setting(name)


def test_a_backend_that_only_rounds_otherwise_is_one_failure_whatever_the_parameter(
    alone: Ranks, rounding: Setting
) -> None:
    for answer in examined(alone, ROUNDED, "whole", "ddpopt-inline", setting=rounding):
        assert (answer.kind, answer.signature) == (Outcome.BACKEND, ROUNDING)


def test_a_mode_that_is_wrong_beyond_the_rounding_of_its_backend_is_wrong(
    alone: Ranks, rounding: Setting
) -> None:
    # torch's optimizer changes the parameter too late; the last bits of a graph that is cut may differ
    both = replace(ROUNDED, steps=(step("decayed"), *ROUNDED.steps))
    torchs, ours = examined(alone, both, "torch", "ddpopt-split", setting=rounding)
    assert (torchs.kind, torchs.signature and torchs.signature.kind) == (Outcome.WRONG, "L0")
    assert torchs.signature != ROUNDING
    assert ours.kind is Outcome.OK
