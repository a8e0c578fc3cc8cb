"""What Dynamo sees of DDP and of optimizers while it traces a train step.

Dynamo traces ``backward()`` as ``torch.autograd.grad`` and one accumulation for each parameter. In a step
DDP's forward needs no reducer, accumulations of a synchronized backward are marked with operators, and
optimizers are traced as the Python code that they are.

Uses private parts of torch: how Dynamo represents optimizers, accumulates gradients, and remembers which
numbers change.

Invariant: torch is changed only while a step is called.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo import variables
from torch._dynamo.comptime import comptime
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import ConstantVariable, builder
from torch._dynamo.variables.hashable import HashableTracker
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_map_only

from ddpopt.errors import UnsupportedError
from ddpopt.step import accumulation, fused, scaling
from ddpopt.step.replicas import SYNCHRONIZED, Replica, broadcast, source_name
from ddpopt.step.settings import INSTEAD, WHAT
from ddpopt.step.unused import Filled, Names
from ddpopt.step.wrapped import DdpReplica

CREATED = ("torch._dynamo.variables.dicts.SideEffectsProxyDict.side_effects", *accumulation.HOOKS)
"""An attribute of instances, which the patch makes one of the class, and what Dynamo looks for by name."""
MOST = 16
"""Graphs of one step function."""
LEVELS = ("debug", "info", "warn", "warning", "error", "exception", "critical", "log")
"""How the names of methods that write a log begin; libraries add some, such as ``warning_once``."""


class Seen:
    """What Dynamo meets in a step.

    Attributes:
        replicas: the DDP modules, by ``id``.
        forwards: how often each is called.
        optimizers: the optimizers, each with what errors call it, by ``id``.
        used_somewhere: the parameters that any rank uses, of modules that look for them, once that is known.
        filled: the parameters that only other ranks use.
        forward: DDP's forward, as Dynamo traces it.
        optimizer_step: an optimizer's step, as Dynamo traces it; None for its own.
        divide: called with each optimizer before Dynamo reads it; None if none is divided.
        undo: what undoes that for the optimizers of this attempt.
        accumulate: how Dynamo traces the accumulation of a gradient.
    """

    def __init__(
        self,
        optimizer_step: Callable[..., Any] | None = None,
        divide: Callable[[Any], Callable[[], None]] | None = None,
    ) -> None:
        self.optimizer_step = optimizer_step
        self.divide = divide
        self.replicas: dict[int, Replica] = {}
        self.forwards: Counter[int] = Counter()
        self.optimizers: dict[int, tuple[str, Optimizer]] = {}
        self.undo: list[Callable[[], None]] = []
        self.used_somewhere: WeakKeyDictionary[Any, Names] = WeakKeyDictionary()
        self.filled = Filled(self.replicas)
        self.forward = _traced_forward(self)
        self.accumulate = accumulation.traced(self.filled)

    def release(self) -> None:
        """Leave the optimizers of an attempt that failed as they were."""
        for undo in self.undo:
            undo()

    def forget(self) -> None:
        """Begin another step."""
        self.replicas.clear()
        self.forwards.clear()
        self.optimizers.clear()
        self.undo.clear()
        self.filled.forget()


@contextlib.contextmanager
def traceable(seen: Seen) -> Iterator[None]:
    """In this block Dynamo can trace a whole step.

    Args:
        seen: what Dynamo meets is added to it.
    """
    get_torch_obj_rule_map()  # made when it is first asked for, it would take what replaces a function for it
    logs = {each for name, each in vars(logging.Logger).items() if name.partition("_")[0] in LEVELS}
    settings = torch._dynamo.config.patch(
        trace_autograd_ops=True,
        enable_dynamo_decompositions=False,  # into operators that round differently
        recompile_limit=MOST,
        accumulated_recompile_limit=sys.maxsize,  # of all steps of one function
        suppress_errors=False,
        skip_nnmodule_hook_guards=False,
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,  # DDP's forward has some
        ignore_logging_functions=torch._dynamo.config.ignore_logging_functions | logs,
    )
    with settings, contextlib.ExitStack() as stack:
        stack.callback(_unname_constants)
        _unname_constants()
        for name, value in _patches(seen).items():
            stack.enter_context(patch(name, value, create=name in CREATED))
        yield


def _patches(seen: Seen) -> dict[str, Any]:
    """What replaces which part of torch while a step is traced; the reasons are in `ddpopt.torch_private`."""
    return {
        "torch.nn.parallel.DistributedDataParallel.forward": seen.forward,
        "torch.autograd.backward": _backward,
        "torch.optim.Optimizer.zero_grad": inspect.unwrap(Optimizer.zero_grad),
        **accumulation.patches(seen.filled, seen.accumulate),
        **fused.patches(),
        **scaling.patches(),
        "torch._dynamo.graph_break": _nothing,
        "torch._dynamo.output_graph.OutputGraph._validate_outputs_safe_for_autograd_nodes": _nothing,
        "torch._dynamo.side_effects.SideEffects.register_hook": _refuse_hook,
        "torch._dynamo.variables.builder.OptimizerVariable": functools.partial(_optimizer, seen),
        "torch._dynamo.variables.builder.handle_traced_output": _still_a_parameter,
        "torch._dynamo.variables.builder.process_automatic_dynamic": _with_changing_rates,
        "torch._dynamo.variables.dicts.SideEffectsProxyDict.side_effects": property(_side_effects, _nothing),
    }


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of breaks of the graph in optimizers, and a check that what is returned keeps its history."""


def _refuse_hook(_: Any, tensor: Any, *__: Any) -> None:
    raise UnsupportedError(f"{WHAT} does not support hooks on {source_name(tensor.source)}; {INSTEAD}")


def _side_effects(_: Any = None) -> Any:
    """What Dynamo knows of attributes; after it has traced a hook, objects still have what it knew before."""
    return InstructionTranslator.current_tx().output.side_effects


def _traced_forward(seen: Seen) -> Callable[..., Any]:
    def note(ctx: Any) -> None:
        torch._dynamo.config.enable_dynamo_decompositions = False  # where the last optimizer was Adam
        variable = ctx.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker()
        ddp = variable.value
        seen.forwards[id(ddp)] += 1
        replica = DdpReplica(source_name(variable.source), ddp, seen.used_somewhere.get(ddp))
        seen.replicas.setdefault(id(ddp), replica)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        comptime(note)
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        looks = self.find_unused_parameters and not self.static_graph
        if self.will_sync_module_buffers() and not self._join_config.enable:  # there, before the graph
            buffers = self.module.named_buffers()
            synced = [buffer for name, buffer in buffers if name not in self.parameters_to_ignore]
            broadcast(synced, self.process_group)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = tree_map_only(Tensor, lambda each: each.to(device), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        if trains:
            tensors: Any = _find_tensors(output)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # read here, so that those which only other ranks use are inputs of the graph
            parameters = [each for each in self.parameters() if each.requires_grad] if looks else []
            SYNCHRONIZED(id(self), [*tensors], parameters)
        self.require_forward_param_sync = trains
        if looks and self._ddp_sink_clone:  # as DDP's own sink does
            return tree_map_only(Tensor, lambda each: each if each.is_leaf else each.clone(), output)
        return output

    return forward


_eager_backward: Any = torch.autograd.backward
_traced_output: Any = builder.handle_traced_output
_process: Any = builder.process_automatic_dynamic  # type: ignore[attr-defined]  # it imports it


def _with_changing_rates(tx: Any, name: str, entry: Any, **options: Any) -> Any:
    """Dynamo's memory of numbers that change; learning rates do from the start."""
    found = _process(tx, name, entry, **options)
    return replace(found, scalar=auto_dynamic) if name.endswith("['lr']") else found


def _unname_constants() -> None:
    """Forget where constants were last read: Dynamo would read them there in other functions too."""
    for only in (None, True, False):
        ConstantVariable.create(only).source = None


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward``; Dynamo traces only the method of a tensor."""
    if torch.compiler.is_dynamo_compiling() and isinstance(tensors, Tensor):
        tensors.backward(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        _eager_backward(tensors, *args, **kwargs)


def _still_a_parameter(value: Any, tx: Any, proxy: Any, *rest: Any) -> Any:
    """Wrap what an operator returns; an input that it returns stays what it is, and keeps its gradient."""
    written: Any = getattr(next(iter(proxy.node.args), None), "meta", {})
    if "grapharg" in written and written["example_value"] is value and getattr(value, "is_leaf", False):
        return _side_effects().id_to_variable[id(written["grapharg"].example)]
    return _traced_output(value, tx, proxy, *rest)


class _Traced(variables.UserDefinedObjectVariable):
    """An optimizer whose state is made in the graph.

    Attributes:
        step: takes the place of its step; None for its own.
    """

    step: Callable[..., Any] | None = None

    def generic_getattr(self, tx: Any, name: str) -> Any:
        """Look up an attribute; what Dynamo skips otherwise is traced."""
        own: Any = vars(self.value).get(name)
        if name == "_init_group":
            # a compiled Adam has these decompositions
            torch._dynamo.config.enable_dynamo_decompositions = isinstance(self.value, torch.optim.Adam)
            return self._bound(tx, inspect.unwrap(getattr(type(self.value), name)))
        if name == "step" and getattr(own, "__globals__", None) is vars(lr_scheduler):
            vars(self.value)["_opt_called"] = True  # as a scheduler's wrapper does
            return self._bound(tx, self.step or own.__wrapped__)
        if name == "step" and self.step is not None:
            return self._bound(tx, self.step)
        if name == "param_groups":
            self._count_in_tensors(tx)
        return super().generic_getattr(tx, name)

    def _bound(self, tx: Any, function: Any) -> Any:
        method: Any = variables.UserFunctionVariable(function).tp_descr_get_impl(tx, self, cast("Any", None))
        method.source = method.source_fn = None  # its defaults are not those of what Dynamo skips
        return method

    def _count_in_tensors(self, tx: Any) -> None:
        """Let step counts be tensors, as in any compiled optimizer; the groups keep what they have."""
        source: Any = AttrSource(cast("Any", self.source), "param_groups")
        groups: Any = variables.VariableTracker.build(tx, cast("Any", self.value).param_groups, source)
        key = HashableTracker(ConstantVariable("capturable"))
        for group in variables.LazyVariableTracker.realize_all(groups).items:
            if key in group.items:
                where = DictGetItemSource(group.source, "capturable")
                group.items[key] = ConstantVariable(True, source=where)


def _optimizer(seen: Seen, value: Optimizer, **options: Any) -> Any:
    name = source_name(options["source"])
    seen.optimizers[id(value)] = f"{name} ({type(value).__name__})", value
    if seen.divide is not None:
        seen.undo.append(seen.divide(value))
    # not an OptimizerSource, for which Dynamo does not guard that a parameter is also the model's
    own = _Traced(value, **{**options, "source": options["source"].base})
    own.step = seen.optimizer_step
    # without this, Dynamo would forget attributes that the step sets
    return _side_effects().track_object_existing(value, own)
