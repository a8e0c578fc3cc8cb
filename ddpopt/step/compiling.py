"""Compile the graph of a step with a Dynamo backend, so that its collectives start where the graph says.

Inductor moves operations that free no memory, such as a weight's gradient, behind all others; its passes that
do so are off while a step is compiled. And it generates code for numbers in a graph only where they are
sizes, so changing numbers become tensors.

Invariant: settings of torch are changed only while a backend compiles, and are then as before.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch.fx.passes import _tensorify_python_scalars

from ddpopt.dynamo.backend import configured, find_compiler
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import CompilerFn, body_nodes, storages
from ddpopt.inline.inductor import is_inductor
from ddpopt.step.capture import Captured
from ddpopt.step.numbers import as_tensors
from ddpopt.step.schedule import Schedule

IN_ORDER: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "post_grad_custom_post_pass": Schedule(),
}


def compile_step(captured: Captured, backend: str | CompilerFn) -> Callable[..., Any]:
    """Compile a captured step.

    Args:
        captured: the step, with its collectives.
        backend: a Dynamo backend.

    Returns:
        A function of the graph's inputs.
    """
    compiler, gm = find_compiler(backend), captured.gm
    fakes = [*captured.fakes]
    numbers = sum(isinstance(each, torch.SymFloat) for each in fakes)
    inductor = is_inductor(compiler)
    if inductor:
        compiler = configured(compiler, options=IN_ORDER)
        as_tensors(gm, numbers)
        for place in range(numbers):
            fakes[place] = fakes[-1].fake_mode.from_tensor(
                torch.zeros((), dtype=torch.float64), static_shapes=True
            )
    _relax_views(gm)
    with _settings(captured):
        run = compiler(gm, fakes)
    return functools.partial(_with_tensors, run, numbers) if inductor else run


def _relax_views(gm: fx.GraphModule) -> None:
    """Make views reshapes, which also take the strides that a compiler chooses.

    Views of memory that is written to stay views: a copy would not see the writes.
    """
    written = {key: None for node in body_nodes(gm.graph) for key in written_storages(node)}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if not any(key in written for key in storages(node)):
            node.target = torch.ops.aten.reshape.default
    gm.recompile()


def _with_tensors(run: Callable[..., Any], numbers: int, *inputs: Any) -> Any:
    tensors = [torch.tensor(value, dtype=torch.float64) for value in inputs[:numbers]]
    return run(*tensors, *inputs[numbers:])


@contextlib.contextmanager
def _settings(captured: Captured) -> Iterator[None]:
    mode = captured.fakes[-1].fake_mode
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(TracingContext(mode)))
        # it would take the numbers for constants
        stack.enter_context(patch.object(_tensorify_python_scalars, "_is_tensorify_enabled", lambda: False))
        yield
