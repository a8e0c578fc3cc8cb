"""What a model is made of, apart from the values of its tensors: modules, names, attributes and hooks.

Invariant: reading it changes nothing, and two equal models have equal makeups.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.judge.engines.meshes import has_parts

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def makeup(model: nn.Module) -> dict[str, Any]:
    """Everything that a model is made of, by what it is.

    The attributes of a DDP module inside it are left out, because they are DDP's own. Nothing is listed for a
    tensor-parallel model, which torch itself changes when eager DDP first runs it.
    """
    if has_parts(model):
        return {}
    parts: dict[str, Any] = {
        "the order of its parameters": [name for name, _ in model.named_parameters()],
        "the order of its modules": [name for name, _ in model.named_modules()],
    }
    for path, module in model.named_modules():
        place = path or "the model"
        if isinstance(module, DistributedDataParallel):
            continue
        parts[f"the type of {place}"] = type(module)
        parts[f"the attributes of {place}"] = sorted(vars(module))
        for name in module._buffers:
            parts[f"whether buffer {name} of {place} is saved"] = (
                name not in module._non_persistent_buffers_set
            )
        parts[f"hooks of {place}"] = [list(vars(module).get(name, {})) for name in HOOKS]
    for name, parameter in model.named_parameters():
        parts[f"hooks of {name}"] = list(hooks_of(parameter))
        parts[f"whether {name} is trained"] = parameter.requires_grad
    return parts


def remade(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed of that which was there before: an engine may give a model buffers of its own."""
    return [name for name in before if name in after and before[name] != after[name]]


def hooks_of(parameter: Tensor) -> dict[int, Any]:
    """The hooks on a parameter itself, by torch's number; torch does not list those on autograd nodes."""
    kinds = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return {number: hook for hooks in kinds for number, hook in (hooks or {}).items()}
