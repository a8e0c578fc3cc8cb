"""What the modules of a simulated rank keep besides parameters and buffers, such as counters and caches.

Invariant: after `restore`, a module has the attributes of `kept`, whichever rank was simulated in between, as
far as they are plain or tensors without a history.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ddpopt.judge.training.values import PLAIN

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
Kept = dict[str, dict[str, Any]]
"""By module, the values of its attributes that are no parameters, buffers or modules."""


def kept(parts: dict[str, nn.Module]) -> Kept:
    """What modules keep besides parameters, buffers and modules, as far as it can be restored."""
    return {
        path: {name: tree_map(lambda leaf: leaf, vars(module)[name]) for name in _restorable(module)}
        for path, module in parts.items()
    }


def _restorable(module: nn.Module) -> set[str]:
    """The names of attributes that a rank can find as it left them."""
    values = vars(module).items()
    return {name for name, value in values if name not in OF_EVERY_MODULE and _is_restorable(value)}


def _is_restorable(value: Any) -> bool:
    """Whether a value is plain, or made of plain values and of tensors without a history."""
    return all(
        not leaf.requires_grad if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN)
        for leaf in tree_leaves(value)
    )


def restore(parts: dict[str, nn.Module], before: Kept) -> None:
    """Give modules the attributes that they had, and no others of this kind."""
    for path, values in before.items():
        for name, value in values.items():
            if vars(parts[path]).get(name) is not value:
                vars(parts[path])[name] = tree_map(lambda leaf: leaf, value)
        if isinstance(parts[path], DistributedDataParallel):  # which keeps what it learns about the process
            continue
        for name in _restorable(parts[path]) - values.keys():  # another rank's
            delattr(parts[path], name)
