"""Every notation of an in-place operation is recognised, and nothing else is taken for one."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ddpopt.mutation import mutated_inputs, returned_input, viewed_input
from ddpopt.testing.graph_builder import GraphBuilder

Write = Callable[[fx.Graph, list[fx.Node]], fx.Node]


def function(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Write:
    """A call of `target`; ints among the arguments stand for inputs x0, x1, …"""
    return lambda graph, inputs: graph.call_function(target, *filled(args, kwargs, inputs))


def method(name: str, *args: Any, **kwargs: Any) -> Write:
    return lambda graph, inputs: graph.call_method(name, *filled(args, kwargs, inputs))


class At(int):
    """Stands for an input by its number."""


def filled(args: Any, kwargs: Any, inputs: list[fx.Node]) -> tuple[Any, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, At):
            return inputs[value]
        return type(value)(map(fill, value)) if isinstance(value, (list, tuple)) else value

    return tuple(map(fill, args)), {key: fill(value) for key, value in kwargs.items()}


A, B, C = At(0), At(1), At(2)
STATISTICS = {"running_mean": B, "running_var": C}

MUTATING: dict[str, tuple[Write, str]] = {
    "method with underscore": (method("add_", A, B), "x0"),
    "copy_": (method("copy_", A, B), "x0"),
    "__setitem__": (method("__setitem__", A, 0, B), "x0"),
    "__iadd__": (method("__iadd__", A, B), "x0"),
    "operator.iadd": (function(operator.iadd, A, B), "x0"),
    "operator.imul": (function(operator.imul, A, 2.0), "x0"),
    "operator.imatmul": (function(operator.imatmul, A, B), "x0"),
    "operator.ior": (function(operator.ior, A, B), "x0"),
    "operator.iand": (function(operator.iand, A, B), "x0"),
    "operator.setitem": (function(operator.setitem, A, (0, 1), B), "x0"),
    "torch.relu_": (function(torch.relu_, A), "x0"),
    "F.relu_": (function(F.relu_, A), "x0"),
    "F.relu(inplace)": (function(F.relu, A, inplace=True), "x0"),
    "F.relu(inplace) by position": (function(F.relu, A, True), "x0"),
    "F.relu(input=, inplace)": (function(F.relu, input=A, inplace=True), "x0"),
    "F.dropout(inplace)": (function(F.dropout, A, 0.5, True, True), "x0"),
    "out=": (function(torch.add, A, B, out=C), "x2"),
    "out= of several": (function(torch.max, A, 0, out=(B, C)), "x1 x2"),
    "aten overload": (function(torch.ops.aten.add_.Tensor, A, B), "x0"),
    "aten packet": (function(torch.ops.aten.add_, A, B), "x0"),
    "aten out by keyword": (function(torch.ops.aten.add.out, A, B, out=C), "x2"),
    "foreach": (function(torch._foreach_add_, [A, B], 1.0), "x0 x1"),
    "init.normal_": (function(torch.nn.init.normal_, A), "x0"),
    "batch_norm": (function(F.batch_norm, A, B, C, training=True), "x1 x2"),
    "batch_norm by keyword": (function(F.batch_norm, A, **STATISTICS, training=True), "x1 x2"),
    "instance_norm": (function(F.instance_norm, A, B, C), "x1 x2"),
}

PURE: dict[str, Write] = {
    "method": method("add", A, B),
    "dunder method": method("__add__", A, B),
    "operator.add": function(operator.add, A, B),
    "operator.getitem": function(operator.getitem, A, 0),
    "operator.invert": function(operator.invert, A),
    "operator.and_": function(operator.and_, A, B),
    "operator.or_": function(operator.or_, A, B),
    "operator.not_": function(operator.not_, A),
    "operator.is_": function(operator.is_, A, None),
    "operator.index": function(operator.index, A),
    "F.relu": function(F.relu, A),
    "F.relu(inplace=False)": function(F.relu, A, inplace=False),
    "F.linear": function(F.linear, A, B),
    "torch._C._nn.linear": function(torch._C._nn.linear, A, B),
    "aten overload": function(torch.ops.aten.add.Tensor, A, B),
    "batch_norm in eval": function(F.batch_norm, A, B, C, training=False),
    "batch_norm without statistics": function(F.batch_norm, A, None, None, training=True),
    "instance_norm without statistics": function(F.instance_norm, A),
    "out=None": function(torch.add, A, B, out=None),
}


def mutated(write: Write) -> str:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(3)]
    return " ".join(node.name for node in mutated_inputs(write(graph, inputs)))


@pytest.mark.parametrize("notation", MUTATING)
def test_an_in_place_operation_names_what_it_writes_to(notation: str) -> None:
    write, expected = MUTATING[notation]
    assert mutated(write) == expected


@pytest.mark.parametrize("notation", PURE)
def test_a_pure_operation_writes_to_nothing(notation: str) -> None:
    assert mutated(PURE[notation]) == ""


def test_one_input_written_twice_is_named_once() -> None:
    assert mutated(function(torch._foreach_add_, [A, A], 1.0)) == "x0"


def test_sources_and_outputs_write_to_nothing() -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    output = graph.output((source,))
    assert mutated_inputs(source) == mutated_inputs(output) == ()


# ------------------------------------------------------------------------------------------------ views


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
    ):
        assert builder.view_of(view) is value


def test_several_views_at_once_name_their_base() -> None:
    builder = Written()
    assert builder.view_of(builder.method("chunk", builder.x, 2, -1)) is builder.x


def test_what_may_do_more_than_to_make_a_view_is_none() -> None:
    builder = Written()
    body = builder.subgraph("wrap_body", {"x": builder.x}, lambda inner, x: (inner.method("t", x),))
    results = builder.call_like(lambda _, x: (x.t(),), tag_activation_checkpoint, body, builder.x)
    assert builder.view_of(results) is None
    assert builder.view_of(builder.call(operator.getitem, results, 0)) is results


def test_a_new_value_is_a_view_of_nothing() -> None:
    builder = Written()
    assert builder.view_of(builder.call(operator.add, builder.x, 1.0)) is None


def test_the_result_of_an_in_place_operation_is_no_view() -> None:
    builder = Written()
    value = builder.call(operator.add, builder.x, 1.0)
    assert builder.view_of(builder.method("add_", value, 1.0)) is None


def test_an_in_place_operation_returns_what_it_writes_to() -> None:
    builder = Written()
    value = builder.call(operator.add, builder.x, 1.0)
    view = builder.method("view", value, -1)
    assert builder.returned_by(builder.method("add_", value, 1.0)) is value
    assert builder.returned_by(builder.call(operator.imul, view, 2.0)) is view
    assert builder.returned_by(builder.call(F.relu, value, inplace=True)) is value
    assert builder.returned_by(builder.call(operator.add, value, 1.0)) is None
    assert builder.returned_by(builder.method("detach", value)) is None


def test_what_has_no_tensor_is_a_view_of_nothing() -> None:
    builder = Written()
    assert builder.view_of(builder.method("size", builder.x, 0)) is None
    assert builder.view_of(builder.x) is None
