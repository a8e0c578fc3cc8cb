"""Who reads which parameter: each counted once, at its own size, wherever and however the graph reads it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import collect, gradient_carriers, parameter_sources
from tests.support.graph_builder import GraphBuilder
from tests.support.tracing import Traced, parameter_names, trace

Forward = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """Two 4 x 4 weights `a` and `b` and a bias `c`; the forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.eye(4))
        self.b = nn.Parameter(torch.eye(4))
        self.c = nn.Parameter(torch.ones(4))
        self.inner = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self, x)


def traced(forward: Forward) -> Traced:
    return trace(Weights(forward), torch.ones(2, 4))


def read_by(forward: Forward) -> dict[str, str]:
    return traced(forward).readers()


# ----------------------------------------------------------------------- modules that the graph calls


class Net(nn.Module):
    """What Dynamo inlines, and fx's own tracer does not: calls of modules, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale + self.get_buffer("shift")  # type: ignore[no-any-return]


def test_module_calls_and_attributes_read_their_parameters_and_name_them() -> None:
    net = Net()
    gm = fx.symbolic_trace(net)
    graph = Traced(net, gm, [torch.ones(2, 4)])
    assert graph.readers() == {"scale": "mul", "layers.0.weight": "layers_0", "layers.0.bias": "layers_0"}
    called = {"scale": "scale", "layers_0.weight": "layers.0.weight", "layers_0.bias": "layers.0.bias"}
    assert parameter_names(gm, graph.inputs, graph.specs) == called
    nodes = [node.name for node in parameter_sources(gm, graph.inputs, graph.specs)]
    assert nodes == ["layers_0", "scale"]


# ------------------------------------------------------------------------------- counted once, at its size


def test_a_parameter_is_read_under_the_name_of_what_wrote_to_it_too() -> None:
    def forward(m: Weights, x: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = m.a.mul_(0.5).add_(1.0)
        return x.mm(m.b).mm(scaled)

    assert read_by(forward)["a"] == "mm_1"


# ------------------------------------------------------------------------------------ what does not count


def test_under_no_grad_nothing_is_trained() -> None:
    with torch.no_grad():
        assert read_by(lambda m, x: F.linear(x, weight=m.a, bias=m.c)) == {}


# ------------------------------------------------------------------------------------------- carriers


@pytest.mark.parametrize("read", ["nothing", "the tensor", "a view", "the caller"])
def test_a_write_carries_gradient_if_what_is_written_to_is_read_after_it(read: str) -> None:
    builder = GraphBuilder(batch=2, width=4)
    weight = builder.parameter("layer", "weight", 4, 4)
    used = builder.call(torch.mm, builder.x, weight)
    base = builder.x if read == "the caller" else builder.method("cos", builder.x)
    view = builder.method("t", base)
    write = builder.method("add_", base, builder.method("sin", used))
    last = {"the tensor": base, "a view": view}.get(read, used)
    gm = builder.finish(builder.method("relu", last)).gm
    assert (write in gradient_carriers(gm.graph)) is (read != "nothing")


def test_a_reader_in_a_batch_of_vmap_counts() -> None:
    found = read_by(lambda m, x: torch.vmap(lambda row: row @ m.a)(x) @ m.b)
    assert found == {"a": "batched_outputs", "b": "matmul_1"}


def test_a_node_of_unknown_value_counts_as_carrying_gradient() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    unknown = graph.call_function(torch.sin, (weight,))
    graph.output((unknown,))
    parameter = nn.Parameter(torch.ones(2))
    spec = ParamSpec("weight", 8, "float32", "cpu")
    facts = collect(fx.GraphModule(nn.Module(), graph), [parameter], {id(parameter): spec})
    assert [use.readers for use in facts.params] == [(0,)]


# ------------------------------------------------------- what backward may read after its gradient has left


def view_first(m: Weights, x: Tensor) -> Tensor:
    return (x @ m.b @ m.a.detach()).relu() @ m.a


def value_first(m: Weights, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.a.sin()
    return (x @ m.b * scale[0]).relu() @ m.a


def view_last(m: Weights, x: Tensor) -> Tensor:
    return (x @ m.a).relu() @ m.a.detach() @ m.b


def region_first(m: Weights, x: Tensor) -> Tensor:
    inner: Tensor = checkpoint(lambda x: x @ m.b @ m.a.detach(), x, use_reentrant=False)
    return inner.relu() @ m.a


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (region_first, ["inner", "relu", "matmul"]),
        (view_first, ["relu", "matmul_2"]),
        (value_first, ["relu", "matmul_1"]),
        (view_last, []),
    ],
)
def test_no_cut_parts_a_late_reader_from_the_one_that_completes_it(forward: Forward, kept: list[str]) -> None:
    facts = traced(forward).facts
    blocked = {name: why for name, why in zip(facts.nodes, facts.blocked, strict=True) if why is not None}
    readers = {"view_first": "matmul_1", "value_first": "mul", "region_first": "tag_activation_checkpoint"}
    reader = readers.get(forward.__name__, "")
    parameter = "l_self_parameters_a_"
    why = f"the backward of {reader!r} may read {parameter!r}, which may change once its gradient is sent"
    assert blocked == dict.fromkeys(kept, why)
    assert bool(facts.late) == (forward is not view_last)
