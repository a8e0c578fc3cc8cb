"""Of each node that views or passes on one of its inputs, the input is named; of nothing else."""

import operator

import torch.nn.functional as F
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ddpopt.graph.aliases import returned_input, viewed_input
from tests.graph_builder import GraphBuilder


class Written(GraphBuilder):
    """A builder that says of each node at once what it is a view of, and what it returns of its inputs."""

    def __init__(self) -> None:
        super().__init__(batch=2, width=4)

    def view_of(self, node: fx.Node) -> fx.Node | None:
        self.evaluate()
        return viewed_input(node)

    def returned_by(self, node: fx.Node) -> fx.Node | None:
        self.evaluate()
        return returned_input(node)


def test_a_view_names_its_base() -> None:
    builder = Written()
    value = builder.call(operator.add, builder.x, 1.0)
    for view in (
        builder.method("view", value, -1),
        builder.method("t", value),
        builder.call(operator.getitem, value, 0),
        builder.method("detach", value),
        builder.method("chunk", value, 2, -1),
    ):
        assert builder.view_of(view) is value


def test_what_may_do_more_than_to_make_a_view_is_none() -> None:
    builder = Written()
    body = builder.subgraph("wrap_body", {"x": builder.x}, lambda inner, x: (inner.method("t", x),))
    results = builder.call_like(lambda _, x: (x.t(),), tag_activation_checkpoint, body, builder.x)
    assert builder.view_of(results) is None
    assert builder.view_of(builder.call(operator.getitem, results, 0)) is results


def test_values_of_their_own_and_what_has_no_tensor_are_views_of_nothing() -> None:
    builder = Written()
    value = builder.call(operator.add, builder.x, 1.0)
    for node in (
        value,
        builder.method("add_", value, 1.0),
        builder.method("size", builder.x, 0),
        builder.x,
    ):
        assert builder.view_of(node) is None


def test_an_in_place_operation_returns_what_it_writes_to() -> None:
    builder = Written()
    value = builder.call(operator.add, builder.x, 1.0)
    view = builder.method("view", value, -1)
    assert builder.returned_by(builder.method("add_", value, 1.0)) is value
    assert builder.returned_by(builder.call(operator.imul, view, 2.0)) is view
    assert builder.returned_by(builder.call(F.relu, value, inplace=True)) is value
    assert builder.returned_by(builder.call(operator.add, value, 1.0)) is None
    assert builder.returned_by(builder.method("detach", value)) is None
