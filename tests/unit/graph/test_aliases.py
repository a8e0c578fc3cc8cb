"""What may do more than to make the view that it returns is none; other views are drawn in tests/property."""

import operator

from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ddpopt.graph.aliases import viewed_input
from tests.graph_builder import GraphBuilder


def test_what_may_do_more_than_to_make_a_view_is_none() -> None:
    builder = GraphBuilder(batch=2, width=4)
    body = builder.subgraph("wrap_body", {"x": builder.x}, lambda inner, x: (inner.method("t", x),))
    results = builder.call_like(lambda _, x: (x.t(),), tag_activation_checkpoint, body, builder.x)
    item = builder.call(operator.getitem, results, 0)
    builder.evaluate()
    assert viewed_input(results) is None
    assert viewed_input(item) is results
