"""``ddpopt.train_step``: a train step that runs as one graph.

Invariant: a step runs the graph that was captured for its inputs, and leaves everything as the undecorated
function would; or an error says why not, and nothing has changed.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ddpopt.errors import DdpoptError, UnsupportedError, UsageError
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.plan import Plan
from ddpopt.planning.strategy import require_choice
from ddpopt.step.capture import Captured, StepCall, capture
from ddpopt.step.collectives import Fusion, insert_collectives, note_running, plan_step
from ddpopt.step.compiling import compile_step
from ddpopt.step.failures import WHAT, compare, told
from ddpopt.step.fallback import Inline
from ddpopt.step.lift import Inputs
from ddpopt.step.overrides import Override, Transform, passed

MOST = 16
"""Graphs of one step function."""
Fallback = Literal["inline"]
logger = logging.getLogger("ddpopt")


@dataclass(frozen=True)
class Graph:
    """A compiled step.

    Attributes:
        captured: what was captured.
        plans: the buckets of each DDP module.
        run: a function of the numbers and tensors.
        inputs: the inputs for which it was captured; their tensors may have changed since.
        sizes: the sizes and strides of its tensors.
        condition: Python code that tells whether other sizes are right; empty if all are fixed.
    """

    captured: Captured
    plans: tuple[Plan, ...]
    run: Callable[..., Any]
    inputs: Inputs
    sizes: tuple[Any, ...]
    condition: str

    def accepts(self, inputs: Inputs, sizes: tuple[Any, ...]) -> bool:
        """Whether the graph is right for other inputs."""
        if inputs.form != self.inputs.form:
            return False
        if self.condition and sizes != self.sizes:
            values = [*inputs.numbers.values(), *inputs.tensors]
            return bool(self.captured.env.evaluate_guards_expression(self.condition, values))
        return sizes == self.sizes


@dataclass(frozen=True)
class StepSettings:
    """How steps are compiled; see `train_step`."""

    backend: str | CompilerFn
    fusion: Fusion
    fallback: Fallback | None
    overrides: tuple[Override, ...]
    transform: Transform | None


class TrainStep:
    """A step function that runs as one graph; made by `train_step`, and called as the function is.

    Attributes:
        graphs: the graphs so far, in the order in which they were needed.
    """

    def __init__(self, function: Callable[..., Any], settings: StepSettings) -> None:
        functools.update_wrapper(self, function)
        self.graphs: list[Graph] = []
        self._function = function
        self._settings = settings
        self._lifted: frozenset[str] = frozenset()
        self._agreed: set[Any] = set()
        self._inline: Inline | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The buckets of each DDP module in the last graph; empty before the first step."""
        return self.graphs[-1].plans if self.graphs else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        call = StepCall(self._function, args, kwargs)
        if self._inline is not None:
            return self._inline.run(call)
        try:
            inputs = call.inputs(self._lifted)
            graph = self._find(inputs) or self._add(call, inputs)
        except DdpoptError as error:
            if self._settings.fallback is None:
                raise
            logger.info("ddpopt: the step runs in eager around a compiled model: %s", error)
            self._inline = Inline(self._settings.backend)
            return self._inline.run(call)
        if graph.inputs.numbers.keys() != inputs.numbers.keys():  # it was captured just now, for more numbers
            inputs = call.inputs(self._lifted)
        note_running(graph.captured, graph.plans)
        with torch.no_grad():
            outputs = graph.run(*inputs.numbers.values(), *inputs.tensors)
        ddps = [each.ddp for each in graph.captured.replicas]
        return graph.captured.outcome.distribute(inputs, outputs, ddps)

    def _find(self, inputs: Inputs) -> Graph | None:
        sizes = inputs.sizes
        return next((graph for graph in self.graphs if graph.accepts(inputs, sizes)), None)

    def _add(self, call: StepCall, inputs: Inputs) -> Graph:
        if self.graphs:
            inputs = self._widened(call, inputs)
        with _disable_current_modes():  # what watches the user's program must not see fake tensors
            return self._made(call, inputs, self._changing(inputs))

    def _made(self, call: StepCall, inputs: Inputs, dynamic: dict[int, frozenset[int]]) -> Graph:
        captured, plans = self._agree(call, inputs, dynamic)
        insert_collectives(captured, plans, self._settings.fusion)
        if (transform := self._settings.transform) is not None:
            gm = captured.gm
            captured = replace(captured, gm=passed(lambda: transform(gm), gm, f"{WHAT}(transform=...)"))
        run = captured.gm if captured.outcome.initializes else compile_step(captured, self._settings.backend)
        condition = captured.env.produce_guards_expression([*captured.fakes]) if dynamic else ""
        self.graphs.append(Graph(captured, plans, run, inputs, inputs.sizes, condition or ""))
        sizes = [len(plan.buckets) for plan in plans]
        logger.info("ddpopt: a train step of %d nodes, buckets: %s", len(captured.gm.graph.nodes), sizes)
        return self.graphs[-1]

    def _widened(self, call: StepCall, inputs: Inputs) -> Inputs:
        """The inputs, with numbers for the hyperparameters that have changed since an earlier graph."""
        different = min((inputs.difference(graph.inputs) for graph in self.graphs), key=len)
        if len(self.graphs) >= MOST:
            raise UnsupportedError(
                f"{WHAT}: the step needs more than {MOST} graphs; what changes now is "
                f"{', '.join(different[:4]) or 'the size of a tensor'}. Keep it the same in all steps, or "
                "make it a tensor"
            )
        numbers = [name for name in different if ".param_groups[" in name]
        floats = [name for name in numbers if type(inputs.plain.get(name)) is float]
        if not floats:
            return inputs
        self._lifted |= {*floats}
        return call.inputs(self._lifted)

    def _changing(self, inputs: Inputs) -> dict[int, frozenset[int]]:
        """The dimensions of loose tensors that differ from those of an earlier graph."""
        found: dict[int, frozenset[int]] = {}
        for graph in self.graphs:
            if graph.inputs.form == inputs.form:
                for place in inputs.loose:
                    pairs = zip(graph.sizes[place][0], inputs.tensors[place].shape, strict=True)
                    other = frozenset(at for at, (was, now) in enumerate(pairs) if was != now)
                    if other:
                        found[place] = found.get(place, frozenset()) | other
        return found

    def _agree(self, call: StepCall, inputs: Inputs, dynamic: Any) -> tuple[Captured, tuple[Plan, ...]]:
        """Capture, and compare the collectives with those of the other ranks, unless they were compared."""
        captured: Captured | None = None
        problem: Exception | None = None
        plans: tuple[Plan, ...] = ()
        try:
            with told(getattr(call.function, "__qualname__", repr(call.function))):
                captured = capture(call, inputs, dynamic, self._settings.overrides)
            for override in self._settings.overrides:
                captured = _overridden(captured, inputs, override)
            plans = plan_step(captured)
        except DdpoptError as error:
            problem = error
        key = tuple(tuple(bucket.params for bucket in plan.buckets) for plan in plans)
        if not self._agreed or (captured is not None and key not in self._agreed):
            compare(call.reached().groups(), plans, problem)
            self._agreed.add(key)
        if captured is None:
            assert problem is not None
            raise problem
        return captured, plans


def _overridden(captured: Captured, inputs: Inputs, override: Override) -> Captured:
    gm, names = captured.gm, [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
    state = dict(zip(names[len(inputs.numbers) :], inputs.tensors, strict=True))
    what = f"{type(override).__name__}.transform"
    return replace(captured, gm=passed(lambda: override.transform(gm, state), gm, what))


def train_step(
    function: Callable[..., Any] | None = None,
    *,
    backend: str | CompilerFn = "inductor",
    fusion: Fusion = "concat",
    overrides: Sequence[Override] = (),
    transform: Transform | None = None,
    fallback: Fallback | None = None,
) -> Any:
    """Run a train step as one graph: forward, loss, backward, all-reduces and optimizer.

    Args:
        function: ordinary eager code of a step with DDP modules and optimizers, as arguments or as variables
            that it reads. Without it, a decorator is returned.
        backend: name of a Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        fusion: ``"concat"``: a bucket's gradients are sent in one buffer; ``"coalesced"``: in one operation.
        overrides: keep submodules out of the graph, or change the captured graph.
        transform: a pass over the whole graph, collectives included, whose nodes are named after their
            buckets (``bucket_0_all_reduce``). It runs once for each graph, and returns a graph or None.
        fallback: ``"inline"``: a step that cannot be captured runs in eager around `ddpopt.compile`. By
            default it raises.

    Returns:
        A `TrainStep`, called as the function is.

    Raises:
        UsageError: an argument cannot be used.
        UnsupportedError: torch is older than 2.13.
    """
    if torch.__version__ < (2, 13):  # type: ignore[operator]  # torch's version compares with tuples
        raise UnsupportedError(
            f"{WHAT}: expected torch 2.13 or newer, got {torch.__version__}; use ddpopt.compile"
        )
    require_choice("fusion", fusion, Fusion)
    if fallback is not None:
        require_choice("fallback", fallback, Fallback)
    settings = StepSettings(backend, fusion, fallback, tuple(overrides), transform)
    if function is None:
        return functools.partial(TrainStep, settings=settings)
    if not callable(function):
        raise UsageError(f"{WHAT}: expected a function, got {function!r}; pass backend= by name")
    return TrainStep(function, settings)
