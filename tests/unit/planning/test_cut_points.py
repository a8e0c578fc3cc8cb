"""Between which nodes a graph may be cut, and what keeps it from being cut elsewhere."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.testing._internal.two_tensor import TwoTensor

from ddpopt.graph.nodes import body_nodes
from ddpopt.planning.cut_points import blocked_positions
from ddpopt.planning.facts import gradient_carriers
from tests.support.graph_builder import GraphBuilder

Program = Callable[[Tensor, Tensor, nn.Parameter], Any]
TRANSFORM = "inside a functorch transform"
HOOKS = "hooks on saved tensors are forbidden here"
WRITES = "'{}' writes to memory that is read before"
MAY_WRITE = "'{}' may write to memory that is read before"
SPARSE = "'found' makes a sparse gradient"
SUBCLASS: Any = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]  # of torch
READ_OFF = "'item' is read from a tensor that is written to"


def blocked(graph: fx.Graph) -> dict[str, str]:
    """The nodes before which no cut may lie, with the reason."""
    body = body_nodes(graph)
    blocked = blocked_positions(graph, gradient_carriers(graph))
    return {node.name: why for node, why in zip(body, blocked, strict=True) if why}


def graph_of(program: Program) -> fx.Graph:
    """What Dynamo makes of a function of an input, a buffer and a parameter."""
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    inputs = torch.ones(2, 4), torch.ones(4), nn.Parameter(torch.ones(4, 4))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(program, backend=recorder)(*inputs)
    (gm,) = recorder.graphs
    return gm.graph


def finished(builder: GraphBuilder, *outputs: fx.Node) -> dict[str, str]:
    return blocked(builder.finish(*outputs).gm.graph)


def new_builder() -> GraphBuilder:
    return GraphBuilder(batch=2, width=4)


# ----------------------------------------------------------------------------------------- what may cross


def set_deterministic(_: bool) -> None:
    """Any of torch's setters."""


def of_torch(function: Callable[..., object]) -> Callable[..., object]:
    """A function that is known to write to nothing."""
    function.__module__ = "torch"
    return function


def test_a_graph_may_be_cut_before_every_node_where_all_values_may_cross() -> None:
    builder = new_builder()
    handle = builder.enter_autocast()
    builder.set_grad_enabled(False)
    rows = builder.method("size", builder.x, 0)
    chunks = builder.method("chunk", builder.x, 2, -1)
    nothing = builder.call(of_torch(lambda _: (None, "text", torch.float32)), builder.x)
    builder.call(of_torch(lambda _: object()), builder.x)  # read by nobody
    for _ in range(2):
        builder.call(print, builder.x)  # no setter of global state: it reads a tensor
    builder.set_grad_enabled(True)
    builder.exit_autocast(handle)
    last = builder.call(of_torch(lambda *_: builder.x.meta["example_value"] + 1), rows, chunks, nothing)
    assert finished(builder, builder.method("relu", last)) == {}


@pytest.mark.parametrize(
    "made",
    [object(), SUBCLASS, torch.ones(2).to_sparse()],
    ids=["stream", "tensor subclass", "sparse"],
)
def test_nothing_is_cut_between_what_cannot_cross_and_its_last_reader(made: object) -> None:
    builder = new_builder()
    stream = builder.call(of_torch(lambda _: made), builder.x)
    first = builder.call(lambda x, _: x + 1, builder.x, stream)
    between = builder.method("relu", first)
    last = builder.call(lambda x, _: x + 1, between, stream)
    after = builder.method("sin", last)
    why = f"{stream.name!r} returns a value that cannot cross a cut"
    assert finished(builder, after) == {node.name: why for node in (first, between, last)}


def test_a_value_that_tracing_left_unknown_stays_with_its_readers() -> None:
    builder = new_builder()
    unknown = builder.method("cos", builder.x)
    reader = builder.method("relu", unknown)
    builder.evaluate()
    del unknown.meta["example_value"]
    assert finished(builder, reader) == {"relu": "'cos' returns a value that cannot cross a cut"}


def test_nothing_is_cut_between_two_settings_of_one_global_state() -> None:
    builder = new_builder()
    builder.call(set_deterministic, True)
    inside = builder.method("relu", builder.x)
    undo = builder.call(set_deterministic, False)
    after = builder.method("sin", inside)
    why = f"{undo.name!r} overrides global state set before"
    assert finished(builder, after) == {inside.name: why, undo.name: why}


def nested_transforms(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    rows: Tensor = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x.cos())
    return rows.tanh()


def hooks_forbidden_twice(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    slope = torch.func.grad(lambda y: y.sin().sum())
    inner: Tensor = torch.func.grad(lambda row: slope(row).sum())(x)
    return inner.tanh()


@pytest.mark.parametrize(
    ("program", "first", "last", "why"),
    [
        (nested_transforms, "_vmap_increment_nesting", "_vmap_decrement_nesting", TRANSFORM),
        (hooks_forbidden_twice, "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable", HOOKS),
    ],
)
def test_nested_spans_of_one_state_stay_together(program: Program, first: str, last: str, why: str) -> None:
    graph = graph_of(program)
    names = [node.name for node in body_nodes(graph)]
    kept = names[names.index(first) + 1 : names.index(last) + 1]
    found = blocked(graph)
    assert ([*found], found[kept[0]]) == (kept, why)


# -------------------------------------------------------------------------------- programs that write


def in_a_buffer(x: Tensor, buffer: Tensor, _: Tensor) -> Tensor:
    value = x + 1.0 + buffer
    buffer.lerp_(x.mean(0), 0.1)
    return value.relu()


def summed(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = x + 1.0
    total += x.sin()
    total += x.cos()
    return total.relu()


def summed_by_two_names(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = x + 1.0
    row = total.view(-1)
    total += x.sin()
    row.add_(1.0)
    return total.relu()


def written_first(x: Tensor, buffer: Tensor, _: Tensor) -> Tensor:
    value = x.sin()
    buffer.add_(1.0)
    between = value.cos()
    return between + buffer.clone() + buffer


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]  # torch's own
def opaque(x: Tensor) -> Tensor:
    return x.sin()


def what_may_write(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    value = x + 1.0
    same = value.add_(1.0)
    between = x.cos()
    other: Tensor = opaque(value)
    return same + between + other


def number_read_off_what_is_written(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = x.sum()
    scale = total.item()
    total.mul_(2)
    return x.sin() * scale * 3 + total


def conjugated(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    lazy = torch.complex(x, x).conj()
    reader = torch.real(lazy)
    return reader.sin()


def of_a_table(x: Tensor, _: Tensor, table: nn.Parameter) -> Tensor:
    scaled = table * 2
    moved = scaled.sin()
    place = x.abs()
    found = nn.functional.embedding(place.long().flatten()[:2], moved, None, None, 2.0, False, True)
    return found.cos()


def gathered(x: Tensor, _: Tensor, table: nn.Parameter) -> Tensor:
    scaled = table * 2
    place = x.new_zeros(1, 2, dtype=torch.long)
    found = torch.gather(scaled, 0, place, sparse_grad=True)
    return found.cos()


def of_a_deep_table(x: Tensor, _: Tensor, table: nn.Parameter) -> Tensor:
    deep: Tensor = table
    for _layer in range(40):  # each is read twice: 2 ** 40 ways lead to the table
        deep = deep.sin() + deep.cos()
    return nn.functional.embedding(x.long().flatten()[:2], deep, None, None, 2.0, False, True)


def nested(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(x.sin(), torch.arange(3))
    return (parts * 2).values() + x.cos()


def parameter_written(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    value = x.sin()
    with torch.no_grad():
        weight.mul_(0.5)
    return value @ weight


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        (in_a_buffer, dict.fromkeys(("mean", "lerp_"), WRITES.format("lerp_"))),
        (written_first, {}),
        (summed, {}),
        (summed_by_two_names, dict.fromkeys(("row", "sin", "total_1", "add_"), WRITES.format("add_"))),
        (what_may_write, dict.fromkeys(("same", "between", "other"), MAY_WRITE.format("other"))),
        (
            number_read_off_what_is_written,
            {**dict.fromkeys(("item", "mul_"), WRITES.format("mul_")), "sin": READ_OFF, "mul": READ_OFF},
        ),
        (conjugated, {"reader": "'lazy' returns a value that cannot cross a cut"}),
        (of_a_table, dict.fromkeys(("moved", "place", "long", "flatten", "getitem", "found"), SPARSE)),
        (gathered, dict.fromkeys(("place", "found"), SPARSE)),
        (parameter_written, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_cut_parts_a_write_from_what_was_before(program: Program, kept: dict[str, str]) -> None:
    assert blocked(graph_of(program)) == kept


def test_what_a_sparse_gradient_passes_through_is_walked_once() -> None:
    assert len(blocked(graph_of(of_a_deep_table))) > 100


def test_a_nested_tensor_and_its_values_stay_with_their_readers() -> None:
    assert list(blocked(graph_of(nested))) == ["mul", "values", "cos", "add"]


@pytest.mark.parametrize(
    "change",
    [
        lambda builder, value: builder.method("unsqueeze_", value, 0),
        lambda builder, value: builder.call(torch.as_strided_, value, (2, 2), (1, 1)),
        lambda builder, value: builder.call(torch.ops.aten.t_, value),
        lambda builder, value: builder.method("detach_", value),
    ],
    ids=["unsqueeze_", "as_strided_", "aten.t_", "detach_"],
)
def test_a_tensor_that_is_reshaped_or_detached_in_place_stays_with_its_readers(change: Any) -> None:
    # the example value that tracing left is of after the change, for what reads it before as well
    builder = new_builder()
    value = builder.call(operator.add, builder.x, 1.0)
    early = builder.method("view", value, 4, 2)
    changed = change(builder, value)
    later = builder.call(operator.add, early, 1.0)
    why = f"{changed.name!r} changes metadata in place"
    found = finished(builder, builder.method("relu", later))
    assert found == dict.fromkeys((early.name, changed.name, later.name), why)


def test_regions_that_write_to_one_tensor_stay_together_because_each_saves_it_to_recompute() -> None:
    def write(inner: GraphBuilder, x: fx.Node, buffer: fx.Node) -> tuple[fx.Node]:
        inner.method("clamp_", buffer, -1.0)
        return (inner.call(operator.mul, x, buffer),)

    builder = new_builder()
    value, buffer = builder.x, builder.buffer("layer", "mean", 4)
    calls = []
    for number in range(2):
        between = builder.method("sin", value)
        body = builder.subgraph(f"body_{number}", {"x": between, "buffer": buffer}, write)
        made = builder.call_like(lambda _, x, b: (x * b,), tag_activation_checkpoint, body, between, buffer)
        value = builder.call(operator.getitem, made, 0)
        calls.append((made, between))
    (first, _), (second, between) = calls
    found = finished(builder, value)
    why = WRITES.format(second.name)
    assert (first.name in found, found[between.name], found[second.name]) == (False, why, why)


def test_nothing_is_cut_between_a_trained_reader_and_what_numpy_may_write() -> None:
    builder = new_builder()
    buffer = builder.buffer("layer", "mean", 4)
    read = builder.call(operator.mul, builder.parameter("layer", "weight", 4), buffer)
    builder.call(lambda array: None, buffer)  # as of NumPy, it is not known to be torch's
    assert finished(builder, builder.method("sin", read)).keys() == {"_lambda_"}
