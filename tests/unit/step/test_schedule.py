"""The order of a step's operations, and numbers that become tensors."""

import operator
from typing import Any

import torch
from torch import fx

from ddpopt.graph.nodes import body_nodes
from ddpopt.step.numbers import numbers_as_tensors
from ddpopt.step.schedule import WAIT, Schedule

aten: Any = torch.ops.aten
ALL_REDUCE: Any = torch.ops._c10d_functional.all_reduce.default


def test_a_collective_starts_when_what_it_needs_is_there_and_what_waits_for_the_first_goes_first() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")

    def call(name: str, target: Any, *args: Any) -> fx.Node:
        return graph.create_node("call_function", target, args, name=name)

    first = call("first", aten.relu.default, x)
    other = call("other", aten.neg.default, x)
    second = call("second", aten.exp.default, first)
    sends = [call(f"send_{n}", ALL_REDUCE, each, "sum", "0") for n, each in enumerate((first, second))]
    waits = [call(f"wait_{n}", WAIT, each) for n, each in enumerate(sends)]
    late = call("late", aten.add.Tensor, waits[1], other)
    early = call("early", aten.neg.default, waits[0])
    graph.output((late, early))
    Schedule()(graph)
    graph.lint()
    order = ["first", "send_0", "second", "send_1", "other", "wait_0", "early", "wait_1", "late"]
    assert [node.name for node in body_nodes(graph)] == order


def test_numbers_become_tensors_and_the_graph_computes_the_same() -> None:
    graph = fx.Graph()
    given, w, g = (graph.placeholder(name) for name in ("rate", "w", "g"))
    rate = graph.call_function(aten._local_scalar_dense.default, (given,))
    less = graph.call_function(operator.neg, (rate,))
    decay = graph.call_function(operator.mul, (rate, 0.1))
    out = graph.call_function(aten.add.Tensor, (w, g), {"alpha": less})
    out = graph.call_function(aten.addcdiv.default, (out, g, w), {"value": less})
    out = graph.call_function(aten.mul.Tensor, (out, decay))
    graph.output((graph.call_function(aten._foreach_mul.Scalar, ([out], rate)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    inputs = torch.tensor(0.3, dtype=torch.float64), torch.rand(3) + 1, torch.rand(3)
    ((expected,),) = gm(*inputs)
    numbers_as_tensors(gm)
    ((found,),) = gm(*inputs)
    assert not gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    torch.testing.assert_close(found, expected)
