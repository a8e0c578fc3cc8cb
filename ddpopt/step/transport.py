"""How a step sends a module's gradients: as DDP's reducer does, or as one of torch's communication hooks.

These hooks scale a bucket, send it, perhaps in another dtype, and copy it back; a step has the same operators
in its graph. Any other hook is code that only DDP can call.

Invariant: each gradient is rounded as by the reducer or the hook itself, so the result is equal bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


@dataclass(frozen=True)
class Transport:
    """How gradients are averaged.

    Attributes:
        divides: whether each is divided by the number of ranks, as hooks do; DDP's reducer multiplies by its
            reciprocal, which rounds differently where the number is no power of 2.
        dtype: the dtype in which they are sent; None for their own.
    """

    divides: bool = False
    dtype: torch.dtype | None = None


REDUCER = Transport()
HOOKS: Mapping[Any, Transport] = {
    default_hooks.allreduce_hook: Transport(divides=True),
    default_hooks.fp16_compress_hook: Transport(divides=True, dtype=torch.float16),
    default_hooks.bf16_compress_hook: Transport(divides=True, dtype=torch.bfloat16),
}
BUILT_IN: Mapping[str, Transport] = {
    "BuiltinCommHookType.ALLREDUCE": Transport(divides=True),
    "BuiltinCommHookType.FP16_COMPRESS": Transport(divides=True, dtype=torch.float16),
}
"""By the name that DDP's logging data has for them; DDP keeps no object of theirs."""


def transport_of(ddp: Any) -> Transport | None:
    """How a DDP module sends its gradients.

    Args:
        ddp: the module.

    Returns:
        The transport; None if that is up to a hook which a step cannot have in its graph: one of the user's,
        or one that sends in another group than the module's.
    """
    if not ddp._comm_hooks:
        name = ddp._get_ddp_logging_data().get("comm_hook")
        return REDUCER if not name else BUILT_IN.get(name)
    hook, state = ddp._comm_hooks[-1]
    group = state if state is not None else dist.group.WORLD
    return HOOKS.get(hook) if group is ddp.process_group and isinstance(hook, type(transport_of)) else None
