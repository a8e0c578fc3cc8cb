"""A fault in tracing metadata: each segment's backward finds what another segment's forward recorded.

AOTAutograd compiles a backward when it first runs. Inductor then asks the tracing metadata which of its
inputs nobody needs any more, and reuses their memory (pytorch#160745). Here `reusing` does so at once, so
that it takes no Inductor to see it. Invariant: with the metadata of its own forward, `reusing` computes what
aot_eager does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func as boxed
from torch._guards import TracingContext

from ddpopt.split import segments
from tests.selftest.sites import Site


def shared_metadata(site: Site) -> AbstractContextManager[Any]:
    """Make all segments of a graph store their tracing metadata in one place, where the last one wins."""

    @contextlib.contextmanager
    def shared() -> Iterator[None]:
        context = TracingContext.get()
        before = context.fw_metadata
        yield
        if before is not None and context.fw_metadata is not before:
            site.mark()

    return patch.object(segments, "own_tracing_context", shared)


def reusing(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile like aot_eager, but overwrite what the metadata marks as donated once a backward has read it.

    Uses private parts of torch: ``fw_metadata.bw_donated_idxs`` of a tracing context.
    """
    compiler = aot_autograd(fw_compiler=_as_it_is, bw_compiler=_overwriting)
    return compiler(gm, list(example_inputs))


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return boxed(gm.forward)


def _overwriting(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    metadata: Any = TracingContext.get().fw_metadata
    free = list(metadata.bw_donated_idxs or ())

    def run(*inputs: Any) -> Any:
        results = gm.forward(*inputs)
        with torch.no_grad():
            for place in free:
                inputs[place].zero_()
        return results

    return boxed(run)
