"""What a DDP module does in a captured step: buffers are broadcast, and gradients are marked to be averaged.

A module's forward is replaced by one that needs no reducer, for as long as a step is captured. Each of its
parameters has a hook, which autograd calls as DDP's own: once the gradient is in ``.grad``, accumulated. It
puts ``ddpopt::average`` there, which later becomes a part of a bucket.

Invariant: a gradient is averaged in exactly those backwards in which DDP would reduce it, once in each step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.planning.bucket_rule import ParamSpec, specs_from_ddp
from ddpopt.step.reach import Reached

_library: Any = torch.library.Library("ddpopt", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch types it not
_library.define("average(Tensor gradient, int slot) -> Tensor")
_library.impl("average", lambda gradient, _: gradient.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("ddpopt::average", lambda gradient, _: torch.empty_like(gradient), lib=_library)
AVERAGE = torch.ops.ddpopt.average.default
FOR_ALL = "Call DDP once and add the losses, or use no_sync() for all backwards of a step but the last"


@dataclass(frozen=True)
class Averaged:
    """A parameter whose gradient a DDP module averages, and the user's hooks on it."""

    replica: "Replica"
    spec: ParamSpec
    parameter: Tensor
    hooks: tuple[Any, ...]
    later_hooks: tuple[Any, ...]


@dataclass(eq=False)
class Replica:
    """A DDP module in a step.

    Attributes:
        name: as the user would write it.
        ddp: the module.
        synchronizes: whether its next backward averages gradients.
        done: names of the parameters whose gradients were averaged in this step, in ready order.
    """

    name: str
    ddp: DistributedDataParallel
    synchronizes: bool = False
    done: list[str] = field(default_factory=list)

    @property
    def group(self) -> Any:
        """The ranks that average."""
        return self.ddp.process_group


def find_replicas(reached: Reached) -> tuple[tuple[Replica, ...], tuple[Averaged, ...]]:
    """The DDP modules that a step can reach, and the parameters whose gradients they average.

    The place of a parameter is its slot, the second argument of ``ddpopt::average``.

    Raises:
        UsageError: there is none.
        UnsupportedError: one has an option that a step does not support.
    """
    every = reached.every_module()
    found = tuple(Replica(name, each) for name, each in every if isinstance(each, DistributedDataParallel))
    if not found:
        known = ", ".join(f"{name} ({type(each).__name__})" for name, each in reached.modules.items())
        raise UsageError(
            "train_step: expected a DistributedDataParallel module among the arguments of the step or the "
            f"variables that it reads, got {known or 'no module at all'}; wrap the model in DDP first"
        )
    for replica in found:
        _require_supported(replica)
    return found, tuple(_slots(found))


def _slots(replicas: Sequence[Replica]) -> Iterator[Averaged]:
    held: set[tuple[int, str]] = set()
    for replica in replicas:
        parameters = dict(replica.ddp.module.named_parameters())
        for spec in specs_from_ddp(replica.ddp):
            key = id(parameters[spec.name]), str(replica.group.group_name)
            if key not in held:  # else another module averages it already: twice would be the same
                held.add(key)
                own: Any = parameters[spec.name]
                later = getattr(own, "_post_accumulate_grad_hooks", None) or {}
                hooks = (own._backward_hooks or {}).values()
                yield Averaged(replica, spec, own, (*hooks,), (*later.values(),))


def _require_supported(replica: Replica) -> None:
    ddp: Any = replica.ddp
    hooked = bool(ddp._get_ddp_logging_data().get("comm_hook")) or bool(ddp._comm_hooks)
    problems = {
        "a communication hook": hooked,
        "mixed_precision": ddp.mixed_precision is not None,
        "a buffer hook": hasattr(ddp, "buffer_hook"),
        "join()": ddp._join_config.enable,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "sparse gradients": any(spec.sparse for spec in specs_from_ddp(ddp)),
    }
    wrong = [what for what, there in problems.items() if there]
    if wrong:
        raise UnsupportedError(
            f"train_step: {replica.name} uses {' and '.join(wrong)}, which a step in one graph does not "
            "support; use ddpopt.compile(model), or fallback='inline'"
        )


@contextlib.contextmanager
def replicated(
    replicas: Sequence[Replica], slots: Sequence[Averaged], fake_of: Callable[[Tensor], Any]
) -> Iterator[None]:
    """In this block the modules run without their reducers, and mark gradients that they would average.

    Args:
        replicas: the modules.
        slots: their parameters.
        fake_of: returns the tensor that stands for a parameter while the step is captured.
    """
    with contextlib.ExitStack() as stack:
        for slot, averaged in enumerate(slots):
            fake = fake_of(averaged.parameter)
            for hook in averaged.hooks:
                stack.callback(fake.register_hook(hook).remove)
            for hook in (*averaged.later_hooks, _hook(averaged, slot)):
                stack.callback(fake.register_post_accumulate_grad_hook(hook).remove)
        for replica in replicas:
            stack.enter_context(_forward_replaced(replica))
        yield


def _hook(averaged: Averaged, slot: int) -> Callable[[Tensor], None]:
    replica, name = averaged.replica, averaged.spec.name

    def mark(parameter: Tensor) -> None:
        if not replica.synchronizes:
            return
        if name in replica.done:
            raise UsageError(
                f"train_step: two backward passes of one step reduce the gradient of {name!r} of "
                f"{replica.name}. {FOR_ALL}"
            )
        replica.done.append(name)
        with torch.no_grad():
            parameter.grad = AVERAGE(parameter.grad, slot)

    return mark


@contextlib.contextmanager
def _forward_replaced(replica: Replica) -> Iterator[None]:
    ddp: Any = replica.ddp

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        if ddp.will_sync_module_buffers():
            _broadcast(ddp)
        if ddp.device_ids:
            device = torch.device(ddp.device_type, ddp.device_ids[0])
            inputs, kwargs = tree_map_only(Tensor, lambda each: each.to(device), (inputs, kwargs))
        output = ddp.module(*inputs, **kwargs)
        if trains:
            replica.synchronizes = True
        elif torch.is_grad_enabled() and replica.done:  # its backward is over
            replica.synchronizes = False
        ddp.require_forward_param_sync = trains
        return output

    own = vars(ddp)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before


def _broadcast(ddp: Any) -> None:
    """Copy the first rank's buffers, in one broadcast for each dtype and device."""
    kinds: dict[tuple[Any, Any], list[Tensor]] = {}
    ignored = ddp.parameters_to_ignore
    for name, buffer in ddp.module.named_buffers():
        if name not in ignored:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            sent = torch.ops._c10d_functional.broadcast(flat, 0, ddp.process_group.group_name)
            received = torch.ops._c10d_functional.wait_tensor(sent)
            sizes = [buffer.numel() for buffer in buffers]
            for buffer, piece in zip(buffers, received.split(sizes), strict=True):
                buffer.copy_(piece.view(buffer.shape))


def require_all_used(replicas: Sequence[Replica], slots: Sequence[Averaged]) -> None:
    """Check that gradients are missing only where DDP allows it.

    Raises:
        UsageError: a parameter got no gradient; DDP itself would fail in the next step.
    """
    for replica in replicas:
        if not replica.done or replica.ddp.find_unused_parameters or replica.ddp.static_graph:
            continue
        own = [each.spec.name for each in slots if each.replica is replica]
        missing = [name for name in own if name not in replica.done]
        if missing:
            raise UsageError(
                f"train_step: {replica.name} got no gradient for {', '.join(map(repr, missing))}, so DDP "
                "would fail in the next step; build it with find_unused_parameters=True or static_graph=True"
            )
