"""One assertion for your own tests: a compiled data-parallel step computes what eager DDP computes.

Invariant: it passes on all ranks of a test, or raises the same findings on all of them.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddpopt.cases.case import Call, Case, mean_square
from ddpopt.errors import UsageError, VerificationError
from ddpopt.judge.engines.engine import Engine
from ddpopt.ranks.group import one_rank
from ddpopt.testing.needs import simulated_ranks


class DdpNotEqualError(VerificationError, AssertionError):
    """A data-parallel step differs from eager DDP; the message has every finding."""


def assert_ddp_equal(  # noqa: PLR0913  # every part of a data-parallel step
    model: nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    strategy: str = "auto",
    backend: Any = "aot_eager",
    mode: str | Engine | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    steps: int = 3,
) -> None:
    """Assert that a compiled data-parallel step of a model computes what eager DDP computes.

    In a test marked ``world_size(n)`` every rank must call it; elsewhere it makes a group of one rank. In a
    test marked ``world_size(n, simulate=True)`` its process is each of n ranks in turn.

    Args:
        model: the module itself, not wrapped in DDP; it is copied and not changed. As in DDP, all ranks start
            from the weights of rank 0.
        inputs: this rank's arguments, the same in every step: a tuple or list of positional arguments, a
            mapping of keyword arguments, or a single argument. Or a function that returns these for a step;
            on simulated ranks it is called for each, and ``torch.distributed.get_rank()`` is that rank.
        kwargs: more keyword arguments of this rank, the same in every step.
        loss: maps the model's output to a scalar; by default the mean of squares of all outputs.
        strategy: ddpopt's strategy: ``"split"``, ``"inline"`` or ``"auto"``.
        backend: the Dynamo backend: a name, or a callable ``(gm, example_inputs)``.
        mode: another way to run a data-parallel step: its name in ``ddpopt.judge.engines.modes``, or an
            `Engine`.
        ddp_kwargs: arguments for ``DistributedDataParallel``.
        steps: the number of training steps; DDP's buckets are final by the third.

    Raises:
        DdpNotEqualError: something is wrong; an ``AssertionError``, with every finding.
        UsageError: an argument cannot be used.
        InfrastructureError: nothing could be judged, because eager DDP itself fails.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not ours
    if isinstance(model, DistributedDataParallel) or not isinstance(model, nn.Module):
        raise UsageError(
            f"model: expected a module that is not wrapped in DDP, got {type(model).__name__}. Pass the "
            "module itself, and DDP's arguments as ddp_kwargs."
        )
    with warnings.catch_warnings():  # from torch, importing Inductor; a user may turn warnings into errors
        warnings.simplefilter("ignore")
        from ddpopt.judge.trials.runner import verify_here, verify_simulated  # heavy, as is Inductor
    if size := simulated_ranks.get():
        case = _simulated_case(model, inputs, kwargs, loss or mean_square, ddp_kwargs or {})
        with _trace_not_captured():
            verdict = verify_simulated(case, size, mode=mode, strategy=strategy, backend=backend, steps=steps)
        _require(verdict)
        return
    with one_rank(), _trace_not_captured():
        calls = [_call(inputs, kwargs, step) for step in range(steps)]
        case = _case(model, calls, loss or mean_square, ddp_kwargs or {})
        verdict = verify_here(case, mode=mode, strategy=strategy, backend=backend, steps=steps)
    _require(verdict)


def _require(verdict: Any) -> None:
    __tracebackhide__ = True
    try:
        verdict.require()
    except VerificationError as error:
        raise DdpNotEqualError(str(error)) from None


@contextmanager
def _trace_not_captured() -> Iterator[None]:
    """Keep torch's structured trace, thousands of lines, out of pytest's log of a test."""
    trace = logging.getLogger("torch.__trace")
    # pytest 9 also adds handlers to loggers that do not propagate, and torch then enables the trace.
    handlers = trace.handlers
    trace.handlers = [each for each in handlers if not type(each).__module__.startswith("_pytest.")]
    try:
        yield
    finally:
        trace.handlers = handlers


def _call(inputs: Any, kwargs: Mapping[str, Any] | None, step: int) -> Call:
    given = inputs(step) if callable(inputs) and not isinstance(inputs, nn.Module) else inputs
    if isinstance(given, Mapping):
        return (), {**given, **(kwargs or {})}
    return tuple(given) if isinstance(given, tuple | list) else (given,), dict(kwargs or {})


def _case(
    model: nn.Module, calls: list[Call], loss: Callable[[Any], Tensor], ddp_kwargs: Mapping[str, Any]
) -> Case:
    """Build the case; a collective, because a case contains the weights and inputs of all ranks."""
    first = copy.deepcopy(model)
    _take_weights_of_rank_zero(first)
    calls_of: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(calls_of, calls)

    def inputs(rank: int, step: int) -> Call:
        call: Call = tree_map_only(Tensor, _fresh, calls_of[rank][step])
        return call

    return Case(
        name=type(model).__name__,
        model=lambda: copy.deepcopy(first),
        inputs=inputs,
        about="given to assert_ddp_equal",
        loss=loss,
        ddp_kwargs=ddp_kwargs,
    )


def _simulated_case(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], Tensor],
    ddp_kwargs: Mapping[str, Any],
) -> Case:
    """Build the case of simulated ranks, of which each gets its inputs in its turn."""
    first = copy.deepcopy(model)

    def call(rank: int, step: int) -> Call:
        del rank  # the process is that rank
        made: Call = tree_map_only(Tensor, _fresh, _call(inputs, kwargs, step))
        return made

    name = type(model).__name__
    about = "given to assert_ddp_equal"
    return Case(name, lambda: copy.deepcopy(first), call, about, loss, ddp_kwargs)


def _take_weights_of_rank_zero(model: nn.Module) -> None:
    states: list[Any] = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states)
    model.load_state_dict(states[0])


def _fresh(tensor: Tensor) -> Tensor:
    """A copy of a tensor, so that no step sees another one's writes to an input or its gradient."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
