"""What a node writes to is told for every way in which Dynamo's graphs put it."""

import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo import utils as dynamo

from ddpopt.graph.effects import is_known, mutated_inputs

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
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return type(value)(map(fill, value)) if isinstance(value, (list, tuple)) else value

    return tuple(map(fill, args)), {key: fill(value) for key, value in kwargs.items()}


A, B, C = At(0), At(1), At(2)
aten, higher = torch.ops.aten, torch.ops.higher_order

MUTATING: dict[str, tuple[Write, str]] = {
    "method with underscore": (method("add_", A, B), "x0"),
    "__setitem__": (method("__setitem__", A, 0, B), "x0"),
    "torch.relu_": (function(torch.relu_, A), "x0"),
    "F.relu(inplace)": (function(F.relu, A, inplace=True), "x0"),
    "F.relu(inplace) by position": (function(F.relu, A, True), "x0"),
    "F.relu(input=, inplace)": (function(F.relu, input=A, inplace=True), "x0"),
    "F.dropout(inplace)": (function(F.dropout, A, 0.5, True, True), "x0"),
    "out=": (function(torch.add, A, B, out=C), "x2"),
    "out= after any number of arguments": (function(torch.chain_matmul, A, B, out=C), "x2"),
    "out= of several": (function(torch.max, A, 0, out=(B, C)), "x1 x2"),
    "aten packet": (function(torch.ops.aten.add_, A, B), "x0"),
    "foreach": (function(torch._foreach_add_, [A, B], 1.0), "x0 x1"),
    "foreach, of one input twice": (function(torch._foreach_add_, [A, A], 1.0), "x0"),
    "init.normal_": (function(torch.nn.init.normal_, A), "x0"),
    "batch_norm": (function(F.batch_norm, A, B, C, training=True), "x1 x2"),
    "instance_norm": (function(F.instance_norm, A, B, C), "x1 x2"),
    "aten batch_norm": (function(aten.batch_norm, A, None, None, B, C, True, 0.1, 1e-5, True), "x1 x2"),
    "cudnn": (function(aten.cudnn_batch_norm.default, A, A, None, B, C, True, 0.1, 1e-5), "x1 x2"),
    "synchronized statistics": (
        function(torch.batch_norm_gather_stats_with_counts, A, A, A, B, C, 0.1, 1e-5, A), "x1 x2"
    ),
    "embedding": (function(F.embedding, A, B, None, 2.0), "x1"),
    "embedding_bag": (function(F.embedding_bag, A, B, max_norm=2.0), "x1"),
    "embedding_renorm_": (function(torch.ops.aten.embedding_renorm_, A, B, 2.0, 2.0), "x0"),
    "observer": (
        function(torch.fused_moving_avg_obs_fake_quant, 0, 0, 0, A, B, C, A, 0.1, 0, 255, 0), "x0 x1 x2"
    ),
    "__imul__": (method("__imul__", A, B), "x0"),
    "method of the class": (function(torch.Tensor.mul_, A, B), "x0"),
    "a function of the user": (function(lambda *_: None, A, [B]), "x0 x1"),
    "a function that Dynamo makes": (function(dynamo.same, A, B), "x0 x1"),
    "a method of another class": (method("step", A, B), "x0 x1"),
    "an operator without a body": (function(torch.ops.higher_order.out_dtype, A, B), "x0 x1"),
    "a kernel": (function(higher.triton_kernel_wrapper_mutation, kwargs={"a": A, "b": B}), "x0 x1"),
}  # fmt: skip

PURE: dict[str, Write] = {
    "F.relu(inplace=False)": function(F.relu, A, inplace=False),
    "F.linear": function(F.linear, A, B),
    "torch._C._nn.linear": function(torch._C._nn.linear, A, B),
    "batch_norm in eval": function(F.batch_norm, A, B, C, training=False),
    "batch_norm without statistics": function(F.batch_norm, A, None, None, training=True),
    "instance_norm without statistics": function(F.instance_norm, A),
    "torch.batch_norm in eval": function(torch.batch_norm, A, None, None, B, C, False, 0.1, 1e-5, True),
    "embedding": function(F.embedding, A, B),
    "torch.einsum": function(torch.einsum, "i,i", A, B),
    "any number of arguments": function(torch.chain_matmul, A, B, C),
    "any number of arguments, one of them": function(torch.block_diag, A),
    "getattr": function(getattr, A, "T"),
    "math": function(math.sqrt, A),
    "method in Python": method("unflatten", A, 0, (1, 2)),
    "method without operator": method("numpy", A),
    "data": function(torch._C._autograd._get_data_attr, A),  # type: ignore[attr-defined]  # not in torch's stubs
}


def node_of(write: Write) -> fx.Node:
    graph = fx.Graph()
    return write(graph, [graph.placeholder(f"x{index}") for index in range(3)])


def mutated(write: Write) -> str:
    return " ".join(node.name for node in mutated_inputs(node_of(write)))


@pytest.mark.parametrize("notation", MUTATING)
def test_an_in_place_operation_names_what_it_writes_to(notation: str) -> None:
    write, expected = MUTATING[notation]
    assert mutated(write) == expected


@pytest.mark.parametrize("notation", PURE)
def test_a_pure_operation_writes_to_nothing(notation: str) -> None:
    assert mutated(PURE[notation]) == ""


IN_PLACE = re.compile(r"Same as (a ([-+*/@%&|^]|\*\*|//|<<|>>)= b|a\[b\] = c|del a\[b\])")


def test_of_the_methods_of_tensors_those_write_that_end_in_an_underscore() -> None:
    own = {"record_stream", "retain_grad"}
    names = [name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name)) and name[0] != "_"]
    wrong = [n for n in names if mutated(method(n, A)) != ("x0" if n.endswith("_") else "")]
    assert set(wrong) == own


def test_of_pythons_operators_those_write_that_say_so() -> None:
    functions = [f for f in vars(operator).values() if isinstance(f, types.BuiltinFunctionType)]
    for target in functions:
        writes = IN_PLACE.match(target.__doc__ or "") is not None
        assert mutated(function(target, A, B)) == ("x0" if writes else ""), target


def test_sources_and_outputs_write_to_nothing() -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    output = graph.output((source,))
    assert mutated_inputs(source) == mutated_inputs(output) == ()


def test_what_is_part_of_torch_is_known_and_nothing_else_is() -> None:
    for notation in ("method with underscore", "F.relu(inplace)", "aten packet", "observer"):
        assert is_known(node_of(MUTATING[notation][0])), notation
    for notation in ("a function of the user", "a method of another class"):
        assert not is_known(node_of(MUTATING[notation][0])), notation


class Own(nn.Linear):
    """A module of the user."""


@pytest.mark.parametrize(
    ("module", "writes"), [(nn.Linear(1, 1), False), (nn.ReLU(inplace=True), True), (Own(1, 1), True)]
)
def test_a_module_of_torch_writes_if_it_says_so_and_any_other_may(module: nn.Module, writes: bool) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    call = graph.call_module("layer", (value,))
    fx.GraphModule({"layer": module}, graph)
    assert mutated_inputs(call) == (value,) * writes
