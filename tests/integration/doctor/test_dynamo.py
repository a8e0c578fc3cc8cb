"""What Dynamo writes down while it compiles, and that reading it leaves no trace."""

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

import ddpopt.dynamo.backend
from ddpopt.cases.case import Case
from ddpopt.doctor.dynamo import taking_notes
from ddpopt.doctor.mode_run import OURS, TORCH, run_mode


def halves(x: torch.Tensor, count: int) -> torch.Tensor:
    x = x * count
    torch._dynamo.graph_break()
    return x / 2


class ExpectedError(Exception):
    """Of a backend."""


def failing(*_: object) -> Any:
    assert "mine" not in torch._dynamo.utils.counters
    raise ExpectedError


def test_notes_leave_dynamo_as_it_was_also_after_an_error() -> None:
    utils = torch._dynamo.utils
    utils.counters["mine"]["kept"] = 3
    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(print)
    before = {name: copy.deepcopy(getattr(utils, name)) for name in ("counters", "compilation_time_metrics")}
    metrics = utils._compilation_metrics
    try:
        with pytest.raises(BackendCompilerFailed, match="ExpectedError"), taking_notes() as notes:
            torch.compile(halves, backend=failing)(torch.ones(3, requires_grad=True), 1)
        assert [frame.function for frame in notes.frames] == ["halves"]
        assert {name: getattr(utils, name) for name in before} == before
        assert utils._compilation_metrics is metrics
        assert handler.start_callbacks[-1] is print
    finally:
        del utils.counters["mine"]
        handler.remove_start_callback(print)


def fails_in_step_1() -> Case:
    return Case(
        name="fails",
        model=lambda: nn.Linear(4, 4),
        inputs=lambda rank, step: ((torch.ones(2, 4 + step),), {}),
        about="its second input does not fit",
    )


@pytest.mark.parametrize("mode", [TORCH, OURS])
def test_a_trial_that_fails_says_where_and_cleans_up(mode: str, one_rank_group: None) -> None:
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
