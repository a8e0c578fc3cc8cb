"""A model's graphs are planned as they come, each for its own parameters, and joined into one plan."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.planning.plan import Plan
from ddpopt.planning.regions import (
    Regions,
    plan_for_reducer,
    specs_by_id,
)
from tests.unit.rehearsing import WIDTH, Linears, rows
from tests.unit.tracing import Traced, trace_all

pytestmark = [
    pytest.mark.usefixtures("one_rank_group", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
]
LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20


class Net(Linears):
    """Four layers that run in a given order, perhaps with a graph break in the middle."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3), broken: bool = False) -> None:
        super().__init__(WIDTH, 4, order)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = (self.layers[index] for index in self.order)
        x = b(a(x).relu()).relu()
        if self.broken:
            torch._dynamo.graph_break()
        out: Tensor = d(c(x).relu()).relu()
        return out


def setting(model: nn.Module, **kwargs: Any) -> tuple[DistributedDataParallel, list[Traced]]:
    """A model under DDP, and its graphs."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": LAYER_MB, **kwargs})
    return ddp, trace_all(model, rows())


def joined(ddp: DistributedDataParallel, graphs: list[Traced]) -> Plan:
    regions = Regions.of(ddp)
    assert regions.joined() is None
    for graph in graphs:
        regions.add(graph.gm, graph.inputs, "split")
    plan = regions.joined()
    assert plan is not None
    return plan


def layers(plan: Plan) -> list[str]:
    """The layers whose parameters each bucket holds, in the order in which they are ready."""
    found = [dict.fromkeys(name.split(".")[1] for name in bucket.params) for bucket in plan.buckets]
    return [" ".join(numbers) for numbers in found]


def test_each_graph_is_planned_for_its_own_parameters() -> None:
    ddp, graphs = setting(Net(broken=True))
    regions = Regions.of(ddp)
    plans = [regions.add(graph.gm, graph.inputs, "split").plan for graph in graphs]
    assert [layers(plan) for plan in plans] == [["1", "0"], ["3", "2"]]
    whole = regions.joined()
    assert whole is not None
    assert layers(whole) == ["3", "2", "1", "0"]
    assert [segment.graph for segment in whole.segments] == [0, 0, 1, 1]


def test_buckets_end_where_they_would_without_the_graph_break() -> None:
    model = Net()
    whole = joined(*setting(model, bucket_cap_mb=1.5 * LAYER_MB))
    parted = joined(*setting(Net(broken=True), bucket_cap_mb=1.5 * LAYER_MB))
    assert layers(whole) == ["3 2", "1 0"]
    assert layers(parted) == ["3 2", "1 0"]


def test_a_recompilation_takes_the_place_of_the_graph_that_it_replaces() -> None:
    model = Net()
    ddp, first = setting(model)
    model.order = (3, 2, 1, 0)
    second = trace_all(model, rows())
    assert layers(joined(ddp, [*first, *second])) == ["0", "1", "2", "3"]
    assert joined(ddp, [*first, *second]) == joined(ddp, second)


# ---------------------------------------------------------------------------------- buckets that are given


def test_for_ddps_own_buckets_the_graph_is_cut_where_they_complete() -> None:
    ddp, (graph,) = setting(Net(order=(2, 0, 3, 1)), bucket_cap_mb=2 * LAYER_MB)
    plan = plan_for_reducer(ddp, None, graph.gm, graph.inputs, "split").plan
    assert layers(plan) == ["1 3", "0 2"]
    assert [cut.before for cut in plan.cuts] == [graph.facts.nodes[4]]
    assert plan.policy == "ddp"


def test_a_later_graph_that_reads_less_is_cut_for_what_it_reads() -> None:
    ddp, (graph,) = setting(Net())
    imposed = joined(ddp, [graph])
    (other,) = trace_all(ddp.module.get_submodule("layers.3"), rows())
    (part,) = trace_all(nn.Sequential(ddp.module.layers[1], ddp.module.layers[2]), rows())
    assert layers(plan_for_reducer(ddp, imposed, other.gm, other.inputs, "split").plan) == ["3"]
    assert layers(plan_for_reducer(ddp, imposed, part.gm, part.inputs, "split").plan) == [
        "2",
        "1",
    ]


# ------------------------------------------------------------------------------------------ small parts


def test_parameters_are_known_by_identity_in_the_reducers_order() -> None:
    model = Net()
    model.layers[3].weight = model.layers[0].weight
    model.layers[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    specs = specs_by_id(ddp)
    names = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias", "layers.3.bias"]
    assert [spec.name for spec in specs.values()] == names
    assert list(specs) == [id(model.get_parameter(name)) for name in names]
