"""Each distinct segment is compiled once, with tracing metadata of its own, and computes what it computed."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import fx
from torch._guards import TracingContext

from ddpopt.graph.nodes import CompilerFn, body_nodes
from ddpopt.split.partition import partition
from ddpopt.split.segments import compile_segments, own_tracing_context
from tests.support.graph_builder import GraphBuilder, SmallGraph
from tests.support.tracing import Recorder, cut_before


def layers(*widths: int) -> SmallGraph:
    """One linear map and one activation for each width, which is the layer's output."""
    builder = GraphBuilder(batch=2, width=4)
    value, inputs = builder.x, 4
    for index, width in enumerate(widths):
        weight = builder.parameter(f"layers.{index}", "weight", inputs, width)
        value = builder.method("tanh", builder.call(torch.mm, value, weight))
        inputs = width
    return builder.finish(value)


def compiled(graph: SmallGraph, compiler: CompilerFn) -> tuple[Callable[..., Any], int]:
    """A graph of `layers`, cut in front of each layer but the first."""
    first_nodes = [node.name for node in body_nodes(graph.gm.graph) if node.target is torch.mm][1:]
    stitched = partition(graph.gm, cut_before(graph.gm, *first_nodes))
    reasons = [None, *(f"reason {index}" for index, _ in enumerate(first_nodes, 1))]
    return compile_segments(stitched, graph.example_values, compiler, reasons, share=True)


# --------------------------------------------------------------------------------------------- counting


def test_a_segment_says_why_the_graph_was_cut_before_it() -> None:
    recorder, graph = Recorder(), layers(8, 16)
    vars(graph.gm)["compile_subgraph_reason"] = "the graph's own"
    compiled(graph, recorder)
    first, second = (cast(Any, gm.compile_subgraph_reason) for gm in recorder.graphs)
    assert first == "the graph's own"
    assert second.reason == "ddpopt cuts here so that DDP can overlap: reason 1"
    assert second.user_stack[0].name == "ddpopt"


# ------------------------------------------------------------------------------------ tracing metadata


def test_every_compilation_has_tracing_metadata_of_its_own() -> None:
    parent = TracingContext(None)
    contexts = [parent]

    def noting(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        context = TracingContext.get()
        assert context.fw_metadata is None
        context.fw_metadata = f"metadata of compilation {len(contexts)}"  # type: ignore[assignment]
        contexts.append(context)
        return gm.forward

    with torch._guards.tracing(parent):
        compiled(layers(8, 16, 32), noting)
        assert TracingContext.get() is parent
    assert len({id(context) for context in contexts}) == 4
    assert parent.fw_metadata is None


def test_what_a_compilation_must_share_with_the_others_is_shared() -> None:
    parent = TracingContext(None)
    with torch._guards.tracing(parent), own_tracing_context():
        child = TracingContext.get()
        for name in ("fake_mode", "guards_context", "module_context", "global_context", "tensor_to_context"):
            assert getattr(child, name) is getattr(parent, name)


def test_the_tracing_metadata_comes_back_when_a_compilation_fails() -> None:
    def failing(*_: Any) -> Callable[..., Any]:
        raise RuntimeError("no such operator")

    parent = TracingContext(None)
    with torch._guards.tracing(parent):
        with pytest.raises(RuntimeError, match="no such operator"):
            compiled(layers(4, 8), failing)
        assert TracingContext.get() is parent
