"""Entry points from torch.compile: `compile` a DDP module, or use `replacing_ddp_optimizer` in a block."""

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.ddp.fit import ddp_within, require_compilable
from ddpopt.ddp.impose import impose_decided, imposed_plan
from ddpopt.ddp.reducer import outside_dynamo
from ddpopt.ddp.tensor_parallel import keep_local
from ddpopt.dynamo import hook
from ddpopt.dynamo.backend import Buckets, DdpoptBackend, Fallback, configured, is_ddpopt
from ddpopt.errors import UnsupportedError, UsageError, require_choice
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.plan import Plan, Strategy
from ddpopt.planning.stored import read
from ddpopt.tuning.records import Link, Profile

TORCHS_OPTIONS = ("guard_filter_fn", "use_aoti")
"""Names in ``options`` that ``torch.compile`` itself uses."""
logger = logging.getLogger("ddpopt")


def compile(  # the public name, as in torch.compile
    ddp_model: nn.Module,
    *,
    backend: str | CompilerFn = "inductor",
    strategy: Strategy = "auto",
    buckets: Buckets = "plan",
    plan: Plan | str | os.PathLike[str] | None = None,
    fallback: Fallback | None = "eager",
    **options: Any,
) -> Any:
    """Compile a DDP module so that its gradients still overlap with backward.

    Args:
        ddp_model: a ``DistributedDataParallel`` module, or a wrapper that contains one (Fabric's, your own);
            the code of a wrapper is compiled too.
        backend: name of a Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        strategy: ``"split"``: one compiled segment for each time a bucket completes; ``"inline"``: one
            compiled graph, whose backward hands the gradients to DDP; ``"auto"``: like ``"inline"``. A graph
            that cannot be compiled inline is split, and the reason is logged (as a warning if ``"inline"``
            was requested).
        buckets: ``"plan"``: the reducer follows the plan, from the first iteration; ``"ddp"``: the reducer
            is not changed; ``"open"``: like ``"plan"``, but compiled for any buckets, so that others can be
            imposed later; ``"auto"``: the first steps are measured, and the reducer gets the buckets that
            are expected to make a step shortest. If steps then take longer, it gets the plan's again. Both
            decisions are logged at INFO.
        plan: buckets to use, as a plan, or a file that ``ddpopt tune`` or `Plan.to_json` wrote; the same on
            every rank. Only with ``buckets="plan"``.
        fallback: ``"eager"``: where a graph is cut and the backend fails for a segment, that segment runs
            uncompiled, and a warning names it, its parameters and the error; None: that is an error.
        options: passed to ``torch.compile`` (``dynamic``, ``mode``, …). ``fullgraph`` applies to the module
            inside DDP: its forward must not break. DDP's own Python code cannot be part of a graph.

    Returns:
        A callable like `ddp_model`, with its attributes.

    Raises:
        UsageError: an argument cannot be used.
        UnsupportedError: this release of torch lacks a private name that ddpopt uses, or the module was made
            with ``delay_all_reduce_named_params``.
        PlanMismatchError: `plan` does not fit the module, or differs between ranks.
        InfrastructureError: `plan` was given, and a rank did not make this call in time.
        RuntimeError: Inductor does not know the mode or one of the options; the message is torch's.
    """
    require_choice("buckets", buckets, Buckets)
    ddp = ddp_within(ddp_model)
    require_compilable(ddp)
    if any(_is_compiled(outer) and ddp in outer.modules() for outer in ddp_model.modules()):
        got = f"got {type(ddp_model).__name__}, which is; compile it only here"
        raise UsageError(f"ddp_model: expected a module that is not compiled yet, {got}")
    if plan is not None and buckets != "plan":
        raise UsageError(f"plan: expected buckets='plan' with it, got {buckets!r}; leave one of them out")
    dynamo_backend = checked_backend(backend, strategy, buckets, options, fallback)
    if plan is not None:  # every other argument was checked: from here on something changes
        impose_decided(ddp, lambda: _read_plan(plan, ddp, strategy), LONGEST_WAIT)
    keep_local(ddp.module)

    def compiled(function: Callable[..., Any], **changed: Any) -> Any:
        given = {**options, **changed}
        if "options" in given:  # torch removes its own entries
            given["options"] = dict(given["options"] or {})
        return torch.compile(function, backend=dynamo_backend, **given)

    inner = _compiled_inside(ddp, fullgraph=bool(options.get("fullgraph")))
    inside = None if inner is None else (inner, functools.partial(compiled(_call_inside), inner))
    module = compiled(ddp_model, fullgraph=False)
    if module is ddp_model:
        if buckets == "auto":
            logger.info("ddpopt: nothing is tuned: torch.compile is disabled")
    else:
        dynamo_backend.uninstall_hook()
        module.forward = _uncut(module.forward, inside)
        module.__dict__["_compile"] = functools.partial(
            compile, backend=backend, strategy=strategy, buckets=buckets, fallback=fallback, **options
        )
        module.__class__ = _Compiled
        dynamo_backend.serve(ddp)
    if buckets != "ddp" and imposed_plan(ddp) is None:
        with contextlib.suppress(UnsupportedError):  # reported when a graph is compiled
            dynamo_backend.follow(ddp)
    return module


def checked_backend(
    backend: str | CompilerFn,
    strategy: Strategy,
    buckets: Buckets,
    options: Mapping[str, Any],
    fallback: Fallback | None = "eager",
) -> DdpoptBackend:
    """The Dynamo backend for these arguments of `compile`, which are checked as it says."""
    made = DdpoptBackend(backend, strategy=strategy, buckets=buckets, fallback=fallback)
    own_options = {key: v for key, v in (options.get("options") or {}).items() if key not in TORCHS_OPTIONS}
    configured(made.compiler, mode=options.get("mode"), options=own_options)
    return made


def _read_plan(plan: Plan | str | os.PathLike[str], ddp: Any, strategy: Strategy) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if '"ddpopt_profile"' in read("plan", plan):  # a file of ``ddpopt tune`` says for what its plan was tuned
        profile = Profile.from_file("plan", plan)
        link = Link.from_file("plan", plan)
        profile.require_fit(
            f"plan {os.fspath(plan)}",
            device=(profile.gradients[0].spec.device.partition(":")[0], next(ddp.parameters()).device.type),
            strategy=(profile.strategy, "inline" if strategy == "auto" else strategy),
            ranks=(link.world_size, ddp.process_group.size()),
        )
    return Plan.from_file("plan", plan)


class _Compiled(OptimizedModule):
    """The result of `compile`. Copying or pickling it compiles a copy of the module again."""

    def __reduce__(self) -> Any:
        return self._compile, (self._orig_mod,)


@contextlib.contextmanager
def replacing_ddp_optimizer(*, buckets: Buckets = "plan") -> Iterator[None]:
    """Inside this block Dynamo uses ddpopt's split strategy instead of torch's DDPOptimizer.

    Args:
        buckets: as for `DdpoptBackend`.

    Yields:
        Nothing; all graphs compiled inside the block, with any backend, are cut by ddpopt.

    Raises:
        UsageError: `buckets` is invalid.
    """
    require_choice("buckets", buckets, Buckets)

    def choose(compiler: CompilerFn) -> CompilerFn:
        if is_ddpopt(compiler):
            return compiler
        return DdpoptBackend(compiler, strategy="split", buckets=buckets, graphs_key=choose)

    with hook.replacing(choose):
        yield


def _uncut(
    forward: Callable[..., Any], inside: tuple[nn.Module, Callable[..., Any]] | None
) -> Callable[..., Any]:
    """`forward`, in which torch cuts no graph of any backend, because the reducer follows a plan.

    If `inside` is given, calls of its module go through its callable, as after ``module.compile()``.
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
    """The module inside DDP, if it must be compiled separately: for `fullgraph`, or because Dynamo skips it.

    Raises:
        UsageError: it is already compiled, so `fullgraph` cannot be enforced.
    """
    inner: Any = ddp.module
    while isinstance(inner, DistributedDataParallel):
        inner = inner.module
    if fullgraph and _is_compiled(inner):
        raise UsageError(
            "fullgraph: the module inside DDP is already compiled, so graph breaks in it cannot be "
            "rejected here; pass fullgraph=True where it is compiled, or do not compile it"
        )
    return inner if not _is_compiled(inner) and (fullgraph or _is_skipped(inner)) else None


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _is_skipped(module: nn.Module) -> bool:
    """Whether Dynamo skips the frame of a module's own forward, as it does for torch.nn modules.

    Under a DDP module, whose frames it also skips, nothing would be compiled (pytorch#140416).
    Uses a private name of torch: ``torch._dynamo.trace_rules.check``.
    """
    code = getattr(inspect.getattr_static(type(module), "forward"), "__code__", None)
    return code is not None and trace_rules.check(code)


def _call_inside(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """A frame that Dynamo traces, so that it also traces the torch.nn code that it calls."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch types it not
