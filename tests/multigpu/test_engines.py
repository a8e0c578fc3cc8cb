"""Engines on ranks: right ones pass, each published bug is found, and FSDP's own rules hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ddpopt.cases.case import Case
from ddpopt.cases.matrix import CASES
from ddpopt.errors import PlanMismatchError
from ddpopt.judge.engines.modes import MODES, CompiledDdp
from ddpopt.judge.trials.on_rank import Request, Settings, run_trials
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import joined
from ddpopt.testing import Engine
from tests.selftest import engines
from tests.selftest.engines import REPORTED, Averaging, Reported

PLAIN = CASES[0]


def with_input_gradients(rank: int, step: int) -> Any:
    args, kwargs = PLAIN.inputs(rank, step)
    return tuple(each.requires_grad_() for each in args), kwargs


WITH_INPUT_GRADIENTS = Case("plain", PLAIN.model, with_input_gradients, PLAIN.about, PLAIN.loss)


def state_of_torch() -> tuple[Any, ...]:
    """What modes change while they run."""
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    c10d: Any = torch.distributed  # torch does not mark its re-exports
    return (
        dynamo.optimize_ddp,
        inductor.fallback_random,
        inductor._fuse_ddp_communication,
        torch.nn.parallel.DistributedDataParallel._active_ddp_module,
        "torch.nn.parallel.distributed" in torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST,
        c10d.get_debug_level(),
    )


BY_NIGHT = (
    "fully_shard", "fully_shard-blocks", "fsdp1", "replicate-fsdp", "hsdp", "ddpopt-step-coalesced",
)  # fmt: skip
"""Modes that another one by day is much like, or that tests of their own run by day."""


@pytest.mark.parametrize(
    "mode",
    [pytest.param(each, marks=pytest.mark.nightly if each.name in BY_NIGHT else ()) for each in MODES],
    ids=lambda mode: mode.name,
)
def test_every_mode_is_right_about_a_plain_model_and_leaves_torch_as_it_was(mode: Engine) -> None:
    before = state_of_torch()
    with joined() as ranks:
        request = Request(WITH_INPUT_GRADIENTS, "default", (mode.name,))
        (trial,) = run_trials(ranks, [request], Settings("aot_eager"), ())
    if "step" in mode.name and torch.__version__ < "2.13":
        assert trial.status is Status.REFUSED
        assert "expected torch >= 2.13" in trial.reason
        return
    if mode.name in ("hsdp", "accelerate", "fabric") and trial.status is Status.REFUSED:
        pytest.skip(trial.reason)
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert {"L0", "L1", "L2"} & set(trial.levels)
    names = [name for name, _ in PLAIN.model().named_parameters()]
    measured = {"the loss", "the evaluation's output", *names}
    assert measured <= {seen.parameter for seen in trial.measured}
    assert state_of_torch() == before


def judged(engine: Engine | str, option: str = "default", case: str = "plain") -> Trial:
    (found,) = [each for each in CASES if each.name == case]
    with joined() as ranks:
        (trial,) = run_trials(ranks, [Request(found, option, (engine,))], Settings("eager"), ())
    return trial


@pytest.mark.world_size(2)
@pytest.mark.parametrize("option", ["default", "accumulation", "clipping", "scaling", "adamw_fused"])
def test_a_right_engine_is_right(option: str) -> None:
    engine = Averaging("averaging", sends=lambda: {"allreduce": 4})
    trial = judged(engine, option)
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")


class Overwriting(Averaging):
    """Without reduction it keeps the last micro-batch only."""

    def backward(self, loss: Tensor) -> None:
        if not self.syncs:
            self.zero_grad()
        super().backward(loss)


class CountingTwice(Averaging):
    broadcasts_buffers = False

    def step(self, learning_rate: float) -> None:
        for buffer in self.model.buffers():
            if not buffer.is_floating_point():
                buffer.add_(1)
        super().step(learning_rate)


class Misnaming(Averaging):
    def gradients(self) -> Any:
        return {f"module.{name}": each for name, each in super().gradients().items()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("engine", "option", "case", "said"),
    [
        (Overwriting(), "accumulation", "plain", "the gradient of layers."),
        (CountingTwice(), "default", "normed", "holds different integers than in eager DDP"),
        (Misnaming(), "default", "plain", "the gradient of module.layers.0.bias is"),
        ("zero", "join", "plain", "parameter layers."),  # a joined rank updates with a gradient of its own
        (Averaging(sends=lambda: 4), "default", "plain", "expected a dict or None from sends(), got 4"),
    ],
)
def test_a_wrong_engine_is_found(engine: Engine | str, option: str, case: str, said: str) -> None:
    trial = judged(engine, option, case)
    assert any(said in finding.message for finding in trial.findings), (trial.reason, trial.findings)


def decaying(self: Engine, kind: Any, **settings: Any) -> Any:
    return kind(self.model.parameters(), **{**settings, "weight_decay": 0.5})


def forgetful(self: Engine, kind: Any, **settings: Any) -> Any:
    """An optimizer that does not load its state."""
    made = kind(self.model.parameters(), **settings)
    made.load_state_dict = lambda _: None
    return made


def deciding_alone(self: Any, kind: Any, **settings: Any) -> Any:
    """An optimizer that a GradScaler leaves out where this rank's own loss overflows, and nowhere else."""
    made = kind(self.model.parameters(), **settings)
    update, backward, made._step_supports_amp_scaling = made.step, self.backward, True

    def noting(loss: Tensor) -> None:
        made.finite = bool(loss.isfinite())
        backward(loss)

    def step(**_: Any) -> None:
        made.grad_scale = made.found_inf = None
        if made.finite:
            update()

    self.backward, made.step = noting, step
    return made


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("option", "optimizer", "said"),
    [
        ("adamw_foreach", decaying, "L0: parameter layers"),
        ("scheduled", decaying, "L0: parameter layers"),
        ("scaling", deciding_alone, "differs between ranks 0 and 1 after the step"),
        pytest.param("resumed", forgetful, "L0: parameter layers", marks=pytest.mark.nightly),
    ],
)
def test_an_optimizer_that_updates_otherwise_is_found(option: str, optimizer: Any, said: str) -> None:
    kind = type("Own", (Averaging,), {"optimizer": optimizer})
    (finding, *_) = judged(kind(option), option).findings
    assert said in f"{finding.level}: {finding.parameter} {finding.message}"


class Mismatching(CompiledDdp):
    """Says in its backward that the ranks differ."""

    def backward(self, loss: Tensor) -> None:
        raise PlanMismatchError("the ranks' steps do not communicate alike")


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("engine", "option", "status"),
    [
        (Mismatching("mismatching", ""), "unused_somewhere", Status.REFUSED),
        (Mismatching("mismatching", ""), "default", Status.WRONG),
    ],
)
def test_ranks_whose_steps_differ_are_refused_where_the_option_makes_them_differ_and_wrong_elsewhere(
    engine: Engine, option: str, status: Status
) -> None:
    trial = judged(engine, option)
    said = trial.reason if status is Status.REFUSED else trial.findings[0].message
    assert trial.status is status
    assert "the ranks' steps do not communicate alike" in said


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "option", ["two_models", "adamw_fused", "hook_fp16", "unused_somewhere", "all_to_all", "join"]
)
def test_a_step_has_other_models_optimizers_hooks_and_ranks_that_differ(option: str) -> None:
    trial = judged("ddpopt-step", option)
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")


@pytest.mark.world_size(2)
def test_options_with_an_optimizer_need_an_engine_that_takes_one() -> None:
    trial = judged(Averaging("own", step=lambda learning_rate: None), "adamw_fused")
    assert trial.status is Status.REFUSED
    assert "own has a step() of its own, but no optimizer()" in trial.reason


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "reported",
    [pytest.param(each, marks=pytest.mark.nightly if at else ()) for at, each in enumerate(REPORTED)],
    ids=lambda reported: reported.report,
)
def test_each_published_bug_of_an_engine_is_found(reported: Reported) -> None:
    trial = judged(getattr(engines, reported.engine)(), reported.option, reported.case)
    found = {finding.level for finding in trial.findings}
    assert trial.status is Status.WRONG, trial.reason
    assert {*reported.found_by} <= found, trial.findings


class Scratching(Averaging):
    """A right engine that keeps a buffer of its own on the model, from its first backward on."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if not hasattr(self.model, "scratch"):
            self.model.register_buffer("scratch", torch.full((3,), float(self.group.rank())))


@pytest.mark.world_size(2)
def test_parameters_that_a_hook_steps_are_compared_with_eager_ddps_without_momentum() -> None:
    trial = judged("zero", "stepping_hook")
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")


@pytest.mark.parametrize("option", ["zero_in_place", "adamw_foreach"])
def test_gradients_and_optimizer_state_may_be_dtensors_that_each_rank_holds_whole(option: str) -> None:
    trial = judged("replicate-fsdp", option)
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")


@pytest.mark.world_size(2)
def test_a_buffer_that_an_engine_makes_for_itself_is_its_own() -> None:
    trial = judged(Scratching("scratching"))
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
