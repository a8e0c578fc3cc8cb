"""The ways in from torch.compile: `compile` a DDP module, or `replacing_ddp_optimizer` in a block of code."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.reducer import outside_dynamo
from ddpopt.dynamo import hook
from ddpopt.dynamo.backend import Buckets, DdpoptBackend, RegionsByModule, configured, is_ddpopt
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.strategy import Strategy, require_choice

TORCHS_OPTIONS = ("guard_filter_fn", "use_aoti")
"""Names in ``options`` that are for ``torch.compile`` itself."""


def compile(  # the public name, as in torch.compile
    ddp_model: nn.Module,
    *,
    backend: str | CompilerFn = "inductor",
    strategy: Strategy = "auto",
    buckets: Buckets = "plan",
    **options: Any,
) -> Any:
    """Compile a DDP module so that its gradients still overlap with backward.

    Args:
        ddp_model: a ``DistributedDataParallel`` module.
        backend: name of a Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        strategy: ``"split"``: one compiled segment for each time a bucket completes; ``"inline"``: one
            compiled graph, whose backward hands the gradients to DDP; ``"auto"``: as ``"inline"``. A graph
            that cannot be compiled inline is split, and the reason is logged: as a warning where
            ``"inline"`` was asked for.
        buckets: ``"plan"``: the reducer follows the plan, from the first iteration; ``"ddp"``: the reducer
            is left alone.
        options: passed to ``torch.compile`` (``dynamic``, ``mode``, …). ``fullgraph`` is about the module
            inside: no break in its forward is allowed. DDP's own Python cannot be part of a graph.

    Returns:
        A callable like `ddp_model`, with its attributes.

    Raises:
        UsageError: an argument cannot be used.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UsageError(
            f"ddp_model: expected a DistributedDataParallel module, got {type(ddp_model).__name__}; "
            "wrap the model first: ddpopt.compile(DistributedDataParallel(model))"
        )
    dynamo_backend = DdpoptBackend(backend, strategy=strategy, buckets=buckets)
    own_options = {key: v for key, v in (options.get("options") or {}).items() if key not in TORCHS_OPTIONS}
    configured(dynamo_backend.compiler, mode=options.get("mode"), options=own_options)

    def compiled(function: Callable[..., Any], **changed: Any) -> Any:
        given = {**options, **changed}
        if "options" in given:  # torch takes out what is its own
            given["options"] = dict(given["options"] or {})
        return torch.compile(function, backend=dynamo_backend, **given)

    inner = _compiled_inside(ddp_model, fullgraph=bool(options.get("fullgraph")))
    inside = None if inner is None else (inner, functools.partial(compiled(_call_inside), inner))
    module = compiled(ddp_model, fullgraph=False)
    if module is not ddp_model:
        dynamo_backend.leave_to_torch()
        module.forward = _uncut(module.forward, inside)
        module.__dict__["_compile"] = functools.partial(
            compile, backend=backend, strategy=strategy, buckets=buckets, **options
        )
        module.__class__ = _Compiled
    if buckets == "plan" and imposed_plan(ddp_model) is None:
        with contextlib.suppress(UnsupportedError):  # said when a graph comes
            dynamo_backend.follow(ddp_model)
    return module


class _Compiled(OptimizedModule):
    """What `compile` returns. A copy, also by pickle, is what `compile` returns for a copy of the module."""

    def __reduce__(self) -> Any:
        return self._compile, (self._orig_mod,)


@contextlib.contextmanager
def replacing_ddp_optimizer(*, buckets: Buckets = "plan") -> Iterator[None]:
    """Inside this block Dynamo builds ddpopt's split where it would build torch's DDPOptimizer.

    Args:
        buckets: as for `compile`.

    Yields:
        Nothing; whatever is compiled inside, with any backend, is cut by ddpopt.

    Raises:
        UsageError: `buckets` is neither.
    """
    require_choice("buckets", buckets, Buckets)
    regions: RegionsByModule = weakref.WeakKeyDictionary()

    def choose(compiler: CompilerFn) -> CompilerFn:
        if is_ddpopt(compiler):
            return compiler
        return DdpoptBackend(compiler, strategy="split", buckets=buckets, regions=regions)

    with hook.replacing(choose):
        yield


def _uncut(
    forward: Callable[..., Any], inside: tuple[nn.Module, Callable[..., Any]] | None
) -> Callable[..., Any]:
    """`forward`, in which torch cuts no graph, whoever compiles it: the reducer's buckets are a plan's.

    Calls of the module `inside`, if there is one, go through what is next to it, as after
    ``module.compile()``.
    """

    @outside_dynamo
    def uncut(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(hook.replacing(lambda compiler: compiler))
            if inside is not None:
                stack.enter_context(patch.object(inside[0], "_compiled_call_impl", inside[1]))
            return forward(*args, **kwargs)

    return uncut


def _compiled_inside(ddp: DistributedDataParallel, *, fullgraph: bool) -> nn.Module | None:
    """The module inside DDP if it is compiled by itself: where `fullgraph` is about it, or Dynamo skips it.

    Raises:
        UsageError: somebody else compiled it, so that nobody can be held to `fullgraph`.
    """
    inner: Any = ddp.module
    while isinstance(inner, DistributedDataParallel):
        inner = inner.module
    is_compiled = isinstance(inner, OptimizedModule) or inner._compiled_call_impl is not None
    if fullgraph and is_compiled:
        raise UsageError(
            "fullgraph: the module inside DDP is compiled already, so no break in it can be refused here; "
            "pass fullgraph=True where it is compiled, or do not compile it"
        )
    return inner if not is_compiled and (fullgraph or _is_skipped(inner)) else None


def _is_skipped(module: nn.Module) -> bool:
    """Whether Dynamo steps over the frames of a module's own forward, as it does for torch.nn's.

    Under a DDP module, whose frames it steps over too, nothing would be compiled (pytorch#140416).
    Touches a private name of torch 2.11 to 2.13: ``torch._dynamo.trace_rules.check``.
    """
    code = getattr(inspect.getattr_static(type(module), "forward"), "__code__", None)
    return code is not None and trace_rules.check(code)


def _call_inside(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """A frame that Dynamo traces, and from which it follows into torch.nn."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch types it not
