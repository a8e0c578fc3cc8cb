"""Compile the segments of a stitched module, each distinct one once.

Every segment is compiled with its own tracing metadata: AOTAutograd compiles a backward only when it
first runs, and then reads the metadata that its forward left (pytorch#160745).

Invariant: the stitched module computes the same as before; twins share one compilation, unless the backend
ties compiled code to the addresses of its inputs.
"""

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.output_graph import GraphCompileReason
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ddpopt.graph.nodes import SYMBOLIC, CompilerFn, example_value, requires_grad, storages, write_code
from ddpopt.split.twins import signature


def compile_segments(
    stitched: fx.GraphModule,
    example_inputs: Sequence[object],
    compiler: CompilerFn,
    reasons: Sequence[str | None],
    *,
    share: bool,
    failed: Callable[[int, Exception], None] | None = None,
) -> tuple[Callable[..., Any], int]:
    """Compile every segment and replace it with the compiled code.

    Args:
        stitched: the result of `ddpopt.split.partition.partition`; its segments are replaced.
        example_inputs: one value for each placeholder of the stitched module.
        compiler: the backend for each segment.
        reasons: for each segment, why the graph was cut before it (for ``torch._dynamo.explain``); None
            for the first one, which keeps the graph's own.
        share: whether twins may share compiled code.
        failed: called with the number of a segment for which the backend fails, and its error; if it
            returns, the segment runs uncompiled. By default the error is raised.

    Returns:
        The callable, which runs the whole graph and returns a tuple; and the number of compilations.
    """
    compiled: dict[Hashable, Callable[..., Any]] = {}
    placeholders = stitched.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, object] = dict(zip(placeholders, example_inputs, strict=True))
    calls = stitched.graph.find_nodes(op="call_module")
    for number, (node, reason) in enumerate(zip(calls, reasons, strict=True)):
        name = str(node.target)
        segment: fx.GraphModule = getattr(stitched, name)
        inputs = [values[n] if n in values else example_value(n) for n in node.all_input_nodes]
        # a segment without a signature is equal only to itself
        key: Hashable = (signature(segment, inputs) if share else None) or object()
        if key not in compiled:
            if reason is not None:
                frame = traceback.FrameSummary(__file__, 0, "ddpopt")
                why = f"ddpopt cuts here so that DDP can overlap: {reason}"
                segment.compile_subgraph_reason = GraphCompileReason(why, [frame])  # type: ignore[assignment]
            write_code(segment)
            compiled[key] = segment.forward  # the code of before, whatever a backend does to the graph
            try:
                with own_tracing_context(), _own_floats(segment):
                    compiled[key] = compiler(segment, [_for_backend(value) for value in inputs])
            except Exception as error:
                if failed is None or _is_for_dynamo(error):
                    raise
                failed(number, error)
        delattr(stitched, name)
        setattr(stitched, name, compiled[key])
        # an input written with gradient requires grad from then on; its example value is from after the trace
        changed = {key for n in node.all_input_nodes if _is_outdated(n, values) for key in storages(n)}
        for n in [n for n in values if changed and _is_outdated(n, values)]:
            if not changed.isdisjoint(storages(n)):
                del values[n]
    write_code(stitched)
    return stitched.forward, len(compiled)


def _is_for_dynamo(error: Exception) -> bool:
    """Whether an error asks Dynamo to trace again, or to leave the frame alone: no backend's failure does."""
    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def _is_outdated(node: fx.Node, values: Mapping[fx.Node, object]) -> bool:
    """Whether an input requires grad by the end of the graph, but did not when it came."""
    return node in values and requires_grad(example_value(node)) and not requires_grad(values[node])


def _for_backend(value: object) -> object:
    """Move a value from tracing to the fake mode of the backend.

    Dynamo traces under one fake mode and gives its backends another. AOTAutograd would move the value
    itself, but it would read each tensor's gradient, which warns if the tensor is not a leaf.
    """
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    if mode is None or not isinstance(value, FakeTensor) or value.fake_mode is mode:
        return value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return mode.from_tensor(value)


@contextlib.contextmanager
def own_tracing_context() -> Iterator[None]:
    """Give compilations in this block their own tracing metadata, but share fake mode, symbols and guards.

    Uses private parts of torch: ``torch._guards._TLS`` and the fields below.
    """
    parent = TracingContext.try_get()
    if parent is None:
        yield
        return
    child = copy.copy(parent)
    for name in ("fw_metadata", "aot_graph_name", "params_flat", "params_flat_unwrap_subclasses",
                 "params_unwrapped_to_flat_index", "output_strides", "ddp_optimizer_ctx"):  # fmt: skip
        setattr(child, name, None)
    with patch.object(torch._guards._TLS, "tracing_context", child):
        yield


@contextlib.contextmanager
def _own_floats(segment: fx.GraphModule) -> Iterator[None]:
    """Hide the floats of the graph that a segment does not read while it is compiled.

    AOTAutograd turns a float that may change into a tensor. It assumes that tracing specialized each float
    that it does not see, so Dynamo would recompile for each value of that float.
    Uses a private part of torch: the values that ``ShapeEnv`` has for its symbols.
    """
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    known: dict[Any, Any] = getattr(getattr(mode, "shape_env", None), "backed_var_to_val", {})
    bodies = [module for module in segment.modules() if isinstance(module, fx.GraphModule)]
    values = pytree.tree_leaves([example_value(node) for body in bodies for node in body.graph.nodes])
    scalars = [value for value in values if isinstance(value, SYMBOLIC)]
    # the expression as traced: a number that a guard has fixed since has no symbols any more; a nested int's
    # node has no expression
    traced = (getattr(scalar.node, "_expr", None) for scalar in scalars)
    read = {symbol for expression in traced for symbol in getattr(expression, "free_symbols", ())}
    hidden = {s: v for s, v in known.items() if symbol_is_type(s, SymT.FLOAT) and s not in read}
    for symbol in hidden:
        del known[symbol]
    try:
        yield
    finally:
        known.update(hidden)
