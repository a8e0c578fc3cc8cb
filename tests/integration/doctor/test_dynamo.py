"""What Dynamo writes down while it compiles, and that reading it leaves no trace."""

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

import ddpopt.dynamo.backend
from ddpopt.cases.case import Case
from ddpopt.cases.corpus import scalars
from ddpopt.doctor.dynamo import is_machinery, taking_notes
from ddpopt.doctor.mode_run import EAGER, OURS, TORCH, run_mode


def halves(x: torch.Tensor, count: int) -> torch.Tensor:
    x = x * count
    torch._dynamo.graph_break()
    return x / 2


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_frames_of_ddp_are_told_from_those_of_a_model() -> None:
    assert is_machinery(str(torch.nn.parallel.distributed.__file__))
    assert is_machinery(str(ddpopt.dynamo.backend.__file__))
    assert not is_machinery(str(torch.nn.modules.linear.__file__))
    assert not is_machinery(str(scalars.__file__))
    assert not is_machinery(__file__)


def test_notes_leave_dynamo_as_it_was() -> None:
    utils = torch._dynamo.utils
    utils.counters["mine"]["kept"] = 3
    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(print)
    before = {name: copy.deepcopy(getattr(utils, name)) for name in ("counters", "compilation_time_metrics")}
    metrics = utils._compilation_metrics
    try:
        with taking_notes():
            assert "mine" not in utils.counters
            torch.compile(halves, backend="eager")(leaf(), 1)
            assert utils.get_compilation_metrics()
        assert {name: getattr(utils, name) for name in before} == before
        assert utils._compilation_metrics is metrics
        assert handler.start_callbacks[-1] is print
    finally:
        del utils.counters["mine"]
        handler.remove_start_callback(print)


def test_notes_are_taken_and_state_is_restored_after_an_error() -> None:
    metrics = torch._dynamo.utils._compilation_metrics

    class ExpectedError(Exception):
        pass

    def fail(*_: object) -> Callable[..., Any]:
        raise ExpectedError

    with pytest.raises(BackendCompilerFailed, match="ExpectedError"), taking_notes() as notes:
        torch.compile(halves, backend=fail)(leaf(), 1)
    assert [frame.function for frame in notes.frames] == ["halves"]
    assert torch._dynamo.utils._compilation_metrics is metrics


def fails_in_step_1() -> Case:
    return Case(
        name="fails",
        model=lambda: nn.Linear(4, 4),
        inputs=lambda rank, step: ((torch.ones(2, 4 + step),), {}),
        about="its second input does not fit",
    )


@pytest.mark.parametrize("mode", [EAGER, TORCH, OURS])
def test_a_trial_that_fails_says_where_and_leaves_nothing_behind(mode: str, one_rank_group: None) -> None:
    logger = ddpopt.dynamo.backend.logger
    logged = logger.level, logger.propagate, list(logger.handlers), logging.root.level
    config = torch._dynamo.config.save_config_portable()
    state, filters = torch.get_rng_state(), list(warnings.filters)
    trial = run_mode(fails_in_step_1(), mode, {}, "eager", 2)
    assert (trial.failed_step, trial.buckets) == (1, ())
    cause = "shapes cannot be multiplied" if mode != OURS else "must have same reduction dim"
    assert cause in trial.failure
    assert "\n" not in trial.failure
    assert torch._dynamo.config.save_config_portable() == config
    assert (logger.level, logger.propagate, list(logger.handlers), logging.root.level) == logged
    assert torch.equal(torch.get_rng_state(), state)
    assert list(warnings.filters) == filters
    assert DistributedDataParallel._active_ddp_module is None
    assert dist.is_initialized()
