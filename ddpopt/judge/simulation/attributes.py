"""What a simulated rank keeps from one step to the next, such as counters and caches of its modules.

Invariant: after `restore`, a module has the attributes of `kept`, whichever rank was simulated in between, as
far as they are plain or tensors without a history.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ddpopt.judge.engines.engine import Named
from ddpopt.judge.training.values import PLAIN

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
Kept = dict[str, dict[str, Any]]
"""By module, the values of its attributes that are no parameters, buffers or modules."""


@dataclass(frozen=True)
class Remembered:
    """What a rank's step leaves to its next one.

    Attributes:
        attributes: of the modules.
        updates: the state of the optimizer, for the ranks that are judged in full.
        buffers: those that DDP leaves to each rank.
        broadcasts: whether DDP sends the buffers in the next forward.
    """

    attributes: Kept
    updates: Any
    buffers: Named = field(default_factory=dict)
    broadcasts: bool = True


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
