"""A graph cut in segments is the same program: same values, gradients, side effects and metadata."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ddpopt.graph.nodes import body_nodes
from ddpopt.planning.cut_points import blocked_positions
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition, segment_name
from tests.graph_builder import GraphBuilder, real_inputs
from tests.unit.effects import Effects, identical
from tests.unit.snippets import SNIPPETS, Model, copied
from tests.unit.tracing import Traced, cut_before, trace, trace_all, written_segments

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


def possible_cuts(gm: fx.GraphModule) -> list[str]:
    body = body_nodes(gm.graph)
    blocked = blocked_positions(gm.graph, body)
    return [node.name for node, why in zip(body[1:], blocked[1:], strict=True) if why is None]


def cut(gm: fx.GraphModule, *openers: str) -> fx.GraphModule:
    """`gm` cut before the named nodes, linted and proved."""
    plan = cut_before(gm, *openers)
    stitched = partition(gm, plan)
    for module in stitched.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
    certify(gm, stitched, plan, {})
    return stitched


def segment(stitched: fx.GraphModule, index: int) -> fx.GraphModule:
    module = stitched.get_submodule(segment_name(index))
    assert isinstance(module, fx.GraphModule)
    return module


def node_of(gm: fx.GraphModule, name: str) -> fx.Node:
    (found,) = (node for node in body_nodes(gm.graph) if node.name == name)
    return found


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
    openers = 0
    for graph in graphs_of(name):
        places = possible_cuts(graph.gm)
        openers += len(places)
        before = Effects(graph.gm, graph.inputs)
        Effects(cut(graph.gm, *places), graph.inputs).assert_equal(before)
    assert openers >= (1 if name == "outputs_of_all_kinds" else 3)


@pytest.mark.parametrize("name", ["chunks", "nested_autocast", "mutated_views", "random_numbers"])
def test_a_graph_cut_at_any_one_place_computes_the_same_bit_by_bit(name: str) -> None:
    (graph,) = graphs_of(name)
    before = Effects(graph.gm, graph.inputs)
    for place in possible_cuts(graph.gm):
        Effects(cut(graph.gm, place), graph.inputs).assert_equal(before)


def test_a_plan_without_cuts_gives_the_graph_itself_back() -> None:
    (graph,) = graphs_of("residual")
    assert partition(graph.gm, cut_before(graph.gm)) is graph.gm


def test_the_original_is_left_as_it_is() -> None:
    (graph,) = graphs_of("mutated_views")
    text, nodes = str(graph.gm.graph), list(graph.gm.graph.nodes)
    meta = [dict(node.meta) for node in nodes]
    cut(graph.gm, *possible_cuts(graph.gm))
    assert str(graph.gm.graph) == text
    assert list(graph.gm.graph.nodes) == nodes
    assert [dict(node.meta) for node in nodes] == meta


# --------------------------------------------------------------------------------------------- structure


def test_values_cross_as_inputs_and_outputs_of_segments() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(2, 4))
    assert_expected_inline(
        written_segments(cut(graph.gm, body_nodes(graph.gm.graph)[2].name)),
        """\
stitched(0.weight, 0.bias, l_args_0_, 2.weight, 2.bias)
segment_0 = segment_0(l_args_0_, 0.weight, 0.bias)
getitem = getitem(segment_0, 0)
segment_1 = segment_1(getitem, 2.weight, 2.bias)
getitem_1 = getitem(segment_1, 0)
return (getitem_1,)

segment_0(l_args_0_, 0.weight, 0.bias)
input_1 = linear(l_args_0_, 0.weight, 0.bias)
input_2 = relu(input_1, inplace=False)
return (input_2,)

segment_1(input_2, 2.weight, 2.bias)
input_3 = linear(input_2, 2.weight, 2.bias)
return (input_3,)""",
    )


def test_a_value_that_nobody_reads_later_does_not_leave_its_segment() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.method("sin", builder.x)
    second = builder.method("cos", first)
    third = builder.method("relu", second)
    stitched = cut(builder.finish(third).gm, "relu")
    (returned,) = segment(stitched, 0).graph.output_node().args
    assert [node.name for node in returned] == ["cos"]  # type: ignore[union-attr]  # a tuple


def test_a_value_that_skips_a_segment_does_not_pass_through_it() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.method("sin", builder.x)
    builder.method("cos", builder.x)
    third = builder.method("relu", first)
    stitched = cut(builder.finish(third).gm, "cos", "relu")
    assert [node.name for node in segment(stitched, 1).graph.find_nodes(op="placeholder")] == ["l_x_"]
    assert segment(stitched, 1).graph.output_node().args == ((),)


def test_a_tuple_crosses_as_its_elements() -> None:
    builder = GraphBuilder(batch=2, width=4)
    pair = builder.method("chunk", builder.x, 2, -1)
    gm = builder.finish(builder.call(torch.cat, pair, -1)).gm
    assert_expected_inline(
        written_segments(cut(gm, "cat")),
        """\
stitched(l_x_)
segment_0 = segment_0(l_x_)
getitem = getitem(segment_0, 0)
getitem_1 = getitem(segment_0, 1)
segment_1 = segment_1(getitem, getitem_1)
getitem_2 = getitem(segment_1, 0)
return (getitem_2,)

segment_0(l_x_)
chunk = l_x_.chunk(2, -1)
getitem = getitem(chunk, 0)
getitem_1 = getitem(chunk, 1)
return (getitem, getitem_1)

segment_1(item_0_of_chunk, item_1_of_chunk)
cat = cat((item_0_of_chunk, item_1_of_chunk), -1)
return (cat,)""",
    )


def test_constants_known_while_tracing_are_written_into_their_reader() -> None:
    builder = GraphBuilder(batch=2, width=4)
    rows = builder.method("size", builder.x, 0)
    mixed = builder.call(lambda x: (x + 1, None, "text", 2.5, True), builder.x)
    gm = builder.finish(builder.call(lambda *values: values[1][0] * values[0], rows, mixed)).gm
    reader = body_nodes(gm.graph)[-1].name
    copy = node_of(segment(cut(gm, reader), 1), reader)
    assert copy.args[0] == 2
    assert copy.args[1][1:] == (None, "text", 2.5, True)  # type: ignore[index]  # a tuple
    assert isinstance(copy.args[1][0], fx.Node)  # type: ignore[index]  # a tuple


def test_the_stitched_module_returns_what_the_original_returned_in_its_structure() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.method("sin", builder.x)
    second = builder.method("cos", first)
    gm = builder.finish(second).gm
    gm.graph.output_node().args = ((second, [first, second], {"input": builder.x}, None, 3),)
    gm.recompile()
    x = torch.ones(2, 4)
    expected, found = gm(x), cut(gm, "cos")(x)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    assert all(map(identical, pytree.tree_leaves(found), pytree.tree_leaves(expected)))
    assert found[2]["input"] is x
    assert found[0] is found[1][1]


def test_inputs_keep_their_names_order_and_defaults() -> None:
    (graph,) = graphs_of("residual")
    stitched = cut(graph.gm, *possible_cuts(graph.gm))
    pairs = zip(
        stitched.graph.find_nodes(op="placeholder"), graph.gm.graph.find_nodes(op="placeholder"), strict=True
    )
    assert all((new.name, new.target, new.args) == (old.name, old.target, old.args) for new, old in pairs)


def test_an_input_that_no_segment_reads_stays_an_input() -> None:
    builder = GraphBuilder(batch=2, width=4)
    builder.input("spare", 2)
    gm = builder.finish(builder.method("cos", builder.method("sin", builder.x))).gm
    assert [n.name for n in cut(gm, "cos").graph.find_nodes(op="placeholder")] == ["l_x_", "l_spare_"]


def test_an_attribute_is_read_anew_in_each_segment_and_shared_with_the_original() -> None:
    builder = GraphBuilder(batch=2, width=4)
    constant = builder.constant(torch.arange(4.0))
    first = builder.call(torch.mul, builder.x, constant)
    second = builder.call(torch.add, first, constant)
    gm = builder.finish(second, constant).gm
    stitched = cut(gm, "add")
    held = gm.get_buffer("_tensor_constant0")
    assert all(segment(stitched, index).get_buffer("_tensor_constant0") is held for index in range(2))
    assert stitched(torch.ones(2, 4))[1] is held


def test_a_segment_holds_only_the_attributes_that_it_reads() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.call(torch.mul, builder.x, builder.constant(torch.ones(4)))
    second = builder.call(torch.add, first, builder.constant(torch.ones(4)))
    stitched = cut(builder.finish(second).gm, "add")
    held = [[name for name, _ in segment(stitched, i).named_buffers()] for i in range(2)]
    assert held == [["_tensor_constant0"], ["_tensor_constant1"]]


# ------------------------------------------------------------------------------------- spans of state


def test_a_cut_inside_autocast_closes_the_span_and_opens_it_again() -> None:
    builder = GraphBuilder(batch=2, width=4)
    handle = builder.enter_autocast()
    product = builder.call(torch.mm, builder.x, builder.parameter("a", "weight", 4, 4))
    again = builder.call(torch.mm, product, builder.parameter("b", "weight", 4, 4))
    builder.exit_autocast(handle)
    gm = builder.finish(builder.method("float", again)).gm
    assert_expected_inline(
        written_segments(cut(gm, "mm_1")),
        """\
stitched(l_x_, a.weight, b.weight)
segment_0 = segment_0(l_x_, a.weight)
getitem = getitem(segment_0, 0)
segment_1 = segment_1(getitem, b.weight)
getitem_1 = getitem(segment_1, 0)
return (getitem_1,)

segment_0(l_x_, a.weight)
_enter_autocast = _enter_autocast(cpu, torch.bfloat16, True, None)
mm = mm(l_x_, a.weight)
suspended__enter_autocast = _exit_autocast(_enter_autocast)
return (mm,)

segment_1(mm, b.weight)
_enter_autocast = _enter_autocast(cpu, torch.bfloat16, True, None)
mm_1 = mm(mm, b.weight)
_exit_autocast = _exit_autocast(_enter_autocast)
float_1 = mm_1.float()
return (float_1,)""",
    )


def test_nested_autocast_spans_are_closed_inside_out_and_opened_outside_in() -> None:
    (graph,) = graphs_of("nested_autocast")
    linears = [node.name for node in body_nodes(graph.gm.graph) if node.target is torch._C._nn.linear]
    stitched = cut(graph.gm, linears[1])
    first, second = (body_nodes(segment(stitched, index).graph) for index in range(2))
    entered = [node for node in first if "_enter_autocast" in str(node.target)]
    left = [node for node in first if "_exit_autocast" in str(node.target)]
    assert [node.args[0] for node in left] == entered[::-1]
    entered_again = [node for node in second if "_enter_autocast" in str(node.target)]
    assert [(node.name, node.args) for node in entered_again] == [(n.name, n.args) for n in entered]
    assert second[:2] == entered_again


def test_a_cut_in_front_of_a_span_leaves_it_whole() -> None:
    builder = GraphBuilder(batch=2, width=4)
    first = builder.method("sin", builder.x)
    handle = builder.enter_autocast()
    product = builder.call(torch.mm, first, builder.parameter("a", "weight", 4, 4))
    builder.exit_autocast(handle)
    gm = builder.finish(builder.method("float", product)).gm
    stitched = cut(gm, handle.name)
    assert [node.name for node in body_nodes(segment(stitched, 0).graph)] == ["sin"]
    assert len(body_nodes(segment(stitched, 1).graph)) == 4


def test_a_cut_inside_no_grad_turns_gradients_on_between_the_segments() -> None:
    builder = GraphBuilder(batch=2, width=4)
    builder.set_grad_enabled(False)
    first = builder.method("sin", builder.x)
    second = builder.method("cos", first)
    builder.set_grad_enabled(True)
    gm = builder.finish(second).gm
    stitched = cut(gm, "cos")
    modes = [
        [
            node.args[0]
            for node in body_nodes(segment(stitched, i).graph)
            if node.target is torch._C._set_grad_enabled
        ]
        for i in range(2)
    ]
    assert modes == [[False, True], [False, True]]


def test_no_global_state_leaks_out_of_the_stitched_module() -> None:
    for name in ("nested_autocast", "grad_mode_spans"):
        (graph,) = graphs_of(name)
        cut(graph.gm, *possible_cuts(graph.gm))(*map(copied, graph.inputs))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------------------------------------------- mutation


def test_the_caller_sees_what_is_written_to_an_input() -> None:
    builder = GraphBuilder(batch=2, width=4)
    builder.method("add_", builder.x, 1.0)
    gm = builder.finish(builder.method("sin", builder.x)).gm
    x = torch.zeros(2, 4)
    cut(gm, "sin")(x)
    assert torch.equal(x, torch.ones(2, 4))


def test_a_view_of_a_mutated_tensor_is_taken_anew_behind_a_cut() -> None:
    builder = GraphBuilder(batch=2, width=4)
    value = builder.call(torch.add, builder.x, 1.0)
    view = builder.method("view", value, -1)
    half = builder.method("sin", builder.x)
    builder.method("mul_", view, 0.0)
    gm = builder.finish(builder.call(torch.add, value, half)).gm
    stitched = cut(gm, "sin", "mul_")
    last = segment(stitched, 2)
    assert [node.name for node in last.graph.find_nodes(op="placeholder")] == ["add", "sin"]
    assert "view" in [node.name for node in body_nodes(last.graph)]
    assert torch.equal(stitched(torch.zeros(2, 4))[0], torch.zeros(2, 4))


def test_what_a_segment_writes_to_and_returns_crosses_as_the_tensor_that_it_got() -> None:
    builder = GraphBuilder(batch=2, width=4)
    value = builder.call(torch.mul, builder.x, builder.parameter("a", "scale", 4))
    written = builder.method("add_", value, 1.0)
    again = builder.method("mul_", written, 2.0)
    total = builder.call(torch.add, again, value)
    gm = builder.finish(total, again).gm
    stitched = cut(gm, "add_", "mul_", "add")
    handed_out = [len(segment(stitched, i).graph.output_node().all_input_nodes) for i in range(4)]
    assert handed_out == [1, 0, 0, 1]
    last = segment(stitched, 3)
    assert [node.name for node in last.graph.find_nodes(op="placeholder")] == ["mul"]


def test_what_was_written_to_an_input_and_returned_is_the_input_itself() -> None:
    builder = GraphBuilder(batch=2, width=4)
    written = builder.method("add_", builder.x, 1.0)
    stitched = cut(builder.finish(builder.method("sin", builder.x), written).gm, "sin")
    x = torch.zeros(2, 4)
    assert stitched(x)[1] is x


def test_an_input_that_came_to_require_grad_by_a_write_is_not_detached() -> None:
    builder = GraphBuilder(batch=2, width=4)
    scaled = builder.method("mul_", builder.x, builder.parameter("a", "scale", 4))
    graph = builder.finish(builder.call(torch.mul, scaled, builder.parameter("b", "scale", 4)))
    stitched = cut(graph.gm, "mul")
    assert stitched.graph.find_nodes(op="call_method", target="detach") == []


def test_a_segment_gets_a_copy_of_what_a_later_one_writes_to() -> None:
    builder = GraphBuilder(batch=2, width=4)
    value = builder.call(torch.mul, builder.x, builder.parameter("a", "scale", 4))
    read = builder.call(torch.mul, value, builder.parameter("b", "scale", 4))
    builder.method("add_", value, 1.0)
    gm = builder.finish(builder.call(torch.add, read, value)).gm
    stitched = cut(gm, "mul_1", "add_")
    clones = [node for node in stitched.graph.nodes if node.op == "call_method"]
    assert [str(node.target) for node in clones] == ["clone"]
    (call,) = clones[0].users
    assert call.target == segment_name(1)


def test_what_a_segment_writes_to_its_copy_reaches_the_tensor_itself() -> None:
    builder = GraphBuilder(batch=2, width=4)
    value = builder.call(torch.mul, builder.x, builder.parameter("a", "scale", 4))
    read = builder.call(torch.mul, value, builder.parameter("b", "scale", 4))
    builder.method("add_", value, 1.0)
    last = builder.method("mul_", value, 3.0)
    graph = builder.finish(builder.call(torch.add, read, last))
    stitched = cut(graph.gm, "mul_1", "mul_")
    kept = [str(node.target) for node in stitched.graph.nodes if node.op == "call_method"]
    assert kept == ["clone", "copy_"]
    inputs = list(real_inputs(graph))
    expected = graph.gm(*(value.detach() for value in inputs))
    assert all(map(torch.equal, stitched(*(value.detach() for value in inputs)), expected))


def test_what_is_never_written_to_is_never_copied() -> None:
    for name in ("residual", "chunks", "nested_autocast", "recurrence", "integers"):
        (graph,) = graphs_of(name)
        stitched = cut(graph.gm, *possible_cuts(graph.gm))
        assert stitched.graph.find_nodes(op="call_method", target="clone") == []
        assert stitched.graph.find_nodes(op="call_method", target="copy_") == []


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


def test_a_parameter_whose_view_is_taken_anew_behind_a_cut_is_not_detached() -> None:
    # the view is taken in front of the cut, and again behind it, since what it views was written to
    builder = GraphBuilder(batch=2, width=4)
    weight = builder.parameter("a", "weight", 4, 4)
    builder.set_grad_enabled(False)
    builder.method("mul_", weight, 0.5)
    builder.set_grad_enabled(True)
    view = builder.method("t", weight)
    value = builder.method("sin", builder.x)
    stitched = cut(builder.finish(builder.call(torch.mm, value, view)).gm, "mm")
    assert stitched.graph.find_nodes(op="call_method", target="detach") == []


# ------------------------------------------------------------------------------------------ randomness


def test_dropout_masks_and_later_draws_are_those_of_the_uncut_graph() -> None:
    (graph,) = graphs_of("random_numbers")
    stitched = cut(graph.gm, *possible_cuts(graph.gm))
    torch.manual_seed(3)
    expected = graph.gm(*graph.inputs), torch.rand(3)
    torch.manual_seed(3)
    found = stitched(*graph.inputs), torch.rand(3)
    assert all(map(torch.equal, pytree.tree_leaves(found), pytree.tree_leaves(expected)))


# ------------------------------------------------------------------------------------------- metadata


def copies_of(stitched: fx.GraphModule, count: int) -> dict[str, fx.Node]:
    return {node.name: node for i in range(count) for node in body_nodes(segment(stitched, i).graph)}


def test_nodes_keep_stack_traces_policies_and_example_values() -> None:
    snippet = SNIPPETS["residual"]
    graph = trace(snippet.model(), *snippet.inputs())
    for index, node in enumerate(body_nodes(graph.gm.graph)):
        node.meta["recompute"] = index
        node.meta["custom"] = {"mine": index}
    places = possible_cuts(graph.gm)
    copies = copies_of(cut(graph.gm, *places), len(places) + 1)
    for node in body_nodes(graph.gm.graph):
        copy = copies[node.name]
        assert "in residual" in node.meta["stack_trace"]
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "custom"):
            assert copy.meta.get(key) == node.meta.get(key)
        assert copy.meta["example_value"] is node.meta["example_value"]


def test_inputs_of_the_whole_and_of_segments_keep_their_sources() -> None:
    (graph,) = graphs_of("residual")
    places = possible_cuts(graph.gm)
    stitched = cut(graph.gm, *places)
    sources = {n.name: n._dynamo_source for n in graph.gm.graph.find_nodes(op="placeholder")}
    assert None not in sources.values()
    modules = [stitched, *(segment(stitched, index) for index in range(len(places) + 1))]
    seen = set()
    for module in modules:
        for node in module.graph.find_nodes(op="placeholder"):
            assert node._dynamo_source is sources.get(node.name)
            seen.add(node.name)
    assert set(sources) <= seen


def test_the_meta_of_the_graph_reaches_every_segment() -> None:
    (graph,) = graphs_of("residual")
    assert "dynamo_compile_id" in graph.gm.meta
    stitched = cut(graph.gm, possible_cuts(graph.gm)[0])
    for module in (stitched, segment(stitched, 0), segment(stitched, 1)):
        assert module.meta["dynamo_compile_id"] is graph.gm.meta["dynamo_compile_id"]
    assert hasattr(segment(stitched, 0), "_param_name_to_source") == hasattr(
        graph.gm, "_param_name_to_source"
    )


def test_the_values_that_cross_carry_the_example_values_that_tracing_left() -> None:
    (graph,) = graphs_of("chunks")
    stitched = cut(graph.gm, *possible_cuts(graph.gm))
    originals = [
        leaf for n in graph.gm.graph.nodes for leaf in pytree.tree_leaves(n.meta.get("example_value"))
    ]
    tensors = [id(leaf) for leaf in originals if isinstance(leaf, Tensor)]
    handed = [node.meta["example_value"] for node in stitched.graph.nodes if "getitem" in node.name]
    assert handed
    assert all(id(value) in tensors for value in handed)


# ------------------------------------------------------------------------------------------ work budget


def test_nothing_is_run_to_learn_a_shape() -> None:
    (graph,) = graphs_of("residual")
    plan = cut_before(graph.gm, *possible_cuts(graph.gm))
    with torch.profiler.profile(acc_events=True) as profile:
        partition(graph.gm, plan)
    assert [event.name for event in profile.events() if event.name.startswith("aten::")] == []


def nodes_visited(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a node is copied or asked for its inputs while a chain of layers is cut at each layer."""
    builder = GraphBuilder(batch=2, width=4)
    value = builder.x
    for index in range(layers):
        value = builder.call(torch.mm, value, builder.parameter(f"layers.{index}", "weight", 4, 4))
    gm = builder.finish(value).gm
    plan = cut_before(gm, *(node.name for node in body_nodes(gm.graph)[1:]))
    visits = 0
    inputs = fx.Node.all_input_nodes.fget  # type: ignore[attr-defined]  # a property
    copy = fx.Graph.node_copy

    def counted(node: fx.Node) -> list[fx.Node]:
        nonlocal visits
        visits += 1
        found: list[fx.Node] = inputs(node)
        return found

    def counted_copy(*args: Any) -> fx.Node:
        nonlocal visits
        visits += 1
        return copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fx.Node, "all_input_nodes", property(counted))
        patch.setattr(fx.Graph, "node_copy", counted_copy)
        partition(gm, plan)
    return visits


def test_work_grows_linearly_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    few, twice, thrice = (nodes_visited(20 * k, monkeypatch) for k in (1, 2, 3))
    assert thrice - twice == twice - few


# ------------------------------------------------------------------------------------- shapes that vary


def test_symbols_in_the_shapes_of_a_segments_inputs_are_inputs_too() -> None:
    graph = trace(
        Model(lambda m, x: m.layers[1](m.layers[0](x).relu()) * x.shape[0]), torch.ones(3, 4), dynamic=True
    )
    relu = next(n.name for n in body_nodes(graph.gm.graph) if "relu" in n.name)
    stitched = cut(graph.gm, relu)
    kinds = [
        type(n.meta["example_value"]).__name__
        for n in segment(stitched, 1).graph.find_nodes(op="placeholder")
    ]
    assert kinds[0] == "SymInt"


def test_a_symbolic_float_is_computed_again_where_it_is_read() -> None:
    # AOTAutograd takes no symbolic float as an input of a graph with a backward
    (graph,) = graphs_of("dynamic_float")
    places = possible_cuts(graph.gm)
    stitched = cut(graph.gm, *places)
    for index in range(len(places) + 1):
        for node in segment(stitched, index).graph.find_nodes(op="placeholder"):
            assert not isinstance(node.meta["example_value"], torch.SymFloat)


def test_what_is_computed_again_is_so_in_front_of_a_transform_that_reads_it() -> None:
    def function(model: Model, x: Tensor) -> Tensor:
        value = model.layers[0](x)
        with torch.no_grad():
            view = value.view(-1)
        grown: Tensor = torch.func.grad(lambda rows: rows.sin().sum())(view)
        out: Tensor = model.layers[1](value)
        return out + grown.view(x.shape)

    graph = trace(Model(function), torch.ones(4, 4))
    stitched = cut(graph.gm, *possible_cuts(graph.gm))
    assert torch.equal(stitched(*graph.inputs)[0], graph.gm(*graph.inputs)[0])


def test_a_graph_without_gradient_can_be_cut() -> None:
    with torch.no_grad():
        graph = trace(Model(lambda m, x: F.relu(m.layers[0](x))), torch.ones(3, 4))
        stitched = cut(graph.gm, *possible_cuts(graph.gm))
        assert torch.equal(stitched(*graph.inputs)[0], graph.gm(*graph.inputs)[0])
