"""ddpopt.ddp.reducer: the plan's buckets, kept, in a reducer that is otherwise DDP's own."""

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.reducer import PlannedReducer, _reducer_arguments, install
from ddpopt.planning.limits import DDP_ARGUMENTS
from tests.support.models import arbitrary_plan, changing, step, towers

pytestmark = pytest.mark.usefixtures("one_rank_group")

c10d: Any = dist  # torch does not mark its re-exports


def planned(seed: int = 0, **arguments: Any) -> Any:
    ddp = towers(**arguments)
    install(ddp, arbitrary_plan(ddp, seed))
    return ddp


MODES: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize(("arguments", "unsynchronized"), [*((mode, 0) for mode in MODES), ({}, 3)])
def test_a_hundred_steps_hold_on_to_nothing(arguments: dict[str, Any], unsynchronized: int) -> None:
    ddp = planned(**arguments)
    counts = []
    for _ in range(100):
        for _ in range(unsynchronized):
            with ddp.no_sync():
                step(ddp)
        step(ddp)
        counts.append(sum(parameter._use_count() for parameter in ddp.module.parameters()))
    assert len(set(counts[5:])) == 1


def test_what_ddp_logs_is_the_same_but_for_the_buckets_also_of_what_was_set_after_construction() -> None:
    ddp, plain = (towers(gradient_as_bucket_view=True, bucket_cap_mb=3) for _ in range(2))
    for module in (ddp, plain):
        module._set_static_graph()
        module._register_builtin_comm_hook(c10d.BuiltinCommHookType.ALLREDUCE)
        module.logger._set_uneven_input_join()
    install(ddp, arbitrary_plan(ddp, 0))
    theirs, ours = plain._get_ddp_logging_data(), ddp._get_ddp_logging_data()
    assert ours.pop("bucket_sizes") != theirs.pop("bucket_sizes")
    assert ours == theirs


@pytest.mark.parametrize("arguments", MODES)
def test_what_ddp_logs_of_rebuilt_buckets_is_logged_of_the_plans_where_ddp_would_rebuild(
    arguments: dict[str, Any],
) -> None:
    def logged(ddp: Any) -> dict[str, Any]:
        return {key: value for key, value in ddp._get_ddp_logging_data().items() if "rebuilt" in key}

    eager = towers(**arguments)
    ours = planned(**arguments)
    assert logged(ours) == {}
    for _ in range(4):
        step(eager)
        step(ours)
    theirs, found = logged(eager), logged(ours)
    assert found.keys() == theirs.keys()
    if found == theirs:  # DDP keeps its first buckets where it looks for unused parameters
        assert arguments == MODES[2]
    else:
        places = {name: str(place) for place, (name, _) in enumerate(ours.module.named_parameters())}
        buckets = ours.reducer.plan.buckets
        assert found == {
            "has_rebuilt_buckets": theirs["has_rebuilt_buckets"],
            "rebuilt_bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
            "rebuilt_per_bucket_param_indices": ", ".join(
                " ".join(places[name] for name in bucket.params) for bucket in buckets
            ),
        }


def test_every_switch_of_ddp_that_the_reducer_has_is_passed_on_in_every_release() -> None:
    names = {*re.findall(r"(\w+): ", str(c10d.Reducer.__init__.__doc__))}
    switches = names & {*DDP_ARGUMENTS} - {"process_group"}
    ddp = towers(**dict.fromkeys(switches, True))
    manual = hasattr(ddp, "finalize_backward")  # since torch 2.15
    if manual:
        ddp.require_manual_backward_finalization = True
    plan = arbitrary_plan(ddp, 0)
    passed = _reducer_arguments(ddp, plan, [name for name, _ in ddp.module.named_parameters()])
    assert {name for name, value in passed.items() if value is True} == switches > {"gradient_as_bucket_view"}
    install(ddp, plan)
    step(ddp)
    if manual:
        ddp.finalize_backward()  # raises unless the new reducer waits for it


@pytest.mark.skipif(not hasattr(DistributedDataParallel, "finalize_backward"), reason="since torch 2.15")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_backward_may_be_finalized_when_it_may_be_in_plain_ddp(options: dict[str, Any]) -> None:
    pair: list[Any] = [towers(**options) for _ in range(2)]
    for ddp in pair:
        ddp.require_manual_backward_finalization = True
    install(pair[0], arbitrary_plan(pair[0], 0))
    for _ in range(3):
        late = []
        for ddp in pair:
            step(ddp)
            late.append(ddp.should_finalize_after_backward)
            ddp.finalize_backward()
        assert late[0] is late[1]


doubling = changing(lambda buffer: buffer * 2)


def test_a_second_hook_is_refused_as_in_plain_ddp() -> None:
    ddp = towers()
    ddp.register_comm_hook(None, doubling)
    install(ddp, arbitrary_plan(ddp, 0))
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, doubling)


@pytest.mark.parametrize("hooked_again", [False, True])
def test_a_copy_of_a_module_has_the_hooks_that_torch_gives_it(hooked_again: bool) -> None:
    ddp = towers()
    ddp.register_comm_hook(None, doubling)
    gradients = []
    for imposed in (False, True):
        copied = copy.deepcopy(ddp)
        if hooked_again:
            copied.register_comm_hook(None, doubling)
        if imposed:
            install(copied, arbitrary_plan(copied, 0))
        step(copied)
        gradients.append([p.grad for p in copied.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_the_old_buckets_are_gone_before_the_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = towers()
    old = weakref.ref(ddp.reducer)
    alive: list[bool] = []
    construct: Callable[..., None] = PlannedReducer.__init__

    def watched(self: Any, *arguments: Any) -> None:
        alive.append(old() is not None)
        construct(self, *arguments)

    monkeypatch.setattr(PlannedReducer, "__init__", watched)
    install(ddp, arbitrary_plan(ddp, 0))
    assert alive == [False]


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_follow_a_memory_format_that_changes_after_the_first_step(as_view: bool) -> None:
    found = []
    for make in (planned, towers):
        ddp = make(gradient_as_bucket_view=as_view)
        step(ddp)
        ddp.zero_grad()
        for weight in (p for p in ddp.parameters() if p.dim() == 2):
            weight.data = weight.data.t().contiguous().t()
        step(ddp)
        found.append([(p.grad, p.grad.stride()) for p in ddp.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("arguments", MODES)
def test_gradients_become_views_of_their_buckets_when_ddps_own_do(arguments: dict[str, Any]) -> None:
    def story(is_planned: bool) -> list[Any]:
        seen: list[Any] = []
        ddp = towers(gradient_as_bucket_view=True, **arguments)
        for parameter in ddp.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if is_planned:
            install(ddp, arbitrary_plan(ddp, 0))
        for _ in range(4):
            given = [parameter.grad for parameter in ddp.parameters()]
            step(ddp)
            seen += [gradient.clone() for gradient in given]
            given = [parameter.grad for parameter in ddp.parameters()]
            ddp.zero_grad()
            step(ddp)
            seen += [ddp._has_rebuilt_buckets, *(gradient.clone() for gradient in given)]
            for parameter, gradient in zip(ddp.parameters(), given, strict=True):
                parameter.grad = gradient
        return seen

    torch.testing.assert_close(story(is_planned=True), story(is_planned=False))


def test_gradients_outlive_a_reducer_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ZeroDivisionError

    ddp = towers()
    step(ddp)
    before = [parameter.grad for parameter in ddp.parameters()]
    monkeypatch.setattr("ddpopt.ddp.reducer.PlannedReducer", refuse)
    with pytest.raises(ZeroDivisionError):
        install(ddp, arbitrary_plan(ddp, 0))
    assert all(p.grad is gradient for p, gradient in zip(ddp.parameters(), before, strict=True))
