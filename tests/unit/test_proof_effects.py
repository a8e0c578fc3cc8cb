"""What a node writes and whether it draws is told for every way in which Dynamo's graphs put it."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from ddpopt.proof.effects import Call, draws, written
from ddpopt.proof.terms import Group, Held


def function(callee: Any, *args: Any, **kwargs: Any) -> Call:
    return Call("call_function", callee, args, kwargs)


def method(name: str, *args: Any, **kwargs: Any) -> Call:
    return Call("call_method", name, args, kwargs)


def label(value: Any) -> str:
    """A name that is the same in every process: functions print with their addresses."""
    if not isinstance(value, Call):
        return str(value)
    name = getattr(value.callee, "__name__", None) or str(value.callee).partition(" object at ")[0]
    return f"{name}({', '.join(map(str, value.args))}, {sorted(value.kwargs)})"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (method("add_", "a", 1), ["a"]),
        (method("add", "a", 1), []),
        (method("__iadd__", "a", 1), ["a"]),
        (method("__setitem__", "a", 0, "b"), ["a"]),
        (method("__add__", "a", 1), []),
        (function(operator.iadd, "a", "b"), ["a"]),
        (function(operator.setitem, "a", 0, "b"), ["a"]),
        (function(operator.add, "a", "b"), []),
        (function(torch.relu_, "a"), ["a"]),
        (function(torch._foreach_add_, ["a", "b"], 1), [["a", "b"]]),
        (function(torch.add, "a", "b", out="c"), ["c"]),
        (function(F.relu, "a", True), ["a"]),
        (function(F.relu, input="a", inplace=True), ["a"]),
        (function(F.relu, "a"), []),
        (function(F.dropout, "a", 0.1, True, True), ["a"]),
        (function(F.batch_norm, "a", "mean", "var", None, None, True), ["mean", "var"]),
        (function(F.batch_norm, "a", "mean", "var", training=False), []),
        (function(torch.batch_norm, "a", "w", "b", "mean", "var", True, 0.1, 1e-5, True), ["mean", "var"]),
        (function(torch.batch_norm, "a", "w", "b", "mean", "var", False, 0.1, 1e-5, True), []),
        (function(F.instance_norm, "a", "mean", "var", use_input_stats=True), ["mean", "var"]),
        (function(F.embedding, "i", "w", None, 2.0), ["w"]),
        (function(F.embedding, "i", "w"), []),
        (function(torch.ops.aten.add_.Tensor, "a", "b"), ["a"]),
        (function(torch.ops.aten.add.Tensor, "a", "b"), []),
        (function(torch.ops.aten.add.out, "a", "b", out="c"), ["c"]),
        (function(torch.ops.aten.index_put_, "a", ["i"], "b"), ["a"]),
    ],
    ids=label,
)
def test_what_is_written_is_told_by_notation_schema_or_table(call: Call, expected: list[Any]) -> None:
    assert list(dict.fromkeys(map(str, written(call)))) == [str(value) for value in expected]


def test_a_module_call_writes_its_own_state() -> None:
    norm = nn.BatchNorm1d(3)
    (found,) = written(Call("call_module", norm, ("a",), {}))
    assert isinstance(found, Held)
    assert found.value is norm


def checkpointed(inner: str, on: Callable[[fx.Graph, list[fx.Node]], fx.Node], *operands: Any) -> list[Any]:
    """What a checkpoint writes whose body calls a method on one of its values; inputs carry examples."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"input{place}") for place in range(len(operands))]
    for node in inputs:
        node.meta["example_value"] = torch.ones(2)
    made = on(graph, inputs)
    graph.output((graph.call_method(inner, (made, 1)),))
    body = Held("body", fx.GraphModule({}, graph), None)
    return list(written(function(torch.ops.higher_order.tag_activation_checkpoint, body, *operands)))


def with_example(node: fx.Node, value: object) -> fx.Node:
    node.meta["example_value"] = value
    return node


@pytest.mark.parametrize(("inner", "writes"), [("add_", True), ("add", False)])
def test_a_checkpoint_writes_the_operand_that_its_body_writes(inner: str, writes: bool) -> None:
    attribute = Held("attribute", torch.ones(2), None)
    assert checkpointed(inner, lambda _, inputs: inputs[1], attribute, "b") == ["b"] * writes


def test_a_checkpoint_whose_body_writes_to_a_view_of_an_operand_writes_the_operand() -> None:
    def view(graph: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
        whole: Any = inputs[1].meta["example_value"]
        return with_example(graph.call_method("view", (inputs[1], -1)), whole.view(-1))

    assert checkpointed("add_", view, "a", "b") == ["b"]


def test_a_checkpoint_whose_body_writes_to_a_value_of_its_own_writes_nothing() -> None:
    def own(graph: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
        return with_example(graph.call_method("sin", (inputs[0],)), torch.ones(2))

    assert checkpointed("add_", own, "a", "b") == []


def test_a_checkpoint_whose_body_writes_to_something_unknown_writes_all_operands() -> None:
    (found,) = checkpointed("add_", lambda graph, inputs: graph.call_method("sin", (inputs[0],)), "a", "b")
    assert isinstance(found, Group)
    assert found.items[1:] == ("a", "b")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (function(F.dropout, "a", 0.5, True, False), True),
        (function(F.dropout2d, "a"), True),
        (function(torch.rand, 3), True),
        (function(torch.randn_like, "a"), True),
        (function(torch.bernoulli, "a"), True),
        (function(torch.multinomial, "a", 1), True),
        (function(torch.normal, "a", "b"), True),
        (function(F.scaled_dot_product_attention, "q", "k", "v"), True),
        (function(F.rrelu, "a"), True),
        (function(torch.ops.aten.native_dropout.default, "a", 0.5, True), True),
        (function(torch.ops.aten.native_dropout, "a", 0.5, True), True),
        (function(torch.ops.higher_order.cond, "a"), True),
        (Call("call_module", nn.Dropout(), ("a",), {}), True),
        (method("uniform_", "a"), True),
        (method("exponential_", "a"), True),
        (method("add_", "a", 1), False),
        (method("__getitem__", "a", 1), False),
        (function(operator.add, "a", 1), False),
        (function(F.linear, "a", "w"), False),
        (function(torch.ops.aten.add.Tensor, "a", "b"), False),
    ],
    ids=label,
)
def test_what_draws_is_told_by_the_operator_of_its_name_or_a_word_in_it(call: Call, expected: bool) -> None:
    assert draws(call) is expected
