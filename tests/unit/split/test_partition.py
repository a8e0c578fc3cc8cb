"""A graph cut in segments is the same program: same values, gradients, side effects and metadata."""

import functools

import pytest
import torch
from torch import fx

from ddpopt.graph.nodes import body_nodes
from ddpopt.planning.cut_points import blocked_positions
from ddpopt.planning.facts import gradient_carriers
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.support.effects import Effects
from tests.support.graph_builder import GraphBuilder
from tests.support.snippets import SNIPPETS
from tests.support.tracing import Traced, cut_before, trace_all


def possible_cuts(gm: fx.GraphModule) -> list[str]:
    body = body_nodes(gm.graph)
    blocked = blocked_positions(gm.graph, gradient_carriers(gm.graph))
    return [node.name for node, why in zip(body[1:], blocked[1:], strict=True) if why is None]


def cut(gm: fx.GraphModule, *first_nodes: str) -> fx.GraphModule:
    """`gm` cut before the named nodes, linted and proved."""
    plan = cut_before(gm, *first_nodes)
    stitched = partition(gm, plan)
    for module in stitched.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
    certify(gm, stitched, plan, {})
    return stitched


def segment(stitched: fx.GraphModule, index: int) -> fx.GraphModule:
    module = stitched.get_submodule(f"segment_{index}")
    assert isinstance(module, fx.GraphModule)
    return module


@functools.cache
def graphs_of(name: str) -> list[Traced]:
    """The graphs of a snippet; who changes one must trace his own."""
    snippet = SNIPPETS[name]
    capture = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(capture):
        return trace_all(snippet.model(), *snippet.inputs(), dynamic=snippet.dynamic)


# ------------------------------------------------------------------------------------- the same program


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_graph_cut_wherever_it_can_be_computes_the_same_bit_by_bit(name: str) -> None:
    cuts = 0
    for graph in graphs_of(name):
        places = possible_cuts(graph.gm)
        cuts += len(places)
        before, text = Effects(graph.gm, graph.inputs), str(graph.gm.graph)
        Effects(cut(graph.gm, *places), graph.inputs).assert_equal(before)
        assert str(graph.gm.graph) == text
    assert cuts >= (1 if name == "gradient_turned_round" else 3)


def test_a_plan_without_cuts_gives_the_graph_itself_back() -> None:
    (graph,) = graphs_of("named_tuple")
    assert partition(graph.gm, cut_before(graph.gm)) is graph.gm


# --------------------------------------------------------------------------------------------- structure


def test_a_segment_holds_only_the_attributes_that_it_reads() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.call(torch.mul, builder.x, builder.constant(torch.ones(4)))
    second = builder.call(torch.add, first, builder.constant(torch.ones(4)))
    stitched = cut(builder.finish(second).gm, "add")
    held = [[name for name, _ in segment(stitched, i).named_buffers()] for i in range(2)]
    assert held == [["_tensor_constant0"], ["_tensor_constant1"]]


# ------------------------------------------------------------------------------------------- mutation


def test_a_parameter_read_without_gradient_enters_a_segment_detached() -> None:
    # else autograd would hold its gradient back until that segment's backward has run too
    builder = GraphBuilder(batch=2, width=4)
    weight = builder.parameter("a", "weight", 4, 4)
    builder.set_grad_enabled(False)
    peek = builder.method("abs", weight)
    builder.set_grad_enabled(True)
    product = builder.call(torch.mm, builder.call(torch.mm, builder.x, weight), peek)
    stitched = cut(builder.finish(product).gm, "mm")
    first, second = stitched.graph.find_nodes(op="call_module")
    (leaf,) = (node for node in first.args if isinstance(node, fx.Node))
    # it still requires grad: by that a matrix product chooses its kernels
    assert [str(node.target) for node in (leaf, *leaf.all_input_nodes)] == ["requires_grad_", "detach"]
    assert weight.name in [node.name for node in second.args if isinstance(node, fx.Node)]


# ------------------------------------------------------------------------------------------- metadata


def test_the_meta_of_the_graph_reaches_every_segment() -> None:
    (graph,) = graphs_of("named_tuple")
    assert "dynamo_compile_id" in graph.gm.meta
    stitched = cut(graph.gm, possible_cuts(graph.gm)[0])
    for module in (stitched, segment(stitched, 0), segment(stitched, 1)):
        assert module.meta["dynamo_compile_id"] is graph.gm.meta["dynamo_compile_id"]
    first, whole = (hasattr(gm, "_param_name_to_source") for gm in (segment(stitched, 0), graph.gm))
    assert first == whole
