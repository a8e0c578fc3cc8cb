"""ddpopt.ddp.reducer: the plan's buckets, kept, in a reducer that is otherwise DDP's own."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.reducer import PlannedReducer, install
from ddpopt.planning.bucket_rule import specs_from_ddp
from tests.multigpu.models import Tower, arbitrary_plan
from tests.multigpu.single import single_rank

c10d: Any = dist  # torch does not mark its re-exports


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield


def wrapped(**arguments: Any) -> Any:
    return DistributedDataParallel(Tower(), **arguments)


def step(ddp: Any) -> None:
    torch.autograd.backward(ddp(torch.ones(2, 6)).sum())


def planned(seed: int = 0, **arguments: Any) -> Any:
    ddp = wrapped(**arguments)
    install(ddp, arbitrary_plan(ddp, seed))
    return ddp


def members(ddp: Any) -> list[tuple[str, ...]]:
    """The buckets that the running reducer has."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets]


MODES: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("arguments", MODES)
def test_the_buckets_are_the_plans_and_stay(arguments: dict[str, Any]) -> None:
    ddp = planned(seed=1, **arguments)
    wanted = [bucket.params for bucket in arbitrary_plan(ddp, 1).buckets]
    for _ in range(5):
        assert members(ddp) == wanted
        step(ddp)
    assert not ddp._has_rebuilt_buckets


def references(module: nn.Module) -> int:
    parameters: list[Any] = list(module.parameters())
    return sum(parameter._use_count() for parameter in parameters)


@pytest.mark.parametrize("arguments", MODES)
def test_two_hundred_steps_hold_on_to_nothing(arguments: dict[str, Any]) -> None:
    ddp = planned(**arguments)
    for _ in range(5):
        step(ddp)
    before = references(ddp.module)
    for _ in range(200):
        step(ddp)
    assert references(ddp.module) == before


def test_steps_under_no_sync_hold_on_to_nothing() -> None:
    ddp = planned()
    counts = []
    for _ in range(6):
        for _ in range(3):
            with ddp.no_sync():
                step(ddp)
        step(ddp)
        counts.append(references(ddp.module))
    assert counts[1:] == counts[1:2] * 5


def test_a_backward_that_did_not_finish_is_noticed_as_in_plain_ddp() -> None:
    def message(ddp: Any) -> str:
        torch.autograd.backward(ddp(torch.ones(2, 6), use_optional=False).sum())
        with ddp.no_sync(), pytest.raises(RuntimeError) as caught:
            ddp(torch.ones(2, 6))
        return str(caught.value)

    assert message(planned()) == message(wrapped())
    assert "Expected to have finished reduction in the prior iteration" in message(planned())


def test_what_ddp_logs_is_the_same_but_for_the_buckets() -> None:
    arguments = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 3}
    ddp, plain = planned(**arguments), wrapped(**arguments)
    theirs, ours = plain._get_ddp_logging_data(), ddp._get_ddp_logging_data()
    assert ours.pop("bucket_sizes") != theirs.pop("bucket_sizes")
    assert ours == theirs


def test_options_set_after_construction_are_kept() -> None:
    ddp = wrapped(find_unused_parameters=False)
    ddp._set_static_graph()
    ddp._register_builtin_comm_hook(c10d.BuiltinCommHookType.ALLREDUCE)
    ddp.logger._set_uneven_input_join()
    before = ddp._get_ddp_logging_data()
    install(ddp, arbitrary_plan(ddp, 0))
    after = ddp._get_ddp_logging_data()
    for name in ("static_graph", "comm_hook", "join_uneven_inputs"):
        assert after[name] == before[name], name
    assert len(after) == len(before)


def test_a_second_hook_is_refused_as_in_plain_ddp() -> None:
    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        del state
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()
    ddp = wrapped()
    ddp.register_comm_hook(None, hook)
    install(ddp, arbitrary_plan(ddp, 0))
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, hook)


def test_the_old_buckets_are_gone_before_the_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = wrapped()
    old = weakref.ref(ddp.reducer)
    alive: list[bool] = []
    construct: Callable[..., None] = PlannedReducer.__init__

    def watched(self: Any, *arguments: Any) -> None:
        alive.append(old() is not None)
        construct(self, *arguments)

    monkeypatch.setattr(PlannedReducer, "__init__", watched)
    install(ddp, arbitrary_plan(ddp, 0))
    assert alive == [False]


def test_parameters_stand_in_the_reducers_own_order() -> None:
    ddp = wrapped()
    parameters, _ = ddp._build_params_for_reducer()
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    assert [names[id(p)] for p in parameters] == [spec.name for spec in specs_from_ddp(ddp)]


def test_the_private_interfaces_of_torch_that_are_written_to_exist() -> None:
    """Fails by name when torch moves one of them (2.11 to 2.13 have all)."""
    reducer = (
        "_autograd_hook _check_reducer_finalized _get_zeros_like_grad_buckets _rebuild_buckets "
        "_remove_autograd_hooks _reset_state _set_ddp_runtime_logging_sample_rate "
        "_set_forward_pass_work_handle _set_optimizer_in_backward _set_static_graph get_backward_stats "
        "prepare_for_backward prepare_for_forward set_logger"
    )
    logger = (
        "_get_ddp_logging_data _set_comm_hook_name _set_static_graph _set_uneven_input_join "
        "set_construction_data_and_log set_runtime_stats_and_log"
    )
    module = (
        "_active_ddp_module _build_debug_param_to_name_mapping _build_params_for_reducer _comm_hooks "
        "_delay_all_reduce_all_params _get_ddp_logging_data _lazy_init_ran _module_parameters "
        "_use_python_reducer bucket_bytes_cap find_unused_parameters gradient_as_bucket_view mixed_precision "
        "process_group reducer require_forward_param_sync skip_all_reduce_unused_params static_graph"
    )
    ddp = wrapped()
    owners = {c10d.Reducer: reducer, c10d.Logger: logger, ddp: module}
    missing = [
        f"{owner}.{name}"
        for owner, names in owners.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]
    assert missing == []


def test_the_reducers_constructor_takes_what_it_is_given() -> None:
    """Fails by name when torch renames an argument."""
    text = str(c10d.Reducer.__init__.__doc__)
    names = (
        "params bucket_indices per_bucket_size_limits process_group expect_sparse_gradients bucket_bytes_cap "
        "find_unused_parameters gradient_as_bucket_view param_to_name_mapping skip_all_reduce_unused_params "
        "use_python_reducer"
    )
    assert [name for name in names.split() if f"{name}:" not in text] == []
