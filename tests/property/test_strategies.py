"""What our strategies draw is valid: limits that DDP accepts, graphs that run, values that are true."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import find, given, settings
from torch import fx

from ddpopt.planning.bucket_rule import ParamSpec
from tests.graph_builder import SmallGraph, real_inputs
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


LISTS: dict[str, Callable[[tuple[ParamSpec, ...]], bool]] = {
    "several groups": lambda params: len({(param.dtype, param.device) for param in params}) >= 3,
    "a sparse gradient among dense ones": lambda params: {param.sparse for param in params} == {True, False},
    "a parameter without elements": lambda params: any(param.nbytes == 0 for param in params),
    "several MiB": lambda params: any(param.nbytes > 4 * 2**20 for param in params),
}


# That each step of a graph is drawn is seen in `test_seeded_bugs`.
@pytest.mark.parametrize("feature", LISTS)
def test_each_feature_of_a_list_of_parameters_is_drawn(feature: str) -> None:
    find(parameter_lists(), LISTS[feature], settings=settings(max_examples=400, derandomize=True))
