"""What a training script can see of a step besides the parameters and their gradients.

Outputs, inputs and their gradients, gradients of tensors outside DDP, objects that modules and hooks keep,
and which of these share memory. No hook is registered, so the program that runs is the user's. Invariant:
equal programs see the same values under the same names, in any run of a process.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.judge.compare import bitwise, raw_bytes
from ddpopt.judge.training.makeup import hooks_of, makeup, remade
from ddpopt.judge.training.memory import Pairs, sharing
from ddpopt.judge.training.surroundings import (
    CHANGED_BY_COMPILING,
    changed,
    generators,
    process_state,
    settings_of_torch,
)
from ddpopt.judge.training.values import (
    PLAIN,
    form_of,
    held_by,
    is_theirs,
    leaves,
    reached,
    type_name_of,
    walked,
)

GRADIENT_OF = "gradient of "
KEPT = "kept "
OUTSIDE = "the tensor outside DDP"
ATTRIBUTE = "attribute "
LAST = "the last step's "
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
SETTINGS = "state of torch's settings"
REMADE = "list of what it changed in the model"
REMADE_BY_OPTIMIZER = f"optimizer's {REMADE}"
MOVED = "list of parameters in other memory"
STEPS_THAT_COMPILE = 2


def is_of_last_step(name: str) -> bool:
    """Whether a name in a sharing pair is that of a result of the previous step."""
    return name.startswith(LAST)


def _which(forward: int) -> str:
    return f" of forward {forward}" if forward > 1 else ""


class Sight:
    """Everything visible in one step of a run. It is notified of each forward, before and after a step.

    Args:
        functions: the case's functions, which may use tensors outside DDP and keep what they see.
        model: the model; its parameters are not outside DDP, and its modules may keep what they see.
    """

    def __init__(self, functions: Sequence[Any], model: nn.Module) -> None:
        self._functions = functions
        self._model = model
        self._cleared: dict[int, Tensor] = {}
        self._held: dict[str, Any] = {}
        self._last: dict[str, tuple[Tensor, Tensor]] = {}
        self._process: dict[str, Any] = {}
        self._makeup: dict[str, Any] = {}
        self._places: dict[str, int | None] = {}
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._outside: dict[int, Tensor] = {}
        self._forwards = 0

    def before_step(self, *, keep: bool) -> None:
        """Forget the last step's forwards, clear gradients of outside tensors, and record what is kept."""
        self._forget()
        for tensor in self._cleared.values():
            if keep and tensor.grad is not None:
                tensor.grad.detach().zero_()
            else:
                tensor.grad = None
        self._held = dict(self._keepers())
        if not self._steps:  # later, also what an optimizer changed since the last step must be seen
            self._process = process_state()
            self._makeup = makeup(self._model)
        if not self._places:  # later, an optimizer may have moved them
            self._places = {name: _place(parameter) for name, parameter in self._model.named_parameters()}
        self._steps += 1

    def calls(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the arguments of a forward."""
        self._forwards += 1
        for name, value in (*enumerate(args), *kwargs.items()):
            for path, leaf in leaves(value, f"input {name}{_which(self._forwards)}"):
                if isinstance(leaf, Tensor):
                    self._inputs[path] = leaf
                    self._clear_once(leaf)

    def returns(self, output: Any, forward: int = 0, values: Any = None) -> dict[str, Any]:
        """Record the output of a forward, by default the last; return its values and their form.

        Args:
            output: the output.
            forward: the number of the forward.
            values: the output with its values after the forward, if they may have changed.
        """
        name = f"output{_which(forward or self._forwards)}"
        found: dict[str, Any] = {
            f"type of {path}": type_name_of(value) for path, value in walked(output, name)
        }
        then = {} if values is None else dict(leaves(values, name))
        for path, leaf in leaves(output, name):
            found[path] = _as_tensor(then.get(path, leaf))
            if isinstance(leaf, Tensor):
                self._outputs[path] = leaf
                leaf_or_not = ", a leaf" if leaf.requires_grad and leaf.is_leaf else ""
                found[f"form of {path}"] = f"{form_of(leaf)}{leaf_or_not}"
        return found

    def reach(self, loss: Tensor) -> None:
        """Record the leaves outside DDP that a loss sends gradients to."""
        known = self._parameters() | {id(tensor) for tensor in self._inputs.values()}
        for leaf in reached(loss):
            if id(leaf) not in known:
                self._outside[id(leaf)] = leaf
                self._clear_once(leaf)

    def _clear_once(self, tensor: Tensor) -> None:
        """Clear the gradient that an earlier run left."""
        if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self._cleared:
            self._cleared[id(tensor)] = tensor
            tensor.grad = None

    def _parameters(self) -> set[int]:
        return {id(parameter) for parameter in self._model.parameters()}

    def after_step(self) -> dict[str, Any]:
        """Return everything visible after the backward, by name."""
        found = {f"{path} after the step": _as_tensor(tensor) for path, tensor in self._inputs.items()}
        found |= {f"{path} after the step": _as_tensor(tensor) for path, tensor in self._outputs.items()}
        found["list of gradients with a history, or of frozen parameters"] = ", ".join(self._odd()) or "none"
        for name, tensor in self._leaves():
            found[f"{GRADIENT_OF}{name}"] = _as_tensor(tensor.grad)
            if tensor.grad is not None:
                found[f"form of the {GRADIENT_OF}{name}"] = form_of(tensor.grad)
        return found | {f"{KEPT}{name}": _as_tensor(value) for name, value in self._kept()}

    def _odd(self) -> Iterator[str]:
        """Parameters whose gradients themselves require gradients, or that should have no gradient."""
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and (gradient.requires_grad or not parameter.requires_grad):
                yield name

    def settings(self, device: torch.device) -> dict[str, str]:
        """Return the state of torch that a step may leave changed, and what has changed since the last call.

        Args:
            device: the device of the model.

        Returns:
            By name, as text. What changed in the process and in the model is counted from the first step on.
        """
        training = sorted({part.training for part in self._model.modules()})
        drawn = {f"state of {name} generator": state for name, state in generators().items()}
        return {
            SETTINGS: f"{settings_of_torch(device)}, training {training}",
            "list of what it changed in the process": ", ".join(self._changed_process()) or "nothing",
            REMADE: self.changed_parts(),
            MOVED: ", ".join(self._moved()) or "none",
            **drawn,
        }

    def forget_changes(self) -> None:
        """Take what was changed in the process and the model so far for what was there before."""
        if self._steps:
            self._process = process_state()
            self._makeup = makeup(self._model)

    def changed_parts(self) -> str:
        """What the model has or lacks since the last call, as text."""
        before = self._makeup
        self._makeup = makeup(self._model)
        return ", ".join(remade(before, self._makeup)) or "nothing"

    def _changed_process(self) -> list[str]:
        """What was changed in this process since the last step, but for what a compiler changes first."""
        before = self._process
        self._process = process_state()
        found = changed(before, self._process)
        compiles = self._steps <= STEPS_THAT_COMPILE
        return [name for name in found if not (compiles and name in CHANGED_BY_COMPILING)]

    def _moved(self) -> Iterator[str]:
        """Parameters whose memory the step replaced."""
        for name, parameter in self._model.named_parameters():
            if name in self._places and self._places[name] != _place(parameter):
                yield name

    def memory(self) -> tuple[Pairs, tuple[str, ...]]:
        """Return what shares memory, and which results kept from the last step were written since."""
        seen = self._inputs | dict(self._leaves()) | dict(self._model.named_parameters())
        seen |= {f"buffer {name}": tensor for name, tensor in self._model.named_buffers()}
        leaf_gradients = ((name, tensor.grad) for name, tensor in seen.items() if tensor.is_leaf)
        results = {f"{GRADIENT_OF}{name}": grad for name, grad in leaf_gradients if grad is not None}
        results |= self._outputs
        seen |= self._outputs
        kept = {f"{KEPT}{name}": value for name, value in self._kept() if isinstance(value, Tensor)}
        older = {f"{LAST}{name}": tensor for name, (tensor, _) in self._last.items()}
        written = (name for name, (now, then) in self._last.items() if not bitwise(now, then).right)
        found = sharing(seen | results | kept | older), tuple(sorted(written))
        own = {name: _on_this_rank(tensor) for name, tensor in results.items()}
        self._last = {name: (tensor, tensor.detach().clone()) for name, tensor in own.items()}
        return found

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Inputs that are leaves, and tensors outside DDP, by names that do not depend on the run."""
        yield from ((name, t) for name, t in self._inputs.items() if t.is_leaf and t.requires_grad)
        counts: dict[str, int] = {}
        for tensor in self._outside.values():
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                continue  # FSDP's: it frees a whole parameter after the backward
            # graphs of compiled code have different leaves, in a different order
            digest = hashlib.blake2b(raw_bytes(tensor), digest_size=3).hexdigest()
            name = f"{OUTSIDE} of shape {tuple(tensor.shape)}, digest {digest}"
            counts[name] = counts.get(name, 0) + 1
            yield name if counts[name] == 1 else f"{name}, number {counts[name]}", tensor

    def _keepers(self) -> Iterator[tuple[str, Any]]:
        """The attributes of modules, and the objects that hooks and the case's functions hold.

        A DDP module's attributes are left out.
        """
        for path, module in self._model.named_modules():
            own = {} if isinstance(module, DistributedDataParallel) else vars(module)
            for name, value in own.items():
                if name not in OF_EVERY_MODULE and isinstance(value, (Tensor, *PLAIN, list, dict, tuple)):
                    yield from leaves(value, f"{ATTRIBUTE}{path}.{name}")
        for hook in _hooks(self._model):
            yield from ((f"by a hook: {name}", value) for name, value in held_by(hook))
        for function in self._functions:
            yield from ((f"by the case: {name}", value) for name, value in held_by(function))
        kind: Any
        for kind in dict.fromkeys(map(type, self._model.modules())):
            if not is_theirs(kind.forward):
                held = held_by(kind.forward, 0)
                yield from ((f"by {kind.__name__}.forward: {name}", value) for name, value in held)

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """Objects added since the step began, and earlier tensors, which may have been written."""
        parameters = self._parameters()
        counts = dict[str, int]()
        for name, value in self._keepers():
            if name not in self._held or self._held[name] is not value:
                if not name.startswith(ATTRIBUTE):  # a list outside the model grows from run to run
                    base = re.sub(r"\[\d+\]", "", name)
                    counts[base] = counts.get(base, 0) + 1
                    name = f"{base}, number {counts[base]}"
                yield name, value
            elif isinstance(value, Tensor) and "[" not in name and id(value) not in parameters:
                yield name, value


def _hooks(model: nn.Module) -> Iterator[Any]:
    """The hooks on a model's modules and parameters that run in a step."""
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from vars(module).get(name, {}).values()
    for parameter in model.parameters():
        yield from hooks_of(parameter).values()


def _on_this_rank(tensor: Tensor) -> Tensor:
    """What a rank holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(parameter: Tensor) -> int | None:
    """The address of a parameter that has its own memory; None for any other."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return parameter.data_ptr() if is_plain else None


def _as_tensor(value: Any) -> Any:
    """A number as a tensor, to be judged like all others; a string or None unchanged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (int, float)) else value
