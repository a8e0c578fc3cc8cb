"""DDP over copies of a model that ranks share by tensor parallelism, compiled: what eager torch computes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import rows_case
from ddpopt.ddp.impose import imposed_plan
from ddpopt.judge.trials.on_rank import Request, Settings, run_trials
from ddpopt.judge.verdict import Status
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks, joined
from tests.support.models import hook_that_sees
from tests.support.refusals import refusal

pytestmark = [pytest.mark.world_size(4), pytest.mark.filterwarnings("ignore::FutureWarning")]
STEPS = 3


def meshed(ranks: Ranks) -> Any:
    return init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("dp", "tp"))


def wrapped(case: Case, mesh: Any, ranks: Ranks, transforms: bool, **arguments: Any) -> Any:
    """A model under DDP, converted by torch's function or by DDP itself."""
    assert case.parallelize is not None
    model = case.parallelize(case.model().to(ranks.device), mesh["tp"])
    if not transforms:
        return DistributedDataParallel(model, device_mesh=mesh["dp"], **case.ddp_kwargs, **arguments)
    _pre_dp_module_transform(model)
    group = mesh["dp"].get_group()
    return DistributedDataParallel(model, process_group=group, **case.ddp_kwargs, **arguments)


def trained(case: Case, ddp: Any, call: Any, number: int) -> tuple[list[Any], Any]:
    """The gradients of each step, and what was sent."""
    parameters, gradients = dict(ddp.module.named_parameters()), []
    with ddpopt.observe(ddp) as seen:
        for step in range(STEPS):
            torch.autograd.backward(case.step(call, number, step))
            gradients.append({name: p.grad.clone() for name, p in parameters.items()})
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    return gradients, seen


def normed(dim: int, layers: int) -> nn.Module:
    """Reads the weights of a norm twice, whose output is a DTensor."""
    norm = nn.LayerNorm(dim)
    return nn.Sequential(*[norm] * layers, nn.Linear(dim, dim))


def in_sequence(model: nn.Module, mesh: Any) -> nn.Module:
    up = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    return parallelize_module(model, mesh, {"0": SequenceParallel(sequence_dim=0), "2": up})


NORMED = rows_case("normed", normed, layers=2, parallelize=in_sequence, ddp_kwargs={"bucket_cap_mb": 1e-5})
BY_NIGHT = pytest.mark.nightly
WAYS = [
    ("tp_mlp", "split", True),
    ("normed", "inline", True),
    pytest.param("tp_mlp", "inline", False, marks=BY_NIGHT),
    pytest.param("tp_attention", "inline", True, marks=BY_NIGHT),
]


@pytest.mark.parametrize(("name", "strategy", "transforms"), WAYS)
def test_a_mesh_trains_as_in_eager_with_the_plans_buckets_of_local_parts(
    name: str, strategy: Strategy, transforms: bool, ranks: Ranks
) -> None:
    mesh, case = meshed(ranks), NORMED if name == "normed" else corpus.case(name)
    number = mesh["dp"].get_local_rank()
    with torch._dynamo.config.patch(optimize_ddp=False):
        ddp = wrapped(case, mesh, ranks, transforms)
        expected, eager = trained(case, ddp, ddp, number)
        ddp = wrapped(case, mesh, ranks, transforms)
        sent: list[tuple[str, ...]] = []
        ddp.register_comm_hook(mesh["dp"].get_group(), hook_that_sees(ddp, sent.append))
        names = [each for each, _ in ddp.module.named_parameters()]
        call = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)
        gradients, seen = trained(case, ddp, call, number)
    plan = imposed_plan(ddp)

    assert plan is not None
    assert len(plan.buckets) > 2
    split = strategy == "split" or torch.__version__ < "2.12"  # see docs/support.md
    assert bool(plan.cuts) == (split and name != "normed")  # no DTensor crosses a cut
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert [{*params} for params in sent] == [{*bucket.params} for bucket in plan.buckets] * STEPS
    numbers = {each: parameter.nbytes for each, parameter in ddp.module.named_parameters()}
    assert [b.nbytes for b in plan.buckets] == [sum(map(numbers.__getitem__, b.params)) for b in plan.buckets]
    assert seen.elsewhere == eager.elsewhere != ()  # tensor parallelism's own, in eager's order
    assert [each for each, _ in ddp.module.named_parameters()] == names


def test_a_module_whose_parameters_torch_has_replaced_is_refused(ranks: Ranks) -> None:
    mesh, case = meshed(ranks), corpus.case("tp_mlp")
    ddp = wrapped(case, mesh, ranks, transforms=True)
    case.step(ddp, 0, 0)
    told = refusal(lambda: ddpopt.compile(ddp))
    assert told == (
        "ddp_model: expected a module that has not run yet, got one in which torch replaced parameters by "
        "DTensors in its first forward; compile it right after DDP is built"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddpopt-inline", "ddpopt-split"])
def test_the_judge_lays_a_mesh_and_knows_right_from_wrong_on_it(strategy: str) -> None:
    settings = Settings("aot_eager", mesh=(2, 2))
    with joined() as ranks:
        request = Request(corpus.case("tp_mlp"), "default", (strategy, "whole"))
        right, wrong = run_trials(ranks, [request], settings)
    assert (right.status, right.findings) == (Status.OK, ())
    assert {"L0", "L1", "L3"} <= {*right.levels}
    assert wrong.status is Status.WRONG
    assert "non-nested SymInt" in wrong.findings[0].message  # torch's whole graph
