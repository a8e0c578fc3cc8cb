"""A model's graphs are planned as they come, each for its own parameters, and joined into one plan."""

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.specs import limits_of, specs_by_id
from ddpopt.dynamo.model_graphs import SPLIT, ModelGraphs, plan_for_reducer
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.planning.plan import Plan
from ddpopt.strategies.protocol import Captured
from tests.support.rehearsing import WIDTH, Linears, rows
from tests.support.tracing import Traced, trace_all

pytestmark = [
    pytest.mark.usefixtures("one_rank_group", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
]
LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20


def setting(model: nn.Module, **kwargs: Any) -> tuple[DistributedDataParallel, list[Traced]]:
    """A model under DDP, and its graphs."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": LAYER_MB, **kwargs})
    return ddp, trace_all(model, rows())


def joined(ddp: DistributedDataParallel, graphs: list[Traced]) -> Plan:
    model_graphs = ModelGraphs(specs_by_id(ddp), limits_of(ddp))
    assert model_graphs.joined() is None
    for graph in graphs:
        model_graphs.add(Captured.of(graph.gm, graph.inputs, model_graphs.specs), [SPLIT])
    plan = model_graphs.joined()
    assert plan is not None
    return plan


def layers(plan: Plan) -> list[str]:
    """The layers whose parameters each bucket holds, in the order in which they are ready."""
    found = [dict.fromkeys(name.split(".")[1] for name in bucket.params) for bucket in plan.buckets]
    return [" ".join(numbers) for numbers in found]


def test_a_recompilation_takes_the_place_of_the_graph_that_it_replaces() -> None:
    model = Linears(layers=4)
    ddp, first = setting(model)
    model.order = (3, 2, 1, 0)
    second = trace_all(model, rows())
    assert layers(joined(ddp, [*first, *second])) == ["0", "1", "2", "3"]
    assert joined(ddp, [*first, *second]) == joined(ddp, second)


# ---------------------------------------------------------------------------------- buckets that are given


def split_for_reducer(ddp: DistributedDataParallel, imposed: Plan | None, graph: Traced) -> Plan:
    captured = Captured.of(graph.gm, graph.inputs, specs_by_id(ddp))
    return plan_for_reducer(ddp, imposed, captured, [SPLIT]).plan


def test_for_ddps_own_buckets_the_graph_is_cut_where_they_complete() -> None:
    ddp, (graph,) = setting(Linears(layers=4, order=(2, 0, 3, 1)), bucket_cap_mb=2 * LAYER_MB)
    plan = split_for_reducer(ddp, None, graph)
    assert layers(plan) == ["1 3", "0 2"]
    assert [cut.before for cut in plan.cuts] == [graph.facts.nodes[4]]
    assert plan.policy == "ddp"


def test_a_reducer_that_never_rebuilds_keeps_the_buckets_that_it_began_with() -> None:
    model = Linears(layers=4, order=(2, 0, 3, 1))
    ddp, (graph,) = setting(model, bucket_cap_mb=2 * LAYER_MB, find_unused_parameters=True)
    plan = split_for_reducer(ddp, None, graph)
    assert [set(b.params) for b in plan.buckets] == [set(b.params) for b in running_buckets(ddp)]


def test_a_later_graph_that_reads_less_is_cut_for_what_it_reads() -> None:
    ddp, (graph,) = setting(Linears(layers=4))
    imposed = joined(ddp, [graph])
    (other,) = trace_all(ddp.module.get_submodule("layers.3"), rows())
    (part,) = trace_all(nn.Sequential(ddp.module.layers[1], ddp.module.layers[2]), rows())
    assert layers(split_for_reducer(ddp, imposed, other)) == ["3"]
    assert layers(split_for_reducer(ddp, imposed, part)) == ["2", "1"]
