"""Capture a step: run the user's function on fake tensors, and record every operation as a node of one graph.

Autograd runs as it does in eager, so the graph has the operations of an eager step, in their order. While the
function runs, modules and optimizers hold fake tensors; what the function leaves in them becomes an output of
the graph (`ddpopt.step.outcome`).

Invariant: afterwards everything holds the user's own tensors, unchanged, even if capturing fails.
"""

import contextlib
import functools
import inspect
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.step.lift import Inputs, gather
from ddpopt.step.outcome import StepOutcome, read_outcome
from ddpopt.step.overrides import Override, replacements
from ddpopt.step.reach import Reached, reach
from ddpopt.step.replicas import Averaged, Replica, find_replicas, replicated, require_all_used

FLAG = "require_forward_param_sync"
Dynamic = Mapping[int, frozenset[int]]
"""Dimensions that may change without recompilation, by index of the tensor."""


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        gm: takes the numbers, then the tensors of `Inputs`; returns what `outcome` distributes.
        fakes: example inputs of `gm`, in a fake mode of their own.
        outcome: what becomes of the outputs.
        replicas: the DDP modules.
        slots: the parameters that they average.
        env: the symbols of changing sizes and numbers, and the conditions under which `gm` is right.
    """

    gm: fx.GraphModule
    fakes: tuple[Any, ...]
    outcome: StepOutcome
    replicas: tuple[Replica, ...]
    slots: tuple[Averaged, ...]
    env: ShapeEnv


@dataclass(frozen=True)
class StepCall:
    """A call of the user's function.

    Attributes:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def inputs(self, lifted: frozenset[str] = frozenset()) -> Inputs:
        """Collect what the function can read in this call; see `ddpopt.step.lift.gather`."""
        return gather(self.reached(), lifted)

    def reached(self) -> Reached:
        """Search what the function can read in this call."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return reach(self.function, bound.arguments)


def capture(call: StepCall, inputs: Inputs, dynamic: Dynamic, overrides: Sequence[Override] = ()) -> Captured:
    """Capture a step as one graph.

    Args:
        call: the call to capture.
        inputs: its inputs.
        dynamic: dimensions that may change.
        overrides: what to replace while the function runs.

    Returns:
        The graph, in which each averaged gradient passes through ``ddpopt::average``.

    Raises:
        UsageError: the step is no data-parallel step, or changes what a graph cannot.
        UnsupportedError: it uses what a graph does not support.
    """
    replicas, slots = find_replicas(inputs.reached)
    _require_supported_optimizers(inputs)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, static_shapes=True)
    numbers = [_symbolic(env, name, value) for name, value in inputs.numbers.items()]
    fakes = [_fake(mode, place, each, dynamic.get(place)) for place, each in enumerate(inputs.tensors)]
    stage = _Stage(inputs, fakes, numbers)
    for place, gradient in inputs.gradients.items():
        fakes[place].grad = fakes[gradient]
    outcomes: list[StepOutcome] = []

    def run(*_: Any) -> list[Any]:
        args, kwargs = stage.staged((call.args, dict(call.kwargs)))
        with stage, replicated(replicas, slots, stage.fake_of), replaced(replicas, overrides):
            returned = call.function(*args, **kwargs)
            require_all_used(replicas, slots)
            ddps = [each.ddp for each in replicas]
            outcome, outputs = read_outcome(returned, inputs, fakes, stage.left, ddps)
        outcomes.append(outcome)
        return outputs

    with _unchanged(call, stage, replicas), mode, _as_compiled():
        gm = make_fx(run, tracing_mode="real", _error_on_data_dependent_ops=True)(*numbers, *fakes)
    for fake in fakes:
        fake.grad = None
    for node, name in zip(
        gm.graph.find_nodes(op="placeholder"), (*inputs.numbers, *inputs.names), strict=True
    ):
        node._rename(re.sub(r"\W+", "_", name).strip("_"))
        node.target = node.name
    gm.recompile()
    return Captured(gm, (*numbers, *fakes), outcomes[0], replicas, slots, env)


@contextlib.contextmanager
def replaced(replicas: Sequence[Replica], overrides: Sequence[Override]) -> Iterator[None]:
    """In this block submodules are replaced as overrides say."""
    with contextlib.ExitStack() as stack:
        for replica in replicas if overrides else ():
            for held, key, made in [*replacements(replica.ddp.module, overrides)]:
                stack.callback(held.__setitem__, key, held[key])
                held[key] = made
        yield


def _symbolic(env: ShapeEnv, name: str, value: float) -> Any:
    source = LocalSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def _fake(mode: FakeTensorMode, place: int, tensor: Tensor, changing: frozenset[int] | None) -> FakeTensor:
    source = LocalSource(f"input_{place}")
    if not tensor.is_leaf:
        tensor = tensor.detach()
    if not changing:
        return mode.from_tensor(tensor, static_shapes=True, source=source)
    sizes = [DimDynamic.DYNAMIC if at in changing else DimDynamic.STATIC for at in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, static_shapes=False, source=source, symbolic_context=context)


class _Stage(TorchFunctionMode):
    """Puts fake tensors where modules and optimizers hold the user's, and replaces those met elsewhere."""

    def __init__(self, inputs: Inputs, fakes: Sequence[Any], numbers: Sequence[Any]) -> None:
        super().__init__()
        self._inputs = inputs
        self._fakes = fakes
        self._numbers = dict(zip(inputs.numbers, numbers, strict=True))
        self._stack = contextlib.ExitStack()
        self.left: dict[str, Any] = {}
        self.changed: list[str] = []
        self._updating = False

    def fake_of(self, value: Any) -> Any:
        """The fake tensor that stands for one of the user's; anything else as it is."""
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            place = self._inputs.index.get(id(value))
            return value if place is None else self._fakes[place]
        return value

    def staged(self, arguments: Any) -> Any:
        """The arguments of the function, with fake tensors."""
        return tree_map(self.fake_of, arguments)

    def __enter__(self) -> Any:
        for held, key in self._inputs.places:
            self._stack.callback(held.__setitem__, key, held[key])
            held[key] = self.fake_of(held[key])
        for name, optimizer in self._inputs.reached.optimizers.items():
            self._stage_optimizer(name, optimizer)
        return super().__enter__()  # type: ignore[no-untyped-call]  # of torch

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # of torch
        self._stack.close()

    def _stage_optimizer(self, name: str, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            own = dict(group)
            for key, value in own.items():
                where = f"{name}.param_groups[{number}]['{key}']"
                if isinstance(value, list | tuple):
                    group[key] = type(value)(
                        self._numbers.get(f"{where}[{place}]", self.fake_of(each))
                        for place, each in enumerate(value)
                    )
                else:
                    group[key] = self._numbers.get(where, self.fake_of(value))
            if "capturable" in group:  # its step count is a tensor, as in any compiled optimizer
                group["capturable"] = True
            self._stack.callback(self._restore, group, own, dict(group), f"{name}.param_groups[{number}]")
        for register, now in (
            (optimizer.register_step_pre_hook, True), (optimizer.register_step_post_hook, False),
        ):  # fmt: skip
            self._stack.callback(register(functools.partial(self._update, now)).remove)
        held = optimizer.state
        staged: Any = defaultdict(dict)
        for parameter, state in held.items():
            staged[self.fake_of(parameter)] = {key: self.fake_of(value) for key, value in state.items()}
        self._stack.callback(setattr, optimizer, "state", held)
        optimizer.state = staged
        self.left[name] = held, staged

    def _update(self, now: bool, *_: Any) -> None:
        self._updating = now

    def _restore(
        self, group: dict[str, Any], own: Mapping[str, Any], staged: Mapping[str, Any], name: str
    ) -> None:
        keys = {**staged, **group}
        self.changed += [f"{name}['{key}']" for key in keys if group.get(key) is not staged.get(key)]
        group.clear()
        group.update(own)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors."""
        args, kwargs = tree_map(self.fake_of, (args, kwargs or {}))
        scale = kwargs.get("value")
        if func is Tensor.addcdiv_ and (isinstance(scale, Tensor) or (self._updating and scale is not None)):
            return _fused(args[0], args[1] / args[2], scale)
        if func is Tensor.addcmul_ and self._updating and scale is not None:
            return _fused(args[0], args[1] * args[2], scale)
        if func is Tensor.add_ and isinstance(kwargs.get("alpha"), Tensor):
            return _fused(args[0], args[1], kwargs["alpha"])
        return func(*args, **kwargs)


def _fused(target: Tensor, factor: Tensor, scale: Any) -> Tensor:
    """``target += factor * scale``, as Dynamo computes it in a compiled optimizer."""
    from torch._inductor import inductor_prims  # importing Inductor takes a second

    prims: Any = inductor_prims
    return target.copy_(prims.fma(factor, scale, target))


@contextlib.contextmanager
def _as_compiled() -> Iterator[None]:
    """In this block code that asks whether it is being compiled is told that it is."""
    with patch.object(torch.compiler, "_is_compiling_flag", True), contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        yield


@contextlib.contextmanager
def _unchanged(call: StepCall, stage: _Stage, replicas: Sequence[Replica]) -> Iterator[None]:
    """Check that a block changes nothing that a graph could not change again.

    Raises:
        UsageError: it does; the message names what.
    """
    drawn, python = torch.get_rng_state(), random.getstate()
    before = call.inputs().plain
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, drawn)
        stack.callback(random.setstate, python)
        with contextlib.ExitStack() as flags:  # the outcome of the step sets them
            for each in replicas:
                flags.callback(setattr, each.ddp, FLAG, getattr(each.ddp, FLAG))
            yield
        now = call.inputs().plain
        changed = [name for name, value in now.items() if before.get(name, value) != value] + stage.changed
        if not torch.equal(torch.get_rng_state(), drawn):
            changed.append("the state of torch's generator")
        if random.getstate() != python:
            changed.append("the state of Python's generator")
        if changed:
            raise UnsupportedError(
                f"train_step: the step changes {', '.join(changed[:4])}, which its graph cannot do again in "
                "each step; do it before or after the step, or return the value"
            )


def _require_supported_optimizers(inputs: Inputs) -> None:
    """Check that optimizers can be captured, and update parameters of the step's modules."""
    held = {id(each) for _, module in inputs.reached.every_module() for each in module.parameters(False)}
    for name, optimizer in inputs.reached.optimizers.items():
        kind = type(optimizer).__name__
        groups = optimizer.param_groups
        if any(group.get("fused") for group in groups):
            raise UnsupportedError(
                f"train_step: {name} is {kind}(fused=True), whose update is one opaque kernel; build it with "
                "foreach=True, or without fused: the graph fuses its operations"
            )
        if not any(id(each) in held for group in groups for each in group["params"]):
            modules = ", ".join(inputs.reached.modules)
            raise UsageError(
                f"train_step: {name} ({kind}) holds no parameter of {modules}: was it built for another "
                "model, or before the parameters were replaced? Build it from the model that the step trains"
            )
