"""Dynamo's way into ddpopt: plan a graph, compile it inline or cut it, prove the cuts, tell the reducer.

This is the only module that knows all the others. A graph that ddpopt cannot help (no DDP module running,
nothing to train, a single bucket) is compiled whole, and the reason is logged once at INFO.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.deferral import PendingLogger, active_module
from ddpopt.ddp.impose import defer, imposed_plan
from ddpopt.ddp.reduced import held_parameters
from ddpopt.ddp.reducer import outside_dynamo
from ddpopt.dynamo import hook
from ddpopt.dynamo.quiet import compiling, undisturbed
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.graph.nodes import begins_without_grad
from ddpopt.inline.compile import Sources, compile_inline, lendable, obstacle, together
from ddpopt.inline.inductor import in_order, is_inductor
from ddpopt.judge.judging.association import reassociated_values
from ddpopt.planning.expand_calls import Planned
from ddpopt.planning.facts import parameter_names, parameter_sources
from ddpopt.planning.plan import Plan
from ddpopt.planning.regions import Regions, ends_in_break, plan_for_ddp, plan_for_imposed, specs_by_id
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from ddpopt.split.segments import CompiledSegments, CompilerFn, compile_segments

Buckets = Literal["plan", "ddp"]
Strategy = Literal["split", "inline", "auto"]
TORCHS_OPTIONS = ("guard_filter_fn", "use_aoti")
"""Names in ``options`` that are for ``torch.compile`` itself."""
REPLAYED = "CUDA graphs replay a backward without Python"
RegionsByModule = weakref.WeakKeyDictionary[DistributedDataParallel, Regions]
logger = logging.getLogger("ddpopt")


class DdpoptBackend:
    """A Dynamo backend by whose graphs DDP's buckets leave during backward, on top of another backend.

    Args:
        compiler: name of a registered Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        strategy: as for `compile`.
        buckets: ``"plan"``: the reducer follows ddpopt's plan; ``"ddp"``: the reducer is left alone and
            the graph is cut where its own buckets will fall.
        regions: what is known of each DDP module so far, where several backends serve one module.

    Raises:
        UsageError: an argument is none of these.
    """

    def __init__(
        self,
        compiler: str | CompilerFn = "inductor",
        *,
        strategy: Strategy = "auto",
        buckets: Buckets = "plan",
        regions: RegionsByModule | None = None,
    ) -> None:
        _require("strategy", strategy, Strategy)
        _require("buckets", buckets, Buckets)
        self.__name__ = "ddpopt"
        self.compiler = find_compiler(compiler)
        self.strategy = strategy
        self.buckets = buckets
        # Dynamo is not to cut its graphs a second time, for as long as somebody may compile with this
        self.leave_to_torch = weakref.finalize(self, hook.install(_own))
        self.leave_to_torch.atexit = False
        self._regions = weakref.WeakKeyDictionary() if regions is None else regions

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], **options: Any
    ) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs; `options`, the mode among them, go to the compiler underneath."""
        compiler = configured(self.compiler, **options)
        ddp = active_module()
        if ddp is None:
            _say_once("no DistributedDataParallel forward is running; the graph is compiled whole")
            return compiler(gm, example_inputs)
        if begins_without_grad(gm.graph):
            _say_once("a graph that is called without gradient turns it on; it is compiled whole")
            return compiler(gm, example_inputs)
        with undisturbed():
            planned = self._plan(ddp, gm, example_inputs)
        if planned is None or not planned.plan.buckets:
            _say_whole(planned)
            run = compiler(gm, example_inputs)
        else:
            with compiling():
                run = self._compile(ddp, planned, gm, example_inputs, compiler, options)
        regions = self._regions.get(ddp)
        return run if regions is None or planned is None else regions.watching(planned, example_inputs, run)

    def _compile(
        self,
        ddp: DistributedDataParallel,
        planned: Planned,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        compiler: CompilerFn,
        options: dict[str, Any],
    ) -> Callable[..., Any]:
        several = len(planned.plan.buckets) > 1 or ends_in_break(gm) or planned.completed
        if self.strategy != "split" and several:
            sources = parameter_sources(gm, example_inputs, specs_by_id(ddp))
            replayed = _ties_addresses(self.compiler, options)
            reason = REPLAYED if replayed else obstacle(gm, sources)
            if reason is None:
                return self._inline(ddp, planned, gm, example_inputs, sources, compiler)
            level = logging.WARNING if self.strategy == "inline" else logging.INFO
            _say_once(f"a graph is split and not compiled inline: {reason}", level)
        return self._split(ddp, planned, example_inputs, compiler, options)

    def _inline(
        self,
        ddp: DistributedDataParallel,
        planned: Planned,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        sources: Sources,
        compiler: CompilerFn,
    ) -> Callable[..., Any]:
        completed = {name for segment in planned.plan.segments for name in segment.params}
        lent = [node for node in lendable(gm, sources) if completed.issuperset(sources[node].values())]
        if self.buckets == "ddp" and imposed_plan(ddp) is None:
            # DDP may fill its buckets anew, in the order in which it hears of the gradients
            groups = [[node] for node in lent]
        else:
            groups = together(lent, sources, planned.facts, planned.plan.buckets)
        logger.info("ddpopt: %d buckets, one graph", len(planned.plan.buckets))
        return compile_inline(
            gm, example_inputs, groups, in_order(compiler) if is_inductor(self.compiler) else compiler
        )

    def _split(
        self,
        ddp: DistributedDataParallel,
        planned: Planned,
        example_inputs: Sequence[object],
        compiler: CompilerFn,
        options: dict[str, Any],
    ) -> Callable[..., Any]:
        gm, plan = planned.gm, planned.plan
        with undisturbed():
            stitched = cut(planned, example_inputs, ddp)
        if stitched is gm:
            _say_whole(planned)
            return compiler(gm, example_inputs)
        reasons = [None, *(cut.reason for cut in plan.cuts)]
        share = not _ties_addresses(self.compiler, options)
        compiled = compile_segments(stitched, example_inputs, compiler, reasons, share=share)
        _report(gm, plan, compiled)
        return compiled.call

    def _plan(
        self, ddp: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[object]
    ) -> Planned | None:
        imposed = imposed_plan(ddp)
        if imposed is not None:
            return plan_for_imposed(ddp, imposed, gm, example_inputs)
        try:
            if self.buckets == "ddp":
                return plan_for_ddp(ddp, gm, example_inputs)
            return self.follow(ddp).add(gm, example_inputs)
        except UnsupportedError as error:
            _say_once(f"the reducer cannot follow a plan, so graphs are compiled whole: {error}")
            return None

    def follow(self, ddp: DistributedDataParallel) -> Regions:
        """Have the reducer of `ddp` follow the plan of the graphs that this backend is about to see.

        Returns:
            Where those graphs are to be planned.

        Raises:
            UnsupportedError: this module's reducer cannot follow a plan.
        """
        held_parameters(ddp)  # raises where one was replaced, perhaps since the graph before
        if ddp not in self._regions:
            self._regions[ddp] = Regions(ddp)
        joined = self._regions[ddp].joined
        if ddp.static_graph and ddp._static_graph_delay_allreduce_enqueued:  # True once it had a backward
            _say_once("DDP keeps its buckets: a static graph's first backward settles what is reduced")
        elif not (isinstance(ddp.logger, PendingLogger) and ddp.logger.deferral.decide == joined):
            defer(ddp, joined)
        return self._regions[ddp]


def cut(planned: Planned, example_inputs: Sequence[object], ddp: DistributedDataParallel) -> fx.GraphModule:
    """Cut a graph as planned, and prove that it is still the same program.

    Raises:
        CertificateError: it is not.
    """
    names = parameter_names(planned.gm, example_inputs, specs_by_id(ddp))
    own = {label: name for label, name in names.items() if name not in planned.completed}
    stitched = partition(planned.gm, planned.plan)
    certify(planned.gm, stitched, planned.plan, own)
    return stitched


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

    inner = ddp_model.module
    while isinstance(inner, DistributedDataParallel):
        inner = inner.module
    if options.get("fullgraph") and _is_compiled(inner):
        raise UsageError(
            "fullgraph: the module inside DDP is compiled already, so no break in it can be refused here; "
            "pass fullgraph=True where it is compiled, or do not compile it"
        )
    through = (options.get("fullgraph") or _is_skipped(inner)) and not _is_compiled(inner)
    inside = (inner, functools.partial(compiled(_call_inside), inner)) if through else None
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
    _require("buckets", buckets, Buckets)
    regions: RegionsByModule = weakref.WeakKeyDictionary()

    def choose(compiler: CompilerFn) -> CompilerFn:
        own = _is_ddpopt(compiler)
        return (
            compiler if own else DdpoptBackend(compiler, strategy="split", buckets=buckets, regions=regions)
        )

    with hook.replacing(choose):
        yield


def _uncut(
    forward: Callable[..., Any], inside: tuple[nn.Module, Callable[..., Any]] | None
) -> Callable[..., Any]:
    """`forward`, in which torch cuts no graph, whoever compiles it: the reducer's buckets are a plan's.

    Calls of the module `inside`, if there is one, go through what stands next to it, as after
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


def _is_compiled(module: Any) -> bool:
    """Whether calls of a module run code already that somebody else compiled."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


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


def _require(argument: str, value: str, choice: Any) -> None:
    """Raise UsageError unless `value` is one of the words of a ``Literal``."""
    words = get_args(choice)
    if value not in words:
        *others, last = map(repr, words)
        raise UsageError(f"{argument}: expected {', '.join(others)} or {last}, got {value!r}")


def find_compiler(compiler: str | CompilerFn) -> CompilerFn:
    """Look up a Dynamo backend.

    Raises:
        UsageError: there is none of that name.
    """
    if isinstance(compiler, str):
        try:
            return lookup_backend(compiler)
        except Exception as error:
            raise UsageError(
                f"backend: expected the name of a Dynamo backend, got {compiler!r}; "
                f"known are {', '.join(torch.compiler.list_backends(exclude_tags=()))}"
            ) from error
    if not callable(compiler):
        raise UsageError(f"backend: expected a name or a callable (gm, example_inputs), got {compiler!r}")
    return compiler


def configured(
    compiler: CompilerFn, mode: str | None = None, options: dict[str, Any] | None = None, **others: Any
) -> CompilerFn:
    """A backend with the mode and the options of ``torch.compile``, handed on as torch does.

    Raises:
        RuntimeError: Inductor does not know them; the message is torch's.
    """
    if is_inductor(compiler) and (mode or options):
        wrapper: Any = torch._TorchCompileInductorWrapper
        others["config_patches"] = wrapper(mode, options, dynamic=None).config
    else:
        others.update({key: v for key, v in (("mode", mode), ("options", options)) if v})
    return functools.partial(compiler, **others) if others else compiler


def _own(compiler: CompilerFn) -> CompilerFn | None:
    """What a backend has Dynamo asked: ddpopt's backends cut for themselves, all others are torch's."""
    return compiler if _is_ddpopt(compiler) else None


def _is_ddpopt(compiler: object) -> bool:
    """Whether a backend is ddpopt's, under the wrappers that torch.compile puts around it."""
    while compiler is not None and not isinstance(compiler, DdpoptBackend):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", getattr(compiler, "compiler_fn", None))
    return compiler is not None


def _ties_addresses(compiler: CompilerFn, options: dict[str, Any]) -> bool:
    """Whether compiled code is tied to the addresses of its inputs, as CUDA graphs are."""
    config = options.get("options") or {}
    named = "cudagraph" in getattr(compiler, "__name__", "")
    mode = options.get("mode") in ("reduce-overhead", "max-autotune")
    configured = bool(config.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    return named or mode or configured


def _report(gm: fx.GraphModule, plan: Plan, compiled: CompiledSegments) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    counts = len(plan.buckets), compiled.segments, compiled.distinct
    logger.info("ddpopt: %d buckets, %d segments, %d of them distinct", *counts)
    moved = reassociated_values(gm, plan)
    if moved:
        logger.info("ddpopt: the gradients of these may be summed in another order: %s", ", ".join(moved))


def _say_whole(planned: Planned | None) -> None:
    if planned is not None:
        buckets = len(planned.plan.buckets)
        reasons = (
            "nothing in it is trained",
            "it has a single bucket",
            "one segment completes all its buckets",
        )
        _say_once(f"a graph is compiled whole: {reasons[min(buckets, 2)]}")


@functools.lru_cache(maxsize=256)
def _say_once(reason: str, level: int = logging.INFO) -> None:
    """Log a reason, the first time that it holds."""
    logger.log(level, "ddpopt: %s", reason)


@functools.cache
def _entry_point() -> DdpoptBackend:
    return DdpoptBackend("inductor")


def __getattr__(name: str) -> DdpoptBackend:
    """``ddpopt_backend``, what ``torch.compile(model, backend="ddpopt")`` finds: made when looked up."""
    if name == "ddpopt_backend":
        return _entry_point()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
