"""ddpopt.ddp.fit: every reason why a plan's buckets cannot be given to a module, in its exact words."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import expecttest
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.fit import ddp_module, require_between_iterations, require_fit
from ddpopt.errors import DdpoptError, PlanMismatchError, UsageError
from ddpopt.planning.plan import Bucket, Plan
from tests.support.models import arbitrary_plan

pytestmark = pytest.mark.usefixtures("one_rank_group")


class Model(nn.Module):
    """A tied parameter, a frozen one, a sparse one and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)
        self.first = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.wide = nn.Linear(2, 2, bias=False).double()
        self.last = nn.Linear(2, 2)


def said(action: Callable[[], object], kind: type[DdpoptError] = UsageError) -> str:
    """What an action is refused with; empty if it is not."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def planned(*buckets: Sequence[str], nbytes: int = 16, dtype: str = "float32") -> Plan:
    rest: Any = (nbytes, dtype, "cpu", 0, "test")
    return Plan(tuple(Bucket(i, tuple(names), *rest) for i, names in enumerate(buckets)), (), ())


def misfit(model: nn.Module, plan: Plan) -> str:
    ddp = DistributedDataParallel(model)
    return said(partial(require_fit, ddp, plan), PlanMismatchError)


def test_every_partition_of_the_parameters_fits() -> None:
    ddp = DistributedDataParallel(Model())
    plans = [arbitrary_plan(ddp, seed) for seed in range(10)]
    assert [said(partial(require_fit, ddp, plan), PlanMismatchError) for plan in plans] == [""] * 10
    assert len({plan.fingerprint for plan in plans}) > 5


def test_everything_that_is_wrong_with_the_names_is_said_at_once() -> None:
    first, tied, frozen = ([f"{name}.weight"] for name in ("first", "tied", "frozen"))
    plan = planned(first, ["nowhere", "last.bias"], [], tied, frozen, first)
    model, wrapper = Model(), cast(Any, DistributedDataParallel)
    wrapper._set_params_and_buffers_to_ignore_for_model(model, ["last.bias"])
    expecttest.assert_expected_inline(
        misfit(model, plan),
        """\
the plan does not fit the DDP module, 9 problem(s):
  - 'first.weight' appears 2 times, in buckets 0, 5
  - bucket 1: 'nowhere' is not a parameter of the module
  - bucket 1: 'last.bias' is ignored by DDP (parameters_to_ignore)
  - bucket 3: 'tied.weight' is another name of 'first.weight'; use that one
  - bucket 4: 'frozen.weight' is frozen, so DDP does not reduce it
  - 'table.weight' is missing from every bucket
  - 'wide.weight' is missing from every bucket
  - 'last.weight' is missing from every bucket
  - bucket 2 is empty
Nothing was changed. Make the plan from this module: ddpopt.plan(ddp_module, *inputs)""",
    )


def test_what_cannot_share_a_bucket_is_named() -> None:
    plan = planned(["table.weight", "first.weight", "wide.weight"], ["last.weight", "last.bias"])
    expecttest.assert_expected_inline(
        misfit(Model(), plan),
        """\
the plan does not fit the DDP module, 3 problem(s):
  - bucket 0 mixes float32 on cpu ('first.weight') with float64 on cpu ('wide.weight')
  - bucket 0 holds 'table.weight' and others, but its gradient is sparse
  - bucket 1 is planned as 16 bytes of float32, but its parameters are 24 bytes of float32
Nothing was changed. Make the plan from this module: ddpopt.plan(ddp_module, *inputs)""",
    )


def test_a_foreign_plan_does_not_flood_the_screen() -> None:
    text = misfit(nn.Linear(2, 2, bias=False), planned(*([f"layer{i}"] for i in range(50))))
    assert len(text.splitlines()) == 23
    assert "  - and 31 more" in text.splitlines()


def test_the_ddp_module_inside_wrappers_is_found_and_of_several_none() -> None:
    ddp, other = (DistributedDataParallel(nn.Linear(1, 1)) for _ in range(2))
    assert ddp_module(nn.Sequential(cast(nn.Module, torch.compile(ddp, backend="eager")))) is ddp
    assert ddp_module(DistributedDataParallel(nn.Sequential(ddp, nn.Linear(1, 1)))) is not ddp
    assert said(lambda: ddp_module(nn.ModuleDict({"first": ddp, "again": ddp, "second": other}))) == (
        "expected a DistributedDataParallel module, got ModuleDict, which contains 2, model.first and "
        "model.second: pass one of them"
    )


def test_options_that_leave_no_buckets_to_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
    monkeypatch.setattr(ddp, "mixed_precision", object())
    monkeypatch.setattr(ddp, "_use_python_reducer", True)
    monkeypatch.setattr(ddp, "_delay_all_reduce_all_params", True)
    assert said(lambda: ddp_module(ddp)) == (
        "this DDP module's buckets cannot be planned:\n"
        "  - it was built under torch._dynamo.config.optimize_ddp='python_reducer', which reduces without "
        "buckets; set another value before building it\n"
        "  - delay_all_reduce_named_params contains all of its parameters, so none are left for buckets; "
        "leave some out\n"
        "  - mixed_precision ties its hooks to DDP's original buckets; use torch.autocast instead"
    )


# -------------------------------------------------------------------------------------------- at which moment


def output_of(ddp: DistributedDataParallel) -> Any:
    return ddp(torch.ones(1, 2)).sum()


def linear(**arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2), **arguments)


def test_a_static_graph_has_one_good_moment_before_its_first_forward() -> None:
    ddp = linear(static_graph=True)
    moment = partial(said, partial(require_between_iterations, ddp))
    assert moment() == ""
    for _ in range(2):
        output = output_of(ddp)
        during = moment()
        torch.autograd.backward(output)
        for text in (during, moment()):
            assert "A static graph's buckets can only be set before its first forward" in text


@pytest.mark.parametrize("arguments", [{}, {"find_unused_parameters": True}])
def test_only_between_iterations_is_a_good_moment_to_change_buckets(arguments: dict[str, Any]) -> None:
    ddp = linear(**arguments)
    moment = partial(said, partial(require_between_iterations, ddp))
    good, bad = set(), set()
    for _ in range(15):  # DDP's log is sampled from the tenth iteration on
        good.add(moment())
        output = output_of(ddp)
        bad.add(moment())
        torch.autograd.backward(output)
        good.add(moment())  # gradients still there
        ddp.zero_grad()
    with torch.no_grad():
        ddp(torch.ones(1, 2))
    assert {*good, moment()} == {""}
    assert bad == {
        "the buckets cannot change now: a synchronized forward still needs its backward; run it first, or "
        "run forwards that need none under torch.no_grad(). A static graph's buckets can only be set before "
        "its first forward"
    }


INSIDE: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "the module's forward is running; call this before or after it": nn.Module.register_forward_hook,
    "a backward is running; call this before or after it": (
        lambda module, during: next(module.parameters()).register_hook(during)  # type: ignore[no-untyped-call]
    ),
}


@pytest.mark.parametrize("why", INSIDE)
def test_inside_an_iteration_is_a_bad_moment(why: str) -> None:
    ddp = linear()
    texts = []

    def during(*_: object) -> None:
        texts.append(said(lambda: require_between_iterations(ddp)))

    handle = INSIDE[why](ddp.module, during)
    torch.autograd.backward(output_of(ddp))
    handle.remove()
    assert texts == [f"the buckets cannot change now: {why}"]


def test_while_unused_parameters_are_noted_under_no_sync_is_a_bad_moment() -> None:
    ddp = linear(find_unused_parameters=True)
    with ddp.no_sync():
        torch.autograd.backward(output_of(ddp))
    text = said(lambda: require_between_iterations(ddp))
    ddp.zero_grad()
    assert said(lambda: require_between_iterations(ddp)) == ""
    assert text == (
        "the buckets cannot change now: under no_sync() the reducer records which parameters were used, "
        "and a new reducer would not know; call this before the first accumulated backward, or after "
        "zero_grad()"
    )
