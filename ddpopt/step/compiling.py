"""Compile the graph of a step with a Dynamo backend, so that its collectives start early.

Inductor moves operations that free no memory, such as a weight's gradient, behind all others; its passes that
do so are off while a step is compiled, and it fuses nothing across collectives and other writing operators.
It generates code for numbers in a graph only where they are sizes, so changing numbers become tensors.

Invariant: settings of torch are changed only while a backend compiles, and are then as before.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    get_custom_graph_passes,
    get_hash_for_files,
)
from torch._inductor.virtualized import V
from torch.fx.passes import _tensorify_python_scalars

from ddpopt.dynamo.backend import find_compiler
from ddpopt.graph import numbers
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import CompilerFn, body_nodes, storages
from ddpopt.inline.inductor import may_call_inductor
from ddpopt.step.schedule import Schedule, Sections

MOVING: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_all_reduces_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "dedup_reduce_scatters": False,
    "_micro_pipeline_tp": False,
    # from torch 2.14 on, where the first is on by default
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.collective_bucketing": False,
    "aten_distributed_optimizations.insert_overlap_deps": False,
}
"""Inductor's passes that move, merge or order what a step has placed, with the value that turns them off."""


def compile_step(
    gm: fx.GraphModule, inputs: Sequence[Any], backend: str | CompilerFn, *, keeps_rounding: bool = False
) -> Callable[..., Any]:
    """Compile the graph of a step, while Dynamo compiles.

    Args:
        gm: the graph, with its collectives.
        inputs: its inputs.
        backend: a Dynamo backend.
        keeps_rounding: whether Inductor rounds where the graph converts to a narrower dtype and back, as in
            eager. By default it leaves that out, so that what a compression loses would be zero.

    Returns:
        A function of the graph's inputs.
    """
    compiler = find_compiler(backend)
    _relax_views(gm)
    # it would take the numbers for constants
    kept = patch.object(_tensorify_python_scalars, "_is_tensorify_enabled", lambda: False)
    with (
        kept,
        _settings(compiler, keeps_rounding=keeps_rounding),
        V.set_choices_handler(Sections()),
        torch.no_grad(),
    ):
        return compiler(gm, [*inputs])


def _settings(compiler: CompilerFn, *, keeps_rounding: bool) -> contextlib.AbstractContextManager[None]:
    """Settings under which Inductor, if a backend calls it, compiles a step."""
    if not may_call_inductor(compiler):
        return contextlib.nullcontext()
    # the code of traced functions is part of the key under which Inductor keeps traces on disk
    traced = {"ddpopt.graph.numbers.with_tensors": inspect.getsource(numbers)}
    first = get_custom_graph_passes(config.pre_grad_custom_pass)
    last = get_custom_graph_passes(config.post_grad_custom_post_pass)
    settings: dict[str, Any] = {
        **_passes_off(),
        "emulate_precision_casts": keeps_rounding or config.emulate_precision_casts,
        "pre_grad_custom_pass": [*first, NumbersAsTensors()],
        "post_grad_custom_post_pass": [*last, Schedule()],
        "unsafe_marked_cacheable_functions": {**config.unsafe_marked_cacheable_functions, **traced},
    }
    patched: contextlib.AbstractContextManager[None] = config.patch(settings)
    return patched


class NumbersAsTensors(CustomGraphPass):
    """Reads no number from a tensor; a pass of Inductor, which other backends do not run."""

    def __call__(self, graph: fx.Graph) -> None:
        """Use tensors for the numbers of a graph."""
        numbers.numbers_as_tensors(graph)

    def uuid(self) -> Any:
        """A hash of the code that the graph depends on."""
        return get_hash_for_files((numbers.__file__,))


def _passes_off() -> dict[str, Any]:
    """The settings of this release of torch with which Inductor moves and merges no collective."""
    known = config.get_config_copy()
    return {name: value for name, value in MOVING.items() if name in known}


def _relax_views(gm: fx.GraphModule) -> None:
    """Make views reshapes, which also take the strides that a compiler chooses.

    Views of memory that is written to stay views: a copy would not see the writes.
    """
    written = {key: None for node in body_nodes(gm.graph) for key in written_storages(node)}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if not any(key in written for key in storages(node)):
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
