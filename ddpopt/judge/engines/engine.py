"""An engine: one way to run a data-parallel step, as the judge sees it; the base class of every mode.

Invariant: nothing outlives the ``with`` block of `Engine.running`, neither a Dynamo setting nor a compiled
frame, and what an engine keeps of a run is on a copy of its own.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.guards import CheckFunctionManager
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpopt.errors import UnsupportedError, UsageError, did_you_mean

TRACED_FOR_GOOD = "torch.nn.parallel.distributed"
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")
"""Put into the names of parameters by wrapped submodules."""
Gives = Literal["nothing", "arguments", "module"]
Named = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


class Engine:
    """One way to run a data-parallel step, to be judged against eager DDP.

    Make a subclass, or give the parts to the constructor: ``Engine("mine", prepare=prepare)``, whose
    functions take no ``self``. Each run uses a copy, so `prepare` may keep on ``self`` what other
    methods need. All methods but `prepare` have defaults, for an engine that leaves parameters and gradients
    in the model, whole or as DTensors. Every method is called on all ranks, and may communicate.

    Args:
        name: replaces the attribute.
        about: replaces the attribute.
        parts: other attributes and methods to replace.

    Attributes:
        name: as in ``--mode``.
        about: one sentence.
        gives: the part of DDP it offers: ``"module"``: a DDP module, set as ``self.ddp``; ``"arguments"``:
            it takes ``self.ddp_kwargs``; ``"nothing"``.
        compiles: whether it compiles with ``self.backend``.
        exact: whether it runs the operations of eager in their order, apart from what the backend does.
            If not, numbers are judged by the effect of rounding (level L2).
        is_sharded: whether each rank holds a part of each parameter.
        moves_parameters: whether it may put parameters into other memory while it runs.
        default_group: whether it may use the default process group instead of the one that it is given.
        broadcasts_buffers: whether ranks other than the first get the first one's buffers, as in DDP.
        sends_as_uncompiled: whether it sends the same collectives in the same order as without a backend.
        captures_backward: whether compiled autograd must capture its backward.
        observable: whether its collectives are those of DDP's C++ reducer.
        optimize_ddp: Dynamo's setting of that name while the engine runs.
        model: in a run: the model, on its device. Its parameters have the names that a user knows.
        group: in a run: the ranks that train it together.
        backend: in a run: the Dynamo backend, a name or a callable; None to compile nothing.
        ddp_kwargs: in a run: arguments for ``DistributedDataParallel``; empty if it gives nothing.
        call: in a run: what `prepare` returned.
        ddp: in a run: its DDP module; None if there is none.
        planned: in a run: whether ddpopt's plan should be in force.
        whole: in a run: makes one graph of a step function; None in engines that compile only the model.

    Raises:
        UsageError: a part is unknown.
    """

    name: str = "engine"
    about: str = "an engine of your own"
    gives: Gives = "nothing"
    compiles: bool = False
    exact: bool = True
    is_sharded: bool = False
    moves_parameters: bool = False
    default_group: bool = False
    broadcasts_buffers: bool = True
    sends_as_uncompiled: bool = False
    captures_backward: bool = False
    observable: bool = False
    optimize_ddp: bool | str = False

    model: nn.Module
    group: dist.ProcessGroup
    backend: Any = None
    ddp_kwargs: Mapping[str, Any] = MappingProxyType({})
    call: Callable[..., Any]
    ddp: DistributedDataParallel | None = None
    planned: bool = False
    whole: Callable[[Any], Any] | None = None

    def __init__(self, name: str = "", about: str = "", **parts: Any) -> None:
        for part in parts:
            if not hasattr(type(self), part):
                raise UsageError(f"Engine: there is no {part!r} to replace{did_you_mean(part, dir(self))}")
        vars(self).update({key: value for key, value in (("name", name), ("about", about)) if value}, **parts)

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Make a model data-parallel.

        Args:
            model: the model, with equal parameters on all ranks.
            group: the ranks that train it.

        Returns:
            A callable that takes the model's arguments and returns its output. A backward through it leaves
            the mean over ranks in the gradients.
        """
        raise UnsupportedError(
            f"engine {self.name!r}: it has no prepare(model, group), so {type(model).__name__} cannot be "
            f"prepared for {group.size()} ranks"
        )

    def gradients(self) -> Gradients:
        """Whole copies of the gradients of all trainable parameters, by name; None for a missing one."""
        return {
            name: None if parameter.grad is None else full(parameter.grad).detach().clone()
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def state(self) -> Named:
        """Whole copies of all parameters and buffers, by name."""
        with torch.no_grad():
            return {name: full(tensor).detach().clone() for name, tensor in self._tensors()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers to those that `state` read from an equal model; others stay."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in state:
                    whole = state[name]
                    if isinstance(tensor, DTensor):
                        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                    tensor.copy_(whole)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        torch.autograd.backward(loss)

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Make an optimizer of the parameters, once after `prepare`.

        An engine that has this and no `step` of its own always trains with it; others only under options that
        train with more than plain SGD.

        Args:
            kind: the class of the optimizer.
            settings: its arguments besides the parameters.

        Returns:
            The optimizer, which is called between steps of this engine.
        """
        return kind(self.model.parameters(), **settings)

    def step(self, learning_rate: float) -> None:
        """Update the parameters by plain SGD, without momentum.

        torch's optimizers do not accept dense and sparse gradients in one call, so this calls none.
        """
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(updated(parameter, parameter.grad, learning_rate))

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Remove the gradients, or zero them in place."""
        self.model.zero_grad(set_to_none)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients by their total norm, and return that."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        return full(nn.utils.clip_grad_norm_(parameters, max_norm))

    def no_sync(self) -> AbstractContextManager[Any]:
        """Make the context manager for forwards and backwards without reduction."""
        raise UnsupportedError(f"{self.name} has no no_sync()")

    def around_backward(self) -> AbstractContextManager[Any]:
        """Make the context manager for a backward."""
        return contextlib.nullcontext()

    def sends(self) -> Mapping[str, int] | None:
        """How many collectives of each kind a step sends, such as ``{"allreduce": 1}``; None for no promise.

        A step is a backward that reduces, and the optimizer. Kinds are named as c10d names its operators.
        """
        return None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, without what wrapped submodules put into their names."""
        for name, parameter in self.model.named_parameters():
            yield _plain(name), parameter

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters()
        yield from ((_plain(name), buffer) for name, buffer in self.model.named_buffers())

    # ------------------------------------------------------------------------------------------ of the judge

    def replaces(self, method: str) -> bool:
        """Whether this engine has a method of its own instead of this class's."""
        return method in vars(self) or getattr(type(self), method) is not getattr(Engine, method)

    def prepared(
        self, model: nn.Module, group: dist.ProcessGroup, backend: Any, ddp_kwargs: Mapping[str, Any]
    ) -> "Engine":
        """Make a model data-parallel in a copy of this engine, and return that; raises UsageError."""
        run = copy.copy(self)
        run.model = model
        run.group = group
        run.backend = backend
        run.ddp_kwargs = ddp_kwargs
        made: object = run.prepare(model, group)
        if not callable(made):
            got = type(made).__name__
            raise UsageError(f"engine {self.name!r}: expected a callable from prepare(), got {got}")
        run.call = made
        sent = run.sends()
        if not isinstance(sent, Mapping | None):
            raise UsageError(f"engine {self.name!r}: expected a dict or None from sends(), got {sent!r}")
        if run.gives == "module" and run.ddp is None:
            raise UsageError(f"engine {self.name!r}: gives='module', but prepare() set no self.ddp")
        promises = run.sends_as_uncompiled or sent is not None
        if promises and (run.observable or run.captures_backward):
            raise UsageError(
                f"engine {self.name!r}: collectives are promised, but with observable or captures_backward "
                "nothing watches them; leave one of them out"
            )
        return run

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Set up Dynamo and Inductor for this engine from a clean state, and restore everything.

        Inductor draws random numbers as eager does, so that dropout can be compared.
        """
        torch._dynamo.reset()
        inductor = torch._inductor.config
        settings = {
            "fallback_random": True,
            "_fuse_ddp_bucket_size": inductor._fuse_ddp_bucket_size,  # DDP sets it
            "_fuse_ddp_communication": False,
        }
        try:
            with torch._dynamo.config.patch(optimize_ddp=self.optimize_ddp), inductor.patch(settings):
                yield
        finally:
            torch._dynamo.reset()
            forget_guards()
            skip_frames_of_ddp()


def forget_guards() -> None:
    """Let go of the guards of code that Dynamo has forgotten.

    Each of them waits for the end of types that live as long as the process, so a process that judges
    hundreds of trials would keep what they were compiled with.
    """
    for waiting, what in [*weakref.finalize._registry.items()]:  # type: ignore[attr-defined]  # private
        owner = getattr(getattr(what.func, "func", None), "__self__", None)
        if isinstance(owner, CheckFunctionManager):
            waiting.detach()


def skip_frames_of_ddp() -> None:
    """Let Dynamo skip DDP's own frames again.

    DDP with the Python reducer makes it trace them from then on: a static graph then no longer compiles, and
    a backward through a synchronized forward calls the module.
    """
    if TRACED_FOR_GOOD in trace_rules.LEGACY_MOD_INLINELIST:
        trace_rules.LEGACY_MOD_INLINELIST.remove(TRACED_FOR_GOOD)
        trace_rules.get_legacy_mod_inlinelist.cache_clear()


def updated(parameter: Tensor, gradient: Tensor | None, learning_rate: float) -> Tensor:
    """Return a parameter after plain SGD's update."""
    return parameter if gradient is None else parameter.add(gradient, alpha=-learning_rate)


def compiled(module: nn.Module, backend: Any) -> nn.Module:
    """Compile a module; without a backend, return it as it is."""
    made: Any = module if backend is None else torch.compile(module, backend=backend)
    return made  # type: ignore[no-any-return]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, of which this rank may hold a part; a collective of all ranks that do."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
