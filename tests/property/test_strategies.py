"""What our strategies draw is valid: limits that DDP accepts, graphs that run, values that are true."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from torch import fx, nn
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec
from ddpopt.planning.plan import Plan
from ddpopt.testing.profiles import share
from tests.graph_builder import SmallGraph, is_trained, real_inputs
from tests.property import strategies
from tests.property.strategies import bucket_configs, graph_features, graphs, parameter_lists, plans


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


@share(1.5)
@given(graphs())
def test_the_parameters_of_a_drawn_graph_are_placeholders_with_distinct_names(graph: SmallGraph) -> None:
    placeholders = [node for node in graph.gm.graph.nodes if node.op == "placeholder"]
    values = dict(zip((node.name for node in placeholders), graph.example_values, strict=True))
    params = [name for name, value in values.items() if isinstance(value, nn.Parameter)]
    assert params == list(graph.param_placeholders)
    assert len(set(graph.param_placeholders.values())) == len(params)


@share(0.5)
@given(graphs())
def test_real_inputs_are_equal_for_equal_seeds(graph: SmallGraph) -> None:
    for first, second, promised in zip(
        real_inputs(graph, 1), real_inputs(graph, 1), graph.example_values, strict=True
    ):
        assert same(first, second)
        assert getattr(first, "requires_grad", False) == is_trained(promised)


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is int and first == second


def calls(*targets: object) -> Callable[[SmallGraph], bool]:
    return lambda graph: set(targets) <= {node.target for node in graph.gm.graph.nodes}


def reads_a_parameter_twice(graph: SmallGraph) -> bool:
    nodes = (node for node in graph.gm.graph.nodes if node.name in graph.param_placeholders)
    return any(len(node.users) > 1 for node in nodes)


def reads_a_parameter_within_a_list(graph: SmallGraph) -> bool:
    nodes = (node for node in graph.gm.graph.nodes if node.target is torch.cat)
    return any(item.name in graph.param_placeholders for node in nodes for item in node.args[0])


def reads_a_parameter_by_keyword(graph: SmallGraph) -> bool:
    nodes = (node for node in graph.gm.graph.nodes if "weight" in node.kwargs)
    return any(node.kwargs["weight"].name in graph.param_placeholders for node in nodes)


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


def returns_a_number(graph: SmallGraph) -> bool:
    outputs: Any = graph.gm.graph.output_node().args[0]
    return any(isinstance(node.meta["example_value"], int | torch.SymInt) for node in outputs)


def tensors(graph: SmallGraph) -> list[torch.Tensor]:
    return [value for value in graph.example_values if isinstance(value, torch.Tensor)]


FEATURES: dict[str, Callable[[SmallGraph], bool]] = {
    "parameter read by keyword": reads_a_parameter_by_keyword,
    "parameter within a list": reads_a_parameter_within_a_list,
    "tied parameter": reads_a_parameter_twice,
    "frozen parameter": freezes_a_parameter,
    "item taken late": takes_an_item_late,
    "dead span without grad": has_a_dead_span_without_grad,
    "autocast": calls(torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast),
    "in-place sum": calls("add_"),
    "in-place view": calls(operator.imul, "view"),
    "mutated buffer": calls("lerp_"),
    "dropout": calls(torch.nn.functional.dropout),
    "size known as an int": calls("size", "reshape"),
    "everything alive": lambda graph: all(node.users or node.op == "output" for node in graph.gm.graph.nodes),
    "strided convolution": lambda graph: any(
        node.args[3:4] == ((2, 2),) for node in graph.gm.graph.nodes if node.target is torch.conv2d
    ),
    "channels last": lambda graph: any("memory_format" in node.kwargs for node in graph.gm.graph.nodes),
    "norm with buffers": calls(torch.nn.functional.batch_norm),
    "embedding": calls(torch.nn.functional.embedding),
    "complex parameter": lambda graph: any(value.is_complex() for value in tensors(graph)),
    "parameter in bfloat16": lambda graph: torch.bfloat16 in {v.dtype for v in tensors(graph)},
    "parameter of no dimension": lambda graph: any(value.dim() == 0 for value in tensors(graph)),
    "parameter without elements": lambda graph: any(v.numel() == 0 for v in tensors(graph)),
    "output that is a view": calls("unsqueeze"),
    "output that is no tensor": returns_a_number,
    "batch that is a symbol": lambda graph: len(tensors(graph)) < len(graph.example_values),
    "checkpoint": calls(tag_activation_checkpoint),
    "cond": calls(cond_op),
    "attention": calls(torch.nn.functional.scaled_dot_product_attention),
    "custom function": calls(autograd_function_apply),
    "constant": lambda graph: any("_tensor_constant" in node.name for node in graph.gm.graph.nodes),
}


def test_each_feature_occurs_among_some_hundred_drawn_graphs() -> None:
    missing = dict(FEATURES)
    if "custom function" not in graph_features():
        del missing["custom function"]

    @settings(max_examples=400, derandomize=True, database=None)
    @given(graphs())
    def look(graph: SmallGraph) -> None:
        for feature in [feature for feature, occurs in missing.items() if occurs(graph)]:
            del missing[feature]

    look()
    assert not missing


LISTS: dict[str, Callable[[tuple[ParamSpec, ...]], bool]] = {
    "several groups": lambda params: len({(param.dtype, param.device) for param in params}) >= 3,
    "a sparse gradient among dense ones": lambda params: {param.sparse for param in params} == {True, False},
    "a parameter without elements": lambda params: any(param.nbytes == 0 for param in params),
    "several MiB": lambda params: any(param.nbytes > 4 * 2**20 for param in params),
}


def test_each_feature_occurs_among_some_hundred_drawn_parameter_lists() -> None:
    missing = dict(LISTS)

    @settings(max_examples=400, derandomize=True, database=None)
    @given(parameter_lists())
    def look(params: tuple[ParamSpec, ...]) -> None:
        for feature in [feature for feature, occurs in missing.items() if occurs(params)]:
            del missing[feature]

    look()
    assert not missing


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What strategies report to Hypothesis."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(strategies, "event", lambda name: found.update([name]))
    return found


@pytest.mark.parametrize("feature", sorted(graph_features()))
def test_each_feature_of_a_graph_can_be_switched_on_alone_and_off_alone(
    feature: str, reported: Counter[str]
) -> None:
    few = settings(max_examples=20, database=None, derandomize=True, phases=[Phase.generate])

    @few
    @given(graphs(features={feature}))
    def with_it(graph: SmallGraph) -> None:
        graph.gm.graph.lint()

    @few
    @given(graphs(without={feature}))
    def without_it(graph: SmallGraph) -> None:
        graph.gm.graph.lint()

    with_it()
    assert {name.partition(": ")[2] for name in reported} == {feature}
    reported.clear()
    without_it()
    assert feature not in {name.partition(": ")[2] for name in reported}


def test_a_feature_that_no_graph_has_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"^expected names of a graph's features, got 'loop'; there are: act"
    ):
        find(graphs(without={"loop"}), lambda _: True)


def test_lists_limits_and_plans_report_what_they_are(reported: Counter[str]) -> None:
    @settings(max_examples=200, database=None, derandomize=True, phases=[Phase.generate])
    @given(parameter_lists(), bucket_configs(), plans())
    def look(params: tuple[ParamSpec, ...], config: BucketConfig, plan: Plan) -> None:
        del params, config, plan

    look()
    sorts = Counter(name.partition(":")[0] for name in reported)
    assert sorts == {"parameters": 6, "limits": 4, "plan": 6}, sorted(reported)
