"""The Dynamo backend: the first strategy that can take a graph plans and compiles it; the reducer follows.

A graph that ddpopt cannot help with (no DDP module running, parameters shared by nested DDP modules, nothing
to train, a single bucket or segment, a reducer that cannot follow a plan) is compiled whole, and the reason
is logged once at INFO.
"""

import contextlib
import functools
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.ddp.deferral import active_module, defer, pending, running_modules
from ddpopt.ddp.fit import require_compilable
from ddpopt.ddp.held import held_parameters
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import limits_of, specs_by_id
from ddpopt.ddp.state import state_of
from ddpopt.ddp.tensor_parallel import share_reads
from ddpopt.dynamo import hook
from ddpopt.dynamo.model_graphs import STRATEGIES, ModelGraphs, plan_for_reducer
from ddpopt.dynamo.shown import show_buckets
from ddpopt.errors import UnsupportedError, UsageError, did_you_mean, require_choice
from ddpopt.graph.artifacts import say, show
from ddpopt.graph.nodes import CompilerFn
from ddpopt.graph.state import begins_without_grad
from ddpopt.inline.inductor import is_inductor
from ddpopt.planning.plan import Strategy
from ddpopt.strategies.protocol import Captured, Compilation, Planned, compile_whole
from ddpopt.strategies.quiet import compiling, isolated
from ddpopt.torch_private import require_supported
from ddpopt.tuning.online import tune_while_training

Buckets = Literal["plan", "ddp", "open", "auto"]
Fallback = Literal["eager"]
NAMED = re.compile("ddpopt(?:_(split|inline))?(?:_(aot_eager|eager))?_backend")
"""Attributes of this module that pyproject.toml registers with Dynamo as ``ddpopt``, ``ddpopt-split``, …"""
logger = logging.getLogger("ddpopt")


class DdpoptBackend:
    """A Dynamo backend that lets DDP's buckets leave during backward, on top of another backend.

    Args:
        backend: name of a registered Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        strategy: as for `ddpopt.compile`.
        buckets: ``"plan"``: the reducer follows ddpopt's plan; ``"ddp"``: the reducer is not changed, and
            gradients leave in its own buckets; ``"open"``: like ``"plan"``, but compiled for any buckets, so
            that others can be imposed later: gradients are handed over one by one; ``"auto"``: like
            ``"open"``, and the buckets are tuned in the first steps, see `ddpopt.compile`.
        fallback: as for `ddpopt.compile`.
        graphs_key: backends with the same key share the known graphs of each DDP module; by default none do.

    Raises:
        UsageError: an argument is invalid.
        UnsupportedError: this release of torch lacks a private name that ddpopt uses.
    """

    def __init__(
        self,
        backend: str | CompilerFn = "inductor",
        strategy: Strategy = "auto",
        *,
        buckets: Buckets = "plan",
        fallback: Fallback | None = "eager",
        graphs_key: object = None,
    ) -> None:
        require_supported()
        if str(strategy) == "step":
            raise UsageError(
                "strategy: 'step' takes a whole train step, not a model; decorate the function that takes it "
                "with ddpopt.train_step"
            )
        require_choice("strategy", strategy, Strategy)
        require_choice("buckets", buckets, Buckets)
        if fallback is not None:
            require_choice("fallback", fallback, Fallback)
        self.__name__ = "ddpopt"
        self.compiler = find_compiler(backend)
        self.strategy = strategy
        self.buckets = buckets
        self.fallback = fallback
        # Dynamo must not cut its graphs a second time, for as long as this backend may be used
        remove = hook.add_chooser(lambda compiler: compiler if is_ddpopt(compiler) else None)
        self.uninstall_hook = weakref.finalize(self, remove)
        self.uninstall_hook.atexit = False
        self._graphs_key = self if graphs_key is None else graphs_key

    def __reduce__(self) -> Any:  # a copy needs a hook of its own; Fabric copies what torch.compile is given
        settings: dict[str, Any] = {"buckets": self.buckets, "fallback": self.fallback}
        return functools.partial(type(self), self.compiler, self.strategy, **settings), ()

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], **options: Any
    ) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs; `options`, including the mode, go to the underlying compiler."""
        ddp = active_module()
        run = self._compile(ddp, gm, example_inputs, options)
        graphs = None if ddp is None else self._graphs_of(ddp)

        def run_in_any_module(*inputs: Any) -> Any:  # Dynamo reuses code for other modules of the same class
            running = active_module()
            if running is not None and self not in state_of(running).backends:
                self._reuse(running, graphs)
            return run(*inputs)

        return run_in_any_module

    def _compile(
        self, ddp: DDP | None, gm: fx.GraphModule, example_inputs: Sequence[object], options: dict[str, Any]
    ) -> Callable[..., Any]:
        compiler = configured(self.compiler, **options)
        why = _why_left_alone(ddp, gm)
        if ddp is None or why:
            say(why)
            return compiler(gm, example_inputs)
        require_compilable(ddp)
        self.serve(ddp)
        share_reads(gm, example_inputs)
        with isolated():
            planned = self._plan(ddp, gm, example_inputs, is_replayed=_ties_addresses(self.compiler, options))
        if planned is None:
            return compiler(gm, example_inputs)
        _show(planned)
        how = Compilation(
            compiler,
            self.compiler,
            any_buckets=self.buckets in ("open", "auto"),
            falls_back=self.fallback is not None,
            level=logging.WARNING if self.strategy == "inline" else logging.INFO,
        )
        if planned.plan.buckets:
            with compiling():
                run = planned.strategy.compile(planned, how)
        else:
            run = compile_whole("it trains no parameters", planned, how)
        graphs = self._graphs_of(ddp)
        return run if graphs is None else graphs.with_read_tracking(planned, run)

    def _plan(
        self, ddp: DDP, gm: fx.GraphModule, example_inputs: Sequence[object], *, is_replayed: bool
    ) -> Planned | None:
        """Plan a graph with the first strategy that can take it; None if the reducer can follow no plan."""
        strategies = STRATEGIES[self.strategy]
        try:
            if self._is_decided(ddp):
                captured = Captured.of(gm, example_inputs, specs_by_id(ddp), is_replayed=is_replayed)
                return plan_for_reducer(ddp, imposed_plan(ddp), captured, strategies)
            graphs = self.follow(ddp)
            captured = Captured.of(gm, example_inputs, graphs.specs, is_replayed=is_replayed)
            return graphs.add(captured, strategies)
        except UnsupportedError as error:
            say(f"the reducer cannot follow a plan, so graphs are compiled whole: {error}")
            return None

    def _is_decided(self, ddp: DDP) -> bool:
        """Whether no plan will be made for a module: it has one, or keeps DDP's buckets."""
        return imposed_plan(ddp) is not None or self.buckets == "ddp" or state_of(ddp).keeps_buckets

    def _graphs_of(self, ddp: DDP) -> ModelGraphs | None:
        """The graphs of a module that this backend, and those that share them with it, have seen."""
        graphs: ModelGraphs | None = state_of(ddp).graphs.get(self._graphs_key)
        return graphs

    def _reuse(self, ddp: DDP, graphs: ModelGraphs | None) -> None:
        """Let a module follow the plan of an equal module, whose compiled code it reuses.

        Without such a plan it still takes part in the exchange, for which a rank that compiles waits.
        """
        self.serve(ddp)
        if not self._is_decided(ddp):
            with contextlib.suppress(UnsupportedError):  # DDP keeps its buckets
                own = ModelGraphs(specs_by_id(ddp), limits_of(ddp))
                defer(ddp, graphs.joined if graphs is not None and graphs.is_like(own) else own.joined)

    def serve(self, ddp: DDP) -> None:
        """Note that this backend compiles for a module, and tune its buckets if that was asked for."""
        state_of(ddp).backends.add(self)
        if self.buckets == "auto":
            tune_while_training(ddp, self.strategy)

    def follow(self, ddp: DDP) -> ModelGraphs:
        """Make the reducer of `ddp` follow the plan of the graphs that this backend will see.

        Returns:
            The graphs of the model, which plan each graph that is added.

        Raises:
            UnsupportedError: this module's reducer cannot follow a plan.
        """
        specs = specs_by_id(ddp)  # raises if a parameter was replaced, perhaps since the previous graph
        state_of(ddp).backends.add(self)
        known = self._graphs_of(ddp)
        if known is None or known.specs != specs:  # parameter names may change
            known = ModelGraphs(specs, limits_of(ddp))
            state_of(ddp).graphs[self._graphs_key] = known
        if ddp.static_graph and ddp._static_graph_delay_allreduce_enqueued:  # True after its first backward
            say("DDP keeps its buckets: a static graph's first backward determines what is reduced")
        elif (waiting := pending(ddp)) is None or waiting.decide != known.joined:
            defer(ddp, known.joined)
        return known


def _show(planned: Planned) -> None:
    """Show a planned graph where ``TORCH_LOGS`` and ``TORCH_TRACE`` ask for it."""
    plan = planned.plan
    stays_whole = planned.inline or not plan.cuts
    how = "stays whole" if stays_whole else f"is cut into {len(plan.segments)} segments"
    show_buckets(plan, planned.captured.gm, "ddpopt_original_graph", how)
    show("ddpopt_plan", plan.to_json, "json")


def find_compiler(compiler: str | CompilerFn) -> CompilerFn:
    """Look up a Dynamo backend.

    Raises:
        UsageError: there is no backend of that name.
    """
    given = compiler
    if isinstance(compiler, str):
        try:
            compiler = lookup_backend(compiler)
        except Exception as error:
            known = [name for name in torch.compiler.list_backends(()) if not name.startswith("ddpopt")]
            raise UsageError(
                f"backend: expected the name of a Dynamo backend, got {given!r}; known backends: "
                f"{', '.join(known)}{did_you_mean(str(given), known)}"
            ) from error
    if is_ddpopt(compiler):
        raise UsageError(
            f"backend: expected the one that ddpopt uses, for instance 'inductor', got {given!r}, which is "
            "ddpopt itself; pass the backend that it names, and its strategy as strategy="
        )
    if not callable(compiler):
        raise UsageError(f"backend: expected a name or a callable (gm, example_inputs), got {compiler!r}")
    return compiler


def configured(
    compiler: CompilerFn, mode: str | None = None, options: dict[str, Any] | None = None, **others: Any
) -> CompilerFn:
    """A backend with the mode and the options of ``torch.compile``, passed on as torch does.

    Raises:
        RuntimeError: Inductor does not know them; the message is torch's.
    """
    if is_inductor(compiler) and (mode or options):
        wrapper: Any = torch._TorchCompileInductorWrapper
        others["config_patches"] = wrapper(mode, options, dynamic=None).config
    else:
        others.update({key: v for key, v in (("mode", mode), ("options", options)) if v})
    return functools.partial(compiler, **others) if others else compiler


def is_ddpopt(compiler: object) -> bool:
    """Whether a backend is ddpopt's, inside the wrappers that torch.compile puts around it."""
    while compiler is not None and not isinstance(compiler, DdpoptBackend):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", getattr(compiler, "compiler_fn", None))
    return compiler is not None


def _why_left_alone(ddp: DDP | None, gm: fx.GraphModule) -> str:
    """Why ddpopt leaves a graph alone; empty if it does not."""
    if ddp is None:
        return "no DistributedDataParallel forward is running; the graph is compiled whole"
    if begins_without_grad(gm.graph):
        return "a graph that is called under no_grad enables grad mode; it is compiled whole"
    if _shares_parameters(ddp):
        return "two DDP modules, one inside the other, reduce the same gradients; compiled whole"
    return ""


def _shares_parameters(ddp: DDP) -> bool:
    """Whether another DDP module, inside `ddp` or around it, also reduces some of its parameters.

    A gradient handed over to one of them would be averaged before the other has seen it.
    """
    others = [module for module in ddp.module.modules() if isinstance(module, DDP)]
    others += [module for module in running_modules() if module is not ddp]
    try:
        own = {id(parameter) for parameter in held_parameters(ddp)} if others else set()
        return any(not own.isdisjoint(map(id, held_parameters(other))) for other in others)
    except UnsupportedError:  # the parameters of one of them are not known
        return True


def _ties_addresses(compiler: CompilerFn, options: dict[str, Any]) -> bool:
    """Whether compiled code is tied to the addresses of its inputs, as CUDA graphs are."""
    config = options.get("options") or {}
    named = "cudagraph" in getattr(compiler, "__name__", "")
    mode = options.get("mode") in ("reduce-overhead", "max-autotune")
    configured = bool(config.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    return named or mode or configured


def __getattr__(name: str) -> DdpoptBackend:
    """A backend that ``torch.compile(model, backend="ddpopt-split")`` looks up; made on first use."""
    if (words := NAMED.fullmatch(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    strategy: Any = words[1] or "auto"
    backend: DdpoptBackend = globals().setdefault(name, DdpoptBackend(words[2] or "inductor", strategy))
    return backend
