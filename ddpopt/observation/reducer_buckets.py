"""The buckets of a DDP module's running reducer, as reported by the reducer itself.

Invariant: the query changes nothing and takes almost no memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpopt.ddp.agreement import group_name
from ddpopt.ddp.held import bucket_members, running_reducer
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import limits_of, specs_from_ddp
from ddpopt.planning.bucket_rule import ParamSpec, initial_buckets
from ddpopt.planning.plan import Plan, SentTogether


@dataclass(frozen=True)
class ObservedBucket(SentTogether):
    """A bucket as the running reducer has it.

    Attributes:
        group: as for `ddpopt.Plan`.
    """

    group: str = ""

    @property
    def numel(self) -> int:
        """Total number of elements of `params`."""
        return self.nbytes // int(getattr(torch, self.dtype).itemsize)


def running_buckets(ddp: Any) -> tuple[ObservedBucket, ...]:
    """The buckets in the order in which they are reduced.

    Args:
        ddp: the DDP module. Do not call this from inside its backward, which may hold the reducer's lock.

    Returns:
        The buckets that its next backward would reduce, unless its next forward rebuilds them.
    """
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    members = bucket_members(running_reducer(ddp)) or _predicted(ddp)
    specs = [[ParamSpec.of(names.get(id(p), "(replaced)"), p) for p in bucket] for bucket in members]
    group = group_name(ddp.process_group)
    return tuple(ObservedBucket.of(index, bucket, group) for index, bucket in enumerate(specs))


def buckets_of(plan: Plan) -> tuple[ObservedBucket, ...]:
    """The buckets of a plan, as an observation shows them."""
    return tuple(
        ObservedBucket(b.index, b.params, b.nbytes, b.dtype, b.device, plan.group) for b in plan.buckets
    )


def _predicted(ddp: Any) -> list[list[Tensor]]:
    """The buckets of a reducer that does not report them because it has not rebuilt them yet."""
    plan = imposed_plan(ddp)
    if plan is not None:
        planned = {ddp.reducer.names[id(parameter)]: parameter for parameter in ddp.reducer.parameters}
        return [[planned[name] for name in bucket.params] for bucket in plan.buckets]
    parameters = dict(ddp.module.named_parameters())
    specs = specs_from_ddp(ddp)
    buckets = initial_buckets(specs, limits_of(ddp))
    return [[parameters[specs[index].name] for index in bucket] for bucket in buckets]
