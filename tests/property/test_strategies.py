"""What our strategies draw is valid: limits that DDP accepts, graphs that run, values that are true."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from ddpopt.planning.bucket_rule import ParamSpec
from tests.graph_builder import SmallGraph, is_trained, real_inputs
from tests.profiles import share
from tests.property.strategies import graphs, parameter_lists


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def layout(value: object) -> object:
    """What a fake value must foretell of the real one; strides of single rows are nobody's business."""
    if not isinstance(value, torch.Tensor):
        return value
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    return value.shape, value.dtype, value.device, strides


@share(1.5)
@given(graphs())
def test_a_drawn_graph_runs_backward_into_trainable_parameters_and_nothing_else(graph: SmallGraph) -> None:
    inputs = real_inputs(graph)
    outputs = [value for value in graph.gm(*inputs) if isinstance(value, torch.Tensor)]
    loss = torch.stack([value.square().sum() for value in outputs if value.requires_grad]).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    gradients = {
        place: value.grad
        for place, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.grad is not None
    }
    trainable = {place for place, value in enumerate(graph.example_values) if is_trained(value)}
    assert gradients
    assert gradients.keys() <= trainable
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@share(1.5)
@given(graphs())
def test_each_value_of_a_drawn_graph_is_as_its_example_value_says(graph: SmallGraph) -> None:
    run = fx.Interpreter(graph.gm, garbage_collect_values=False)
    run.run(*real_inputs(graph))
    for node, value in run.env.items():  # in the end: an example value is as the last change in place left it
        if "example_value" in node.meta:
            promised = map(layout, leaves(node.meta["example_value"]))
            assert list(map(layout, leaves(value))) == list(promised), node.format_node()
    unvalued = [node for node in graph.gm.graph.nodes if "example_value" not in node.meta]
    assert all(node.op == "output" or not has_a_value(node) for node in unvalued)


def has_a_value(node: fx.Node) -> bool:
    graph = node.op == "get_attr" and "_tensor_constant" not in node.name
    return not graph and "autocast" not in node.name and "grad_enabled" not in node.name


def reads_a_parameter_twice(graph: SmallGraph) -> bool:
    nodes = (node for node in graph.gm.graph.nodes if node.name in graph.param_placeholders)
    return any(len(node.users) > 1 for node in nodes)


def freezes_a_parameter(graph: SmallGraph) -> bool:
    return any(isinstance(value, nn.Parameter) and not is_trained(value) for value in graph.example_values)


def takes_an_item_late(graph: SmallGraph) -> bool:
    items = (node for node in graph.gm.graph.nodes if node.target is operator.getitem)
    return any(node.prev.target is not operator.getitem and node.prev.target != "chunk" for node in items)


def has_a_dead_span_without_grad(graph: SmallGraph) -> bool:
    nodes = list(graph.gm.graph.nodes)
    switches = [place for place, node in enumerate(nodes) if node.target is torch._C._set_grad_enabled]
    spans = zip(switches[::2], switches[1::2], strict=True)
    return any(
        nodes[start + 1 : end] and not any(n.users for n in nodes[end - 1 : end]) for start, end in spans
    )


FEATURES: dict[str, Callable[[SmallGraph], bool]] = {
    "tied parameter": reads_a_parameter_twice,
    "frozen parameter": freezes_a_parameter,
    "item taken late": takes_an_item_late,
    "dead span without grad": has_a_dead_span_without_grad,
    "everything alive": lambda graph: all(node.users or node.op == "output" for node in graph.gm.graph.nodes),
    "channels last": lambda graph: any("memory_format" in node.kwargs for node in graph.gm.graph.nodes),
}
"""What a step may do; that each step is drawn is seen in `test_seeded_bugs`."""
LISTS: dict[str, Callable[[tuple[ParamSpec, ...]], bool]] = {
    "several groups": lambda params: len({(param.dtype, param.device) for param in params}) >= 3,
    "a sparse gradient among dense ones": lambda params: {param.sparse for param in params} == {True, False},
    "a parameter without elements": lambda params: any(param.nbytes == 0 for param in params),
    "several MiB": lambda params: any(param.nbytes > 4 * 2**20 for param in params),
}


@pytest.mark.parametrize(("drawn", "features"), [(graphs(), FEATURES), (parameter_lists(), LISTS)])
def test_each_feature_occurs_among_some_hundred_draws(
    drawn: st.SearchStrategy[Any], features: dict[str, Callable[[Any], bool]]
) -> None:
    missing = dict(features)

    @settings(max_examples=400, derandomize=True, database=None)
    @given(drawn)
    def look(value: Any) -> None:
        for feature in [feature for feature, occurs in missing.items() if occurs(value)]:
            del missing[feature]

    look()
    assert not missing
