"""Between which nodes a graph may be cut, and what keeps it from being cut elsewhere."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ddpopt.graph.nodes import body_nodes
from ddpopt.planning.cut_points import blocked_positions
from tests.graph_builder import GraphBuilder


def names(write: str, verb: str = "writes to") -> str:
    """Why two names of a tensor do not cross before it is written to."""
    return f"two names of one tensor that {write!r} {verb}"


def blocked(graph: fx.Graph) -> dict[str, str]:
    """The nodes before which no cut may lie, with the reason."""
    body = body_nodes(graph)
    return {node.name: why for node, why in zip(body, blocked_positions(graph), strict=True) if why}


def finished(builder: GraphBuilder, *outputs: fx.Node) -> dict[str, str]:
    return blocked(builder.finish(*outputs).gm.graph)


def new_builder() -> GraphBuilder:
    return GraphBuilder(batch=2, width=4)


# -------------------------------------------------------------------------------------- what may cross


def set_deterministic(_: bool) -> None:
    """Stands for any of torch's setters."""


def test_a_graph_may_be_cut_before_every_node_where_all_values_may_cross() -> None:
    builder = new_builder()
    handle = builder.enter_autocast()
    builder.set_grad_enabled(False)
    rows = builder.method("size", builder.x, 0)
    chunks = builder.method("chunk", builder.x, 2, -1)
    nothing = builder.call(lambda _: (None, "text", torch.float32), builder.x)
    builder.call(lambda _: object(), builder.x)  # read by nobody
    for _ in range(2):
        builder.call(print, builder.x)  # no setter of global state: it reads a tensor
    builder.set_grad_enabled(True)
    builder.exit_autocast(handle)
    last = builder.call(lambda *_: builder.x.meta["example_value"] + 1, rows, chunks, nothing)
    assert finished(builder, builder.method("relu", last)) == {}


def under_one_name(builder: GraphBuilder, value: fx.Node) -> fx.Node:
    builder.method("mul_", value, 2.0)
    return builder.method("relu", value)


def by_a_view(builder: GraphBuilder, value: fx.Node) -> fx.Node:
    builder.call(operator.imul, builder.method("view", value, -1), 0.5)
    return builder.call(operator.add, value, 1.0)


def under_a_name_that_is_written_to_no_more(builder: GraphBuilder, value: fx.Node) -> fx.Node:
    return builder.call(operator.add, builder.method("add_", value, 1.0), value)


def in_a_buffer(builder: GraphBuilder, value: fx.Node) -> fx.Node:
    mean = builder.buffer("norm", "mean", 4)
    value = builder.call(operator.add, value, mean)
    builder.method("lerp_", mean, builder.method("mean", builder.x, 0), 0.1)
    return builder.method("relu", value)


@pytest.mark.parametrize(
    "write", [under_one_name, by_a_view, under_a_name_that_is_written_to_no_more, in_a_buffer]
)
def test_what_is_written_to_may_cross(write: Callable[[GraphBuilder, fx.Node], fx.Node]) -> None:
    builder = new_builder()
    value = builder.call(operator.add, builder.x, 1.0)
    assert finished(builder, write(builder, value)) == {}


def test_nothing_is_cut_between_what_cannot_cross_and_its_last_reader() -> None:
    builder = new_builder()
    stream = builder.call(lambda _: object(), builder.x)
    first = builder.call(lambda x, _: x + 1, builder.x, stream)
    between = builder.method("relu", first)
    last = builder.call(lambda x, _: x + 1, between, stream)
    after = builder.method("sin", last)
    why = f"{stream.name!r} returns a value that cannot cross a cut"
    assert finished(builder, after) == {node.name: why for node in (first, between, last)}


def test_a_value_that_tracing_left_unknown_stays_with_its_readers() -> None:
    builder = new_builder()
    value = builder.method("sin", builder.x)
    unknown = builder.method("cos", value)
    reader = builder.method("relu", unknown)
    builder.evaluate()
    del unknown.meta["example_value"]
    assert finished(builder, reader) == {"relu": "'cos' returns a value that cannot cross a cut"}


def test_what_is_yet_to_be_conjugated_stays_with_its_readers() -> None:
    builder = new_builder()
    number = builder.call(torch.complex, builder.x, builder.x)
    lazy = builder.method("conj", number)
    reader = builder.call(torch.real, lazy)
    assert finished(builder, builder.method("sin", reader)) == {
        reader.name: f"{lazy.name!r} returns a value that cannot cross a cut"
    }


def test_a_nested_tensor_and_its_values_stay_with_their_readers() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        parts = torch.nested.nested_tensor_from_jagged(x.sin(), torch.arange(3))
        return (parts * 2).values() + x.cos()

    assert list(blocked(dynamo_graph(doubled, torch.ones(2, 4)))) == ["mul", "values", "cos", "add"]


@pytest.mark.parametrize("notation", ["unsqueeze_", "as_strided_", "aten.t_", "detach_"])
def test_a_tensor_that_is_reshaped_or_detached_in_place_stays_with_its_readers(notation: str) -> None:
    # the example value that tracing left is of after the change, for what reads it before as well
    builder = new_builder()
    value = builder.call(operator.add, builder.x, 1.0)
    early = builder.method("view", value, 4, 2)
    change = {
        "unsqueeze_": lambda: builder.method("unsqueeze_", value, 0),
        "as_strided_": lambda: builder.call(torch.as_strided_, value, (2, 2), (1, 1)),
        "aten.t_": lambda: builder.call(torch.ops.aten.t_, value),
        "detach_": lambda: builder.method("detach_", value),
    }[notation]()
    later = builder.call(operator.add, early, 1.0)
    after = builder.method("relu", later)
    why = f"{change.name!r} changes what a tensor is in place"
    assert finished(builder, after) == dict.fromkeys((early.name, change.name, later.name), why)


def test_a_number_stays_with_its_readers_if_the_tensor_that_it_is_read_off_is_written_to() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = dynamo_graph(read_and_written, torch.ones(2, 4))
    why = "'item' is read off a tensor that is written to"
    kept = dict.fromkeys(("item", "mul_"), "'item' reads what is written to later")
    assert blocked(graph) == {**kept, **dict.fromkeys(("sin", "mul"), why)}


def read_and_written(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    scale = total.item()
    total.mul_(2)
    return x.sin() * scale * 3 + total


# -------------------------------------------------------------------------------------- global state


def test_nothing_is_cut_between_two_settings_of_one_global_state() -> None:
    builder = new_builder()
    builder.call(set_deterministic, True)
    inside = builder.method("relu", builder.x)
    undo = builder.call(set_deterministic, False)
    after = builder.method("sin", inside)
    why = f"{undo.name!r} undoes global state set before"
    assert finished(builder, after) == {inside.name: why, undo.name: why}


def dynamo_graph(function: object, *inputs: torch.Tensor) -> fx.Graph:
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    torch.compile(function, backend=recorder)(*inputs)  # type: ignore[call-overload]  # any callable
    (gm,) = recorder.graphs
    return gm.graph


TRANSFORM = "inside a functorch transform"


def stays_together(graph: fx.Graph, why: str = TRANSFORM) -> list[str]:
    """The run of nodes between which no cut may lie, and the one before it."""
    names = [node.name for node in body_nodes(graph)]
    inside = list(blocked(graph))
    assert inside == names[names.index(inside[0]) : names.index(inside[-1]) + 1]
    assert set(blocked(graph).values()) == {why}
    return names[names.index(inside[0]) - 1 : names.index(inside[-1]) + 1]


def test_nested_transforms_are_kept_together_as_one() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x.cos())
        return rows.tanh()

    run = stays_together(dynamo_graph(function, torch.ones(2, 4)))
    assert (run[0], run[-1]) == ("_vmap_increment_nesting", "_vmap_decrement_nesting")
    assert {"_grad_increment_nesting", "sin", "_grad_decrement_nesting"} <= set(run)


def test_no_cut_lies_where_a_transform_forbids_hooks_on_saved_tensors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: y.sin().sum())
        inner: torch.Tensor = torch.func.grad(lambda row: slope(row).sum())(x)
        return inner.tanh()

    run = stays_together(
        dynamo_graph(function, torch.ones(2, 4)), "hooks on saved tensors are forbidden here"
    )
    assert (run[0], run[-1]) == ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")
    assert run.count("_saved_tensors_hooks_enable") == 1


# -------------------------------------------------------------------------------------------- mutation


def two_names(builder: GraphBuilder, value: fx.Node) -> list[fx.Node]:
    same = builder.method("add_", value, 1.0)
    between = builder.method("sin", builder.x)
    builder.method("mul_", value, 2.0)
    return [builder.call(operator.add, builder.call(operator.add, same, between), value)]


def a_view_that_is_returned(builder: GraphBuilder, value: fx.Node) -> list[fx.Node]:
    row = builder.method("view", value, -1)
    between = builder.method("sin", builder.x)
    builder.method("mul_", value, 2.0)
    return [builder.method("relu", between), row]


def an_input_that_is_alive_to_the_end(builder: GraphBuilder, _: fx.Node) -> list[fx.Node]:
    same = builder.method("add_", builder.x, 1.0)
    builder.method("mul_", builder.x, 2.0)
    return [builder.method("relu", same)]


def read_and_then_written_to(builder: GraphBuilder, value: fx.Node) -> list[fx.Node]:
    read = builder.method("sin", value)
    builder.method("mul_", value, 2.0)
    return [builder.call(operator.add, read, value)]


@pytest.mark.parametrize(
    ("build", "kept", "why"),
    [
        (two_names, ["sin", "mul_"], names("mul_")),
        (a_view_that_is_returned, ["sin", "mul_"], names("mul_")),
        (an_input_that_is_alive_to_the_end, ["mul_"], names("mul_")),
        (read_and_then_written_to, ["sin", "mul_"], "'sin' reads what is written to later"),
    ],
)
def test_what_is_mutated_later_does_not_cross(
    build: Callable[[GraphBuilder, fx.Node], list[fx.Node]], kept: list[str], why: str
) -> None:
    builder = new_builder()
    outputs = build(builder, builder.call(operator.add, builder.x, 1.0))
    assert finished(builder, *outputs) == dict.fromkeys(kept, why)


def test_what_may_write_to_a_tensor_counts_as_a_write_and_says_so() -> None:
    builder = new_builder()
    value = builder.call(operator.add, builder.x, 1.0)
    body = builder.subgraph("wrap_body", {"x": value}, lambda inner, x: (inner.method("t", x),))
    results = builder.call_like(lambda _, x: (x.t(),), tag_activation_checkpoint, body, value)
    same = builder.call(operator.getitem, results, 0)
    unknown = builder.call(lambda x: x.sin(), value)
    total = builder.method("sum", same)
    found = finished(builder, builder.call(operator.add, unknown, total))
    assert found == {name: names(unknown.name, "may write to") for name in (same.name, unknown.name)}


def test_regions_that_write_to_one_tensor_stay_together_for_each_keeps_it_to_be_computed_again() -> None:
    def write(inner: GraphBuilder, x: fx.Node, buffer: fx.Node) -> tuple[fx.Node]:
        inner.method("clamp_", buffer, -1.0)
        return (inner.call(operator.mul, x, buffer),)

    builder = new_builder()
    value, buffer = builder.x, builder.buffer("layer", "mean", 4)
    calls = []
    for number in range(2):
        between = builder.method("sin", value)
        body = builder.subgraph(f"body_{number}", {"x": between, "buffer": buffer}, write)
        computed = builder.call_like(
            lambda _, x, b: (x * b,), tag_activation_checkpoint, body, between, buffer
        )
        value = builder.call(operator.getitem, computed, 0)
        calls.append((computed, between))
    (first, _), (second, between) = calls
    found = finished(builder, value)
    why = f"{first.name!r} keeps what it writes to, which is written to later"
    assert {name: found[name] for name in (between.name, second.name)} == dict.fromkeys(
        (between.name, second.name), why
    )


def test_nothing_is_cut_between_a_trained_reader_and_what_numpy_may_write() -> None:
    builder = new_builder()
    buffer = builder.buffer("layer", "mean", 4)
    weight = builder.parameter("layer", "weight", 4)
    read = builder.call(operator.mul, weight, buffer)
    builder.call(lambda array: None, buffer)  # as of NumPy, it is not known to be torch's
    assert finished(builder, builder.method("sin", read)).keys() == {"_lambda_"}


def test_a_parameter_that_forward_writes_to_keeps_everything_before_together() -> None:
    builder = new_builder()
    weight = builder.parameter("layer", "weight", 4, 4)
    value = builder.method("sin", builder.x)
    builder.set_grad_enabled(False)
    builder.method("mul_", weight, 0.5)
    builder.set_grad_enabled(True)
    product = builder.call(torch.mm, value, weight)
    found = finished(builder, product)
    assert set(found.values()) == {f"{weight.name!r} requires grad and is itself mutated"}
    assert {value.name, "mul_"} <= set(found)
    assert product.name not in found
