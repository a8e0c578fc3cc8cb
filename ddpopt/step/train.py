"""A train step that runs as one graph: what `ddpopt.train_step` returns.

Invariant: a step runs the graph that was captured for its inputs, and leaves everything as the undecorated
function would; or an error says why not, and nothing has changed.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path

from ddpopt.ddp.state import state_of
from ddpopt.dynamo.shown import show_buckets
from ddpopt.errors import CaptureError, DdpoptError, PlanMismatchError, UnsupportedError, UsageError
from ddpopt.planning.plan import Plan
from ddpopt.step.collectives import digests
from ddpopt.step.compiling import compile_step
from ddpopt.step.failures import OwnStep, compare_steps, reported, require_no_modes
from ddpopt.step.fallback import inline
from ddpopt.step.graphs import record_step
from ddpopt.step.joining import RebuiltError
from ddpopt.step.overrides import Swap, replacements, swapped
from ddpopt.step.parallel import Own, Ownership, outermost
from ddpopt.step.passes import PASSES
from ddpopt.step.replicas import Replica
from ddpopt.step.scaling import forgetting_skipped
from ddpopt.step.settings import INSTEAD, WHAT, StepSettings
from ddpopt.step.sharding import divide
from ddpopt.step.state import StatefulTransform, StepState
from ddpopt.step.tracing import MOST, Seen, traceable
from ddpopt.step.unused import Names, UsedElsewhereError
from ddpopt.step.wrapped import Wrapped

logger = logging.getLogger("ddpopt")
Used = frozenset[tuple[int, Names]]
"""The parameters that any rank uses, of each DDP module that looks for them, given by its ``id``."""
Rebuilt = frozenset[int]
"""``id`` of the modules under ``join()`` whose reducers have rebuilt their buckets."""


@dataclass(frozen=True)
class Graph:
    """A compiled step.

    Attributes:
        gm: the graph, with its collectives.
        plans: the buckets of each module.
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
        self._parallel = settings.parallel or Wrapped()
        self._compiled_for: WeakKeyDictionary[Any, Hashable] = WeakKeyDictionary()
        self._given: tuple[Any, Any] = (), {}
        shares = weakref.WeakMethod(self._shares)
        optimizer_step = self._parallel.optimizer_step(lambda: called(shares)())
        self._seen = Seen(
            optimizer_step, optimizer_step and (lambda optimizer: divide(optimizer, called(shares)()))
        )
        self._known_shares: Ownership | None = None
        self._compared = False
        self._replaced: WeakKeyDictionary[Any, Sequence[Swap]] = WeakKeyDictionary()
        self._swaps: Sequence[Swap] = ()
        self._inline: Callable[[], Any] | None = None
        self._state = StepState()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The buckets of each module in the last graph; empty before the first step."""
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

    def last(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step after which nothing is pending: what a transform leaves for the next one is completed.

        Args:
            args: as for a step.
            kwargs: as for a step.
        """
        returned = self(*args, **kwargs)
        if isinstance(self._settings.transform, StatefulTransform):
            with torch.no_grad():
                self._settings.transform.finish(self._state.tensors)
        return returned

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors that a transform added to the step, by their names."""
        return {name: tensor.clone() for name, tensor in self._state.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with these tensors, before the first step or after any.

        Args:
            state: what `state_dict` returned; of tensors that are each rank's own, this rank's.

        Raises:
            UsageError: a tensor has another form than the step's, or the step has none of that name.
        """
        if state and not isinstance(self._settings.transform, StatefulTransform):
            raise UsageError(f"{WHAT}: got a state, but no pass that has one; give transform=...")
        self._state.load(state)

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._given = args, kwargs
        try:
            return self._agreed(args, kwargs)
        finally:
            self._given = (), {}  # a step keeps no module alive

    def _agreed(self, args: Any, kwargs: Any) -> Any:
        """Run the step, again if the other ranks use other parameters or have other buckets."""
        self._swaps = self._replacements() if self._settings.overrides else []
        reading = self._parallel.reading
        if any(reading(owner) != before for owner, before in self._compiled_for.items()):
            self._compiled.clear()  # its graphs have other buckets, or send in another group
            self._compiled_for.clear()
        self._asked.clear()
        self._known_shares = None
        self._parallel.forget()
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

    def _attempt(self, args: Any, kwargs: Any) -> Any:
        """Run the step with the graph for the parameters that the ranks used in the last one."""
        name = getattr(self._function, "__qualname__", repr(self._function))
        self._compared = False
        try:
            require_no_modes()
            with reported(name), traceable(self._seen), swapped(self._swaps), forgetting_skipped():
                return self._current()(*args, **kwargs)
        except DdpoptError as error:
            self._seen.release()
            if not self._compared:  # the other ranks wait for this one
                self._compare(OwnStep(self._met(), problem=error))
            raise
        finally:
            self._seen.forget()

    def _met(self) -> Sequence[Replica]:
        """The modules whose other replicas wait for this rank: of this step, of the last ones, or near."""
        called = [*self._seen.replicas.values()]
        owners = [*self._compiled_for] or [*self._near().values()]
        return called or [self._parallel.replica(owner, type(owner).__name__) for owner in owners]

    def _current(self) -> Any:
        """The compiled function for what ranks use, and for the buckets of reducers under ``join()``."""
        used = frozenset((id(ddp), names) for ddp, names in self._seen.used_somewhere.items())
        key = used, self._parallel.joining(self._compiled_for)
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

    def _near(self) -> Own:
        """The modules that the function can read in this step."""
        function = inspect.unwrap(self._function)
        read = inspect.getclosurevars(function if inspect.isroutine(function) else lambda: None)
        return modules_in(self._parallel.kind, {**read.globals, **read.nonlocals}, *self._given)

    def _shares(self) -> Ownership | None:
        """Which rank owns each parameter of the modules near the step."""
        if self._known_shares is None:
            near = [self._parallel.replica(owner, name) for name, owner in outermost(self._near()).items()]
            self._known_shares = self._parallel.shares(near)
        return self._known_shares

    def _replacements(self) -> list[Swap]:
        """The submodules to replace in these modules."""
        near = [self._parallel.replica(owner, name) for name, owner in self._near().items()]
        for each in near:
            if each.owner not in self._replaced:
                self._replaced[each.owner] = [*replacements(each.module, self._settings.overrides)]
        return [swap for each in near for swap in self._replaced[each.owner]]

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compile its graph of a step."""
        # what watches the user's program must not see fake tensors
        with swapped(self._swaps), _disable_current_modes():
            captured = record_step(gm, inputs, self._seen, self._parallel, self._near())
            self._require_reached(captured.replicas)
            captured.state = self._state
            for change in PASSES:
                change(captured, self._settings)
            keys = digests(captured, self._parallel.shares(captured.replicas))
            added = [self._state.tensors[name] for name in captured.added]
            compiled = compile_step(
                captured.gm, [*inputs, *added], self._settings.backend, keeps_rounding=bool(added)
            )
        plans = captured.plans
        self.graphs.append(Graph(captured.gm, plans))
        logger.info("ddpopt: captured a step; buckets: %s", [len(plan.buckets) for plan in plans])
        for plan in plans:
            show_buckets(plan, captured.gm, "ddpopt_step_graph", "is a step")

        owners = [each.owner for each in captured.replicas]
        self._compiled_for.update((owner, self._parallel.reading(owner)) for owner in owners)
        running = self._parallel.running(captured.replicas, captured.averaging)
        compare = weakref.WeakMethod(self._compare)
        state, names = self._state, captured.added

        def run(*inputs: Any) -> Any:  # Dynamo keeps it in the globals of the function's module
            replicas = running.replicas()
            called(compare)(OwnStep(replicas, keys, plans, running.used(), running.averaged()))
            running.begin()
            for replica, plan in zip(replicas, plans, strict=True):
                state_of(replica.owner).step_plan = plan
            with torch.no_grad():
                state.make_equal(names, replicas[0].group)
                returned = compiled(*inputs, *added)
            running.end()
            return returned

        return run

    def _require_reached(self, replicas: Iterable[Replica]) -> None:
        """Check that the user's overrides reach each module."""
        for each in replicas:
            if self._settings.overrides and each.owner not in self._replaced:
                raise UsageError(f"{WHAT}: overrides do not reach {each.name}; pass it to the step")


def modules_in(kind: type[Any], variables: Mapping[str, Any], args: Any, kwargs: Any) -> Own:
    """Modules of a kind, by the name that a user has for them.

    Args:
        kind: their class.
        variables: what a function reads.
        args: its positional arguments; attributes of these are looked at, too.
        kwargs: its other arguments.
    """
    attributes = {
        f"{type(each).__name__}.{name}": value
        for each in args
        if not isinstance(each, nn.Module | Tensor)
        for name, value in getattr(each, "__dict__", {}).items()
    }
    near = [*variables.items(), *enumerate(args), *kwargs.items(), *attributes.items()]
    found: dict[int, tuple[str, Any]] = {}
    for name, value in near:
        for path, leaf in tree_flatten_with_path(value)[0]:
            if isinstance(leaf, kind):
                shown = f"argument {name}" if isinstance(name, int) else name
                found.setdefault(id(leaf), (f"{shown}{keystr(path)}", leaf))
    return dict(found.values())


def called(method: "weakref.WeakMethod[Any]") -> Any:
    """The method of a step that is being called, and so is alive."""
    found = method()
    assert found is not None
    return found
