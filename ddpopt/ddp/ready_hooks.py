"""Notify a reducer that a gradient is ready, whether the engine or a compiled backward accumulated it.

DDP's reducer hooks each parameter's AccumulateGrad node in C++. A gradient that is handed over from inside
a compiled backward goes through that node early; the engine visits the node again at the end, without a
gradient, and the reducer would count it twice. So these hooks are replaced.

Invariant: in each backward the reducer is notified of each parameter exactly as often as without ddpopt.

Uses private parts of torch: ``Reducer._remove_autograd_hooks``, ``Reducer._autograd_hook``
and ``DistributedDataParallel._build_params_for_reducer``.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Reducer  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.engine import NO_TASK, task_id
from ddpopt.ddp.held import as_built, numbered_parameters, planned_reducer, running_reducer
from ddpopt.ddp.state import state_of
from ddpopt.errors import HandOverError, UnsupportedError
from ddpopt.graph.nodes import storages_of


class ReadyHooks:
    """One hook for each parameter that a module's reducer waits for.

    The hooks are inactive until `take_over` has removed the reducer's own, and again when the module gets
    another reducer.

    Args:
        ddp: the module; it must not be in a backward.

    Attributes:
        places: each parameter's index among the reducer's parameters, by ``id`` of the parameter. The reducer
            may number them differently.
        leaves: their AccumulateGrad nodes, by place.
    """

    def __init__(self, ddp: Any) -> None:
        with as_built(ddp):
            parameters, _ = ddp._build_params_for_reducer()
            self.leaves: list[Any] = [get_gradient_edge(parameter).node for parameter in parameters]
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self.places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._names = [names[id(parameter)] for parameter in parameters]
        self._ddp = weakref.ref(ddp)
        self._taken_over: weakref.ReferenceType[Any] | None = None
        self._numbers: dict[int, int] = {}
        self._handed_over: dict[int, int] = {}
        self._buckets: set[int] = set()
        self._gradients: set[int] = set()
        self._task = NO_TASK
        # a node keeps its hooks alive, and the reducer keeps the node: a hook must not keep either alive
        arrived = weakref.WeakMethod(self._arrived)
        self._pre_hooks: list[Any] = []
        self._hooks: list[Any] = []
        for place, leaf in enumerate(self.leaves):
            handle = leaf.register_hook(functools.partial(_call, arrived, place))
            weakref.finalize(self, handle.remove)  # what remains on a node counts as another's hook
            hooks = handle.hooks_dict_ref()
            # before the user's hooks, like the reducer's own, which DDP registers when it is built
            hooks.update([(number, hooks.pop(number)) for number in [*hooks] if number != handle.id])
            self._hooks.append(hooks)
            self._pre_hooks.append(registered(leaf.register_prehook))

    def take_over(self) -> bool:
        """Make these hooks the only ones that notify the module's reducer of gradients.

        Returns:
            Whether they are; False if there is no reducer, or if it was made for other parameters.
        """
        reducer = running_reducer(self._ddp())
        if reducer is None:
            return False
        if not self._is_taken_over(reducer):
            self._numbers = self._numbered()
            if not self._numbers:
                return False
            # not PlannedReducer's method, which records that the user wants the reducer out of the backward
            Reducer._remove_autograd_hooks(reducer)
            self._taken_over = weakref.ref(reducer)
            self._buckets = set()
        return True

    @property
    def are_in_charge(self) -> bool:
        """Whether these hooks, and not the reducer's own, notify the module's reducer."""
        reducer = running_reducer(self._ddp())
        return reducer is not None and self._is_taken_over(reducer)

    def _numbered(self) -> dict[int, int]:
        """The number that the module's current reducer gives each place; empty if that is not known."""
        with contextlib.suppress(UnsupportedError):
            keys = [id(parameter) for parameter in numbered_parameters(self._ddp())]
            if {*keys} == self.places.keys():
                return {self.places[key]: number for number, key in enumerate(keys)}
        return {}

    def is_hooked(self, place: int) -> bool:
        """Whether other code has a hook on a parameter's AccumulateGrad node."""
        return bool(self._pre_hooks[place]) or len(self._hooks[place]) > 1

    def written_memory(self) -> set[int]:
        """Identities of the storages that the running backward may write to.

        These belong to gradients that existed before it, and to buckets that gradients have been views of.
        """
        if self._task != task_id():
            self._task = task_id()
            self._gradients = {*storages_of([leaf.variable.grad for leaf in self.leaves])}
        return self._gradients | self._buckets

    def hand_over(self, place: int, parameter: Tensor, gradient: Tensor, alone: bool) -> None:
        """Accumulate a gradient and notify the reducer, as the engine would at the end of this backward.

        Args:
            place: the parameter's place.
            parameter: the parameter.
            gradient: added to an existing gradient; if there is none, it is used directly, or copied.
            alone: whether no other code will use the gradient's memory again.
        """
        self._handed_over[place] = task_id()
        if alone and parameter.grad is None and _may_be_gradient_of(gradient, parameter):
            parameter.grad = gradient.detach()  # like AccumulateGrad, which might copy if called here
        elif alone or parameter.grad is not None:
            self.leaves[place](gradient)
        else:
            self.leaves[place](gradient.clone())  # the node may keep its argument's memory
        self._notify(place)

    def _arrived(self, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Handle the engine's visit to a parameter's node."""
        if self._handed_over.pop(place, None) != task_id():
            self._notify(place)
        elif any(gradient is not None for gradient in gradients):
            raise HandOverError(
                f"parameter {self._names[place]!r}: its gradient was handed to DDP from inside the compiled "
                "backward, and then another part of the same backward added to it. The bucket was sent "
                'without that part; discard this step. Compile with strategy="split", and please report this'
            )

    def _notify(self, place: int) -> None:
        ddp: Any = self._ddp()
        planned = planned_reducer(ddp)
        is_removed = planned is not None and planned.is_removed
        if self.are_in_charge and not is_removed:
            running_reducer(ddp)._autograd_hook(self._numbers[place])
            if ddp.gradient_as_bucket_view and ddp.require_backward_grad_sync:
                self._buckets.update(storages_of(self.leaves[place].variable.grad))

    def _is_taken_over(self, reducer: object) -> bool:
        return self._taken_over is not None and self._taken_over() is reducer


def registered(register: Callable[[Callable[..., None]], Any]) -> Any:
    """All hooks of one kind on a node: a single dictionary, which every handle references."""
    handle = register(lambda *_: None)
    handle.remove()
    return handle.hooks_dict_ref()


def users_hooks(parameter: Tensor) -> tuple[Callable[[], bool], ...]:
    """Ask later whether users have hooks on a parameter's AccumulateGrad node, one function for each kind.

    They keep neither the parameter nor its node alive. Hooks of this module do not count.
    """
    node = get_gradient_edge(parameter).node
    kinds = [registered(register) for register in (node.register_hook, node.register_prehook)]
    return tuple(functools.partial(_has_others, hooks) for hooks in kinds)


def _has_others(hooks: Any) -> bool:
    return any(getattr(hook, "func", None) is not _call for hook in hooks.values())


def _may_be_gradient_of(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient has its parameter's layout, and its storage contains nothing else."""
    return (
        gradient.layout == torch.strided
        and (gradient.dtype, gradient.device) == (parameter.dtype, parameter.device)
        and (gradient.shape, gradient.stride()) == (parameter.shape, parameter.stride())
        and gradient.untyped_storage().nbytes() == gradient.nbytes
        and not gradient.is_conj()
        and not gradient.is_neg()
    )


def _call(method: weakref.WeakMethod[Any], place: int, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
    arrived = method()
    if arrived is not None:
        arrived(place, gradients)


def ready_hooks(ddp: DistributedDataParallel) -> ReadyHooks:
    """The hooks of a module; the first call, which must not be in a backward, creates them."""
    state = state_of(ddp)
    if state.ready_hooks is None:
        state.ready_hooks = ReadyHooks(ddp)
    hooks: ReadyHooks = state.ready_hooks
    return hooks
