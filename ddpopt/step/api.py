"""``ddpopt.train_step``: a train step that runs as one graph.

Invariant: a step runs the graph that was captured for its inputs, and leaves everything as the undecorated
function would; or an error says why not, and nothing has changed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpopt.errors import UnsupportedError
from ddpopt.graph.nodes import CompilerFn
from ddpopt.step.overrides import Override, Transform
from ddpopt.step.parallel import Parallel
from ddpopt.step.settings import WHAT, Fallback, Fusion, StepSettings
from ddpopt.step.state import StatefulTransform
from ddpopt.torch_private import STEP, require_supported


def train_step(
    function: Callable[..., Any] | None = None,
    *,
    backend: str | CompilerFn = "inductor",
    fusion: Fusion = "concat",
    overrides: Sequence[Override] = (),
    transform: Transform | StatefulTransform | None = None,
    fallback: Fallback | None = None,
    parallel: Parallel | None = None,
) -> Any:
    """Run a train step as one graph: forward, loss, backward, all-reduces and optimizer.

    Args:
        function: ordinary eager code of a step with modules and optimizers, as arguments or as variables that
            it reads. Without it, a decorator is returned.
        backend: name of a Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        fusion: ``"concat"``: a bucket's gradients are sent in one buffer; ``"coalesced"``: in one operation.
        overrides: keep submodules out of the graph, or change the captured graph.
        transform: a pass over the whole graph, collectives included, whose nodes are named after their
            buckets (``bucket_0_all_reduce``). It runs once for each graph, and returns a graph or None. A
            `StatefulTransform` may also add tensors, which are kept from step to step.
        fallback: ``"inline"``: a step that cannot be captured runs in eager around `ddpopt.compile`. By
            default it raises.
        parallel: how modules without DDP are trained, such as ``ddpopt.Replicate()``; by default each is in
            `DistributedDataParallel`, which says how.

    Returns:
        A `TrainStep`, called as the function is.

    Raises:
        UsageError: an argument cannot be used.
        UnsupportedError: torch is older than 2.13.
    """
    if torch.__version__ < (2, 13):  # type: ignore[operator]  # torch's version compares with tuples
        raise UnsupportedError(f"{WHAT}: expected torch >= 2.13, got {torch.__version__}; use ddpopt.compile")
    require_supported(STEP)
    settings = StepSettings(backend, fusion, fallback, tuple(overrides), transform, parallel)
    from ddpopt.step.train import TrainStep  # it needs private names that older releases lack

    if function is None:
        return functools.partial(TrainStep, settings=settings)
    return TrainStep(function, settings)
