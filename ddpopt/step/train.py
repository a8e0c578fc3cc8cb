"""A train step that runs as one graph: what `ddpopt.train_step` returns.

Invariant: a step runs the graph that was captured for its inputs, and leaves everything as the undecorated
function would; or an error says why not, and nothing has changed.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.ready_hooks import users_hooks
from ddpopt.ddp.state import state_of
from ddpopt.dynamo.shown import show_buckets
from ddpopt.errors import CaptureError, DdpoptError, PlanMismatchError, UnsupportedError, UsageError
from ddpopt.planning.plan import Plan
from ddpopt.step.collectives import digests
from ddpopt.step.compiling import compile_step
from ddpopt.step.failures import OwnStep, compare_steps, reported
from ddpopt.step.fallback import inline
from ddpopt.step.graphs import record_step
from ddpopt.step.joining import RebuiltError, begin, end, is_joining
from ddpopt.step.overrides import Swap, replacements, swapped
from ddpopt.step.passes import PASSES
from ddpopt.step.replicas import (
    INSTEAD,
    require_no_modes,
    require_no_node_hooks,
    require_plain_ddp,
)
from ddpopt.step.scaling import forgetting_skipped
from ddpopt.step.settings import WHAT, StepSettings
from ddpopt.step.tracing import MOST, Seen, traceable
from ddpopt.step.transport import Transport, transport_of
from ddpopt.step.unused import Names, UsedElsewhereError

logger = logging.getLogger("ddpopt")
CompiledFor = tuple[Plan | None, str, Transport | None]
"""A DDP module's imposed plan, the name of its process group, and how it sends gradients."""
Used = frozenset[tuple[int, Names]]
"""The parameters that any rank uses, of each DDP module that looks for them, given by its ``id``."""
Rebuilt = frozenset[int]
"""``id`` of the modules under ``join()`` whose reducers have rebuilt their buckets."""


@dataclass(frozen=True)
class Graph:
    """A compiled step.

    Attributes:
        gm: the graph, with its collectives.
        plans: the buckets of each DDP module.
    """

    gm: fx.GraphModule
    plans: tuple[Plan, ...]


class TrainStep:
    """A step function that runs as one graph; made by `train_step`, and called as the function is.

    Attributes:
        graphs: the graphs so far, in the order in which they were needed.
    """

    def __init__(self, function: Callable[..., Any], settings: StepSettings) -> None:
        if not callable(function):
            raise UsageError(f"{WHAT}: expected a function, got {function!r}; pass backend= by name")
        functools.update_wrapper(self, function)
        self.graphs: list[Graph] = []
        self._function = function
        self._settings = settings
        self._compiled: dict[tuple[Used, Rebuilt], Any] = {}
        self._asked: set[str] = set()
        self._begun: set[int] = set()
        self._compiled_for: WeakKeyDictionary[Any, CompiledFor] = WeakKeyDictionary()
        self._seen = Seen()
        self._compared = False
        self._replaced: WeakKeyDictionary[DistributedDataParallel, Sequence[Swap]] = WeakKeyDictionary()
        self._swaps: Sequence[Swap] = ()
        self._inline: Callable[[], Any] | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The buckets of each DDP module in the last graph; empty before the first step."""
        return self.graphs[-1].plans if self.graphs else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        if self._inline is None:
            try:
                return self._run(args, kwargs)
            except (UsageError, PlanMismatchError, CaptureError) as error:
                if self._settings.fallback is None:
                    raise
                logger.info("ddpopt: the step runs in eager around a compiled model: %s", error)
                self._inline = inline(self._settings.backend)
        with self._inline():
            return self._function(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._swaps = self._replacements(args, kwargs) if self._settings.overrides else []
        if any(_read_of(ddp) != before for ddp, before in self._compiled_for.items()):
            self._compiled.clear()  # its graphs have other buckets, or send in another group
            self._compiled_for.clear()
        self._asked.clear()
        self._begun.clear()
        while True:
            try:
                return self._attempt(args, kwargs)
            except UsedElsewhereError as error:  # nothing has run
                self._seen.used_somewhere.update(error.used)
            except RebuiltError:  # what goes before the graph has been sent
                continue

    def _compare(self, own: OwnStep) -> None:
        """Compare this rank's step with those of the others, before any of its collectives."""
        self._compared = True
        compare_steps(own, self._asked)

    def _begin(self, joining: Sequence[Any]) -> None:
        """Send what DDP sends before a forward under ``join()``, once in a step."""
        for ddp in joining:
            if id(ddp) not in self._begun:
                self._begun.add(id(ddp))
                begin(ddp)

    def _attempt(self, args: Any, kwargs: Any) -> Any:
        """Run the step with the graph for the parameters that the ranks used in the last one."""
        name = getattr(self._function, "__qualname__", repr(self._function))
        self._compared = False
        try:
            require_no_modes()
            with reported(name), traceable(self._seen), swapped(self._swaps), forgetting_skipped():
                return self._current()(*args, **kwargs)
        except DdpoptError as error:
            if not self._compared:  # the other ranks wait for this one
                met = [replica.ddp for replica in self._seen.replicas.values()]
                known = met or [*self._compiled_for] or self._near(args, kwargs)
                self._compare(OwnStep(known, problem=error))
            raise
        finally:
            self._seen.forget()

    def _current(self) -> Any:
        """The compiled function for what ranks use, and for the buckets of reducers under ``join()``."""
        used = frozenset((id(ddp), names) for ddp, names in self._seen.used_somewhere.items())
        joining = [ddp for ddp in self._compiled_for if is_joining(ddp)]
        key = used, frozenset(id(ddp) for ddp in joining if ddp._has_rebuilt_buckets)
        if key not in self._compiled:
            known = {used for used, _ in self._compiled}
            if used not in known and len(known) == MOST:
                raise UnsupportedError(
                    f"{WHAT}: the ranks used more than {MOST} different sets of parameters; {INSTEAD}"
                )
            self._compiled[key] = self._uncompiled()
        return self._compiled[key]

    def _uncompiled(self) -> Any:
        step = weakref.WeakMethod(self._compile)  # Dynamo keeps each backend that it was given

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return called(step)(gm, inputs)  # type: ignore[no-any-return]  # of a method that is only known here

        return torch.compile(self._function, fullgraph=True, backend=backend, isolate_recompiles=True)  # type: ignore[call-overload]  # torch's overloads lack one

    def __get__(self, instance: object, owner: object = None) -> Any:
        """A step that is a method."""
        return self if instance is None else MethodType(self, instance)

    def _near(self, args: Any, kwargs: Any) -> list[DistributedDataParallel]:
        """The DDP modules that the function can read."""
        function = inspect.unwrap(self._function)
        read = inspect.getclosurevars(function if inspect.isroutine(function) else lambda: None)
        near = tree_leaves([args, kwargs, {**read.globals}, {**read.nonlocals}])
        return [*dict.fromkeys(each for each in near if isinstance(each, DistributedDataParallel))]

    def _replacements(self, args: Any, kwargs: Any) -> list[Swap]:
        """The submodules to replace in these modules."""
        ddps = self._near(args, kwargs)
        for ddp in ddps:
            if ddp not in self._replaced:
                self._replaced[ddp] = [*replacements(ddp.module, self._settings.overrides)]
        return [swap for ddp in ddps for swap in self._replaced[ddp]]

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compile its graph of a step."""
        # what watches the user's program must not see fake tensors
        with swapped(self._swaps), _disable_current_modes():
            self._require_reached()
            captured = record_step(gm, inputs, self._seen)
            for change in PASSES:
                change(captured, self._settings)
            keys = digests(captured)
            compiled = compile_step(captured.gm, inputs, self._settings.backend)
        plans = captured.plans
        self.graphs.append(Graph(captured.gm, plans))
        logger.info("ddpopt: captured a step; buckets: %s", [len(plan.buckets) for plan in plans])
        for plan in plans:
            show_buckets(plan, captured.gm, "ddpopt_step_graph", "is a step")

        self._compiled_for.update((each.ddp, _read_of(each.ddp)) for each in captured.replicas)
        met = captured.reductions.met()
        asked = [
            (f"{each.name}.module.{name}", users_hooks(parameter))
            for each in captured.replicas
            for name, parameter in each.ddp.module.named_parameters()
            if parameter.requires_grad
        ]

        compare = weakref.WeakMethod(self._compare)
        begin_all = weakref.WeakMethod(self._begin)

        def run(*inputs: Any) -> Any:  # Dynamo keeps it in the globals of the function's module
            ddps: list[Any] = [each.ddp() for each in met]
            for ddp, each in zip(ddps, met, strict=True):
                require_plain_ddp(each.name, ddp)  # a communication hook may be new
            require_no_node_hooks(asked)
            for each in met:
                each.require_nothing_left()
            used = {ddp: each.here for ddp, each in zip(ddps, met, strict=True)}
            averaged = {ddp: each.reduced for ddp, each in zip(ddps, met, strict=True)}
            own = OwnStep(ddps, keys, plans, used, averaged)
            called(compare)(own)
            joining = [ddp for ddp in ddps if is_joining(ddp)]
            called(begin_all)(joining)
            for ddp, plan in zip(ddps, plans, strict=True):
                state_of(ddp).step_plan = plan
            for each in met:
                each.remember()
            with torch.no_grad():
                returned = compiled(*inputs)
            for ddp in joining:
                end(ddp)
            return returned

        return run

    def _require_reached(self) -> None:
        """Check that the step calls DDP, and that the user's overrides reach each module that it calls."""
        if not self._seen.replicas:
            raise UsageError(
                f"{WHAT}: expected that the step calls a DistributedDataParallel module, and it calls none; "
                "wrap the model in DDP first"
            )
        for met in self._seen.replicas.values():
            if self._settings.overrides and met.ddp not in self._replaced:
                raise UsageError(f"{WHAT}: overrides do not reach {met.name}; pass it to the step")


def _read_of(ddp: Any) -> CompiledFor:
    """What a graph is compiled for."""
    return imposed_plan(ddp), ddp.process_group.group_name, transport_of(ddp)


def called(method: "weakref.WeakMethod[Any]") -> Any:
    """The method of a step that is being called, and so is alive."""
    found = method()
    assert found is not None
    return found
