"""a checkpointed region is divided where a bucket ends inside it, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ddpopt.dynamo.capture import capture
from ddpopt.graph.nodes import CHECKPOINT, example_value
from ddpopt.testing.drawn import DrawnModel, Step, step

Body = Callable[["Region", Tensor], Tensor]


class Region(nn.Module):
    """Four layers in one checkpointed region."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, self, x, use_reentrant=False)


def pieces_of(model: nn.Module, layers: float, rows: int = 2) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of a model as it is planned with buckets of so many layers, and its checkpointed regions."""
    cap_mb = layers * 4 * 8 * 9 / 2**20
    (graph,) = capture(model, torch.ones(rows, 8), strategy="split", bucket_cap_mb=cap_mb).graphs
    cut = graph.captured.gm.graph
    return cut, cut.find_nodes(op="call_function", target=CHECKPOINT)


def plain(region: Region, x: Tensor) -> Tensor:
    for layer in region.layers:
        x = layer(x)
    return x


def under_autocast(region: Region, x: Tensor) -> Any:
    x = region.layers[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = region.layers[2](region.layers[1](x))
    return region.layers[3](x.float())


def all_under_autocast(region: Region, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in region.layers:
            x = layer(x).relu()
    return x.float()


def partly_without_grad(region: Region, x: Tensor) -> Any:
    x = region.layers[1](region.layers[0](x))
    with torch.no_grad():
        scale = region.layers[2](x).sum()
    return region.layers[3](x) * scale


def in_place(region: Region, x: Tensor) -> Any:
    x = region.layers[0](x)
    x += region.layers[1](torch.tanh(x + 1))
    return region.layers[3](region.layers[2](x))


def by_a_weight_of_its_share(region: Region, x: Tensor) -> Tensor:
    share = x.shape[0] / 4
    for layer in region.layers:
        assert isinstance(layer, nn.Linear)
        x = nn.functional.linear(x, layer.weight * share, layer.bias)
    return x


PIECES: dict[Body, int] = {
    plain: 4,
    under_autocast: 4,
    all_under_autocast: 4,
    partly_without_grad: 3,
    in_place: 3,
}


@pytest.mark.parametrize(("body", "pieces"), PIECES.items())
def test_a_region_is_divided_between_spans_and_writes_where_buckets_end(body: Body, pieces: int) -> None:
    assert len(pieces_of(Region(body), layers=1)[1]) == pieces


@pytest.mark.timeout(60)
def test_a_symbolic_float_is_recomputed_in_each_piece(fresh_dynamo: None) -> None:
    with torch._dynamo.config.patch(assume_static_by_default=False):
        _, pieces = pieces_of(Region(by_a_weight_of_its_share), layers=1, rows=3)
    assert len(pieces) == 4
    passed = [pytree.tree_leaves(example_value(source)) for p in pieces for source in (p, *p.all_input_nodes)]
    assert any(isinstance(value, torch.SymInt) for values in passed for value in values)
    assert all(example_value(piece) for piece in pieces)
    assert not any(isinstance(value, torch.SymFloat) for values in passed for value in values)


def in_a_checkpoint(*blocks: str) -> Step:
    return step("checkpointed", body=tuple(map(step, blocks)))


@pytest.mark.parametrize(("count", "layers"), [(3, 1.5), (6, 6.9), (9, 3.1)])
def test_no_bucket_waits_for_more_than_the_layer_that_fills_it(count: int, layers: float) -> None:
    layer = 4 * 8 * 9
    block = step("residual", body=(in_a_checkpoint("linear", "linear"),))
    model = DrawnModel((block,) * count).program.model()
    plan = capture(model, torch.ones(2, 8), strategy="split", bucket_cap_mb=layers * layer / 2**20).plan
    assert max(bucket.nbytes for bucket in plan.buckets) <= layer * (int(layers) + 1)


@pytest.mark.parametrize(("layers", "regions"), [(1.0, 2), (9.0, 3)])
def test_a_region_without_gradient_is_inlined_where_the_graph_is_cut(layers: float, regions: int) -> None:
    steps = (in_a_checkpoint("dropout"), in_a_checkpoint("linear"), in_a_checkpoint("linear"))
    graph, pieces = pieces_of(DrawnModel(steps).program.model(), layers)
    assert len(pieces) == regions
    assert [node for node in graph.find_nodes(op="get_attr") if not node.users] == []
    assert None not in [node._dynamo_source for node in graph.find_nodes(op="placeholder")]
