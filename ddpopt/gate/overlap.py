"""Overlap potential: how much of the backward is still to be done when each bucket leaves.

For each bucket, the share of the backward's FLOPs still to come at the moment its all-reduce is launched,
weighted by bytes. 1 would mean that everything is sent before the backward starts, 0 that everything is sent
after it ends. Nothing here reads a clock, so the figure repeats exactly on a busy machine. It is meaningful
as a ratio to eager DDP on the same model, inputs and DDP arguments, measured after DDP rebuilt its buckets.

Invariant: measuring changes no gradient. The communication hook computes DDP's own average, and the FLOPs are
counted around the last backward only, when buckets are rebuilt and lazy backwards compiled.
"""

# No postponed annotations here: DDP compares the annotations of a communication hook with types.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop

# Under static_graph the reducer records the ready order in iteration 2 and rebuilds in iteration 3.
WARMUP_ITERATIONS = 4


@dataclass(frozen=True)
class BucketLaunch:
    """One all-reduce of one bucket.

    Attributes:
        params: names of the bucket's parameters, in the bucket's order.
        nbytes: sum of ``numel * element_size`` over `params`.
        flops_before: FLOPs of this iteration's backward that were done when it was launched.
    """

    params: tuple[str, ...]
    nbytes: int
    flops_before: int


@dataclass(frozen=True)
class Measurement:
    """The measurement of one way to run a data-parallel step.

    Attributes:
        potential: overlap potential of the last iteration, between 0 and 1.
        flops: FLOPs of the last iteration's backward; if 0, `potential` is 0 too.
        iterations: for each iteration from the first, its launches in order. Only those of the last
            iteration carry ``flops_before``.
    """

    potential: float
    flops: int
    iterations: tuple[tuple[BucketLaunch, ...], ...]

    @property
    def buckets(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Parameter names of each bucket, for each iteration."""
        return tuple(tuple(launch.params for launch in launches) for launches in self.iterations)


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the FLOPs of everything dispatched inside it, with `torch.utils.flop_counter`'s formulas.

    torch's own FlopCounterMode also tracks module boundaries, for which it hooks the measured modules.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.total = 0
        self._formulas: dict[Any, Callable[..., int]] = {
            **flop_registry,
            # The CPU variant of the flash kernel has no formula in torch 2.13.
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
        }

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and add its FLOPs, if there is a formula for it."""
        options = dict(kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator):
            formula = self._formulas.get(func)
        else:
            formula = self._formulas.get(func._overloadpacket)
            if formula is None:
                with self:
                    # Without autograd, an operator such as matmul arrives whole, not decomposed.
                    parts = func.decompose(*args, **options)
                return func(*args, **options) if parts is NotImplemented else parts
        out = func(*args, **options)
        self.total += 0 if formula is None else int(formula(*args, **options, out_val=out))
        return out


class Recorder:
    """A communication hook that averages as DDP does and writes down each launch."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.iterations: list[list[BucketLaunch]] = []
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._group = ddp.process_group
        self._flops_so_far: Callable[[], int] = lambda: 0
        ddp.register_comm_hook(None, self._hook)

    def begin(self, flops_so_far: Callable[[], int] = lambda: 0) -> None:
        """Open a new iteration; `flops_so_far` is called at each launch."""
        self.iterations.append([])
        self._flops_so_far = flops_so_far

    def _hook(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        params = bucket.parameters()
        launch = BucketLaunch(
            params=tuple(self._names.get(id(p), "?") for p in params),
            nbytes=sum(p.numel() * p.element_size() for p in params),
            flops_before=self._flops_so_far(),
        )
        self.iterations[-1].append(launch)
        return average(bucket.buffer(), self._group)

    _hook.only_sends = True  # type: ignore[attr-defined]  # inline need not fear that it runs an optimizer


def average(gradients: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """DDP's own average: divide first, then sum, in place.

    Args:
        gradients: a bucket's flat buffer of any floating or complex dtype, or one sparse gradient.
        group: the process group of the DDP module.

    Returns:
        A completed future of `gradients`, which hold the mean over ranks.
    """
    gradients.div_(group.size())
    # c10d has no complex sum; summing real and imaginary parts is equivalent.
    summed = torch.view_as_real(gradients) if gradients.is_complex() else gradients
    # Synchronous, because no clock runs: a Python callback on gloo's thread may need the GIL while the
    # reducer, which holds the GIL, destroys the process group and joins that thread. That would hang.
    dist.all_reduce(summed, group=group)
    averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    averaged.set_result(gradients)
    return averaged


def overlap_potential(launches: Sequence[BucketLaunch], flops: int) -> float:
    """Byte-weighted mean share of the backward's FLOPs still to be done at each launch.

    Args:
        launches: one iteration's launches.
        flops: FLOPs of that iteration's whole backward.

    Returns:
        Between 0 and 1; 0 where there is nothing to send or nothing to overlap with.
    """
    nbytes = sum(launch.nbytes for launch in launches)
    if not nbytes or not flops:
        return 0.0
    left = sum(launch.nbytes * (flops - launch.flops_before) for launch in launches)
    return left / (nbytes * flops)


def ratio_to_eager(potential: float, eager: float) -> float:
    """How much of eager DDP's potential is kept; 1.0 where eager has none to keep.

    Eager has none when the formulas count no FLOP in the backward, or when its only launch comes after the
    last counted operation. The measured mode then loses nothing, so the ratio is 1.
    """
    return 1.0 if eager == 0.0 else potential / eager


def measure(ddp: DistributedDataParallel, loss: Callable[[int], torch.Tensor]) -> Measurement:
    """Run forward and backward until DDP has rebuilt its buckets, then measure one more iteration.

    Parameters are not updated. The measured iteration repeats the step before it, so it has no new shapes and
    nothing is compiled while FLOPs are counted.

    Args:
        ddp: the DDP module, before its first forward and without a communication hook.
        loss: runs the forward of one step (of `ddp`, or of a compiled callable around it), given the step's
            index from 0, and returns the scalar loss.

    Returns:
        The potential of the last iteration, and the buckets of every iteration.
    """
    recorder = Recorder(ddp)
    for step in range(WARMUP_ITERATIONS):
        recorder.begin()
        loss(step).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ddp.zero_grad(set_to_none=True)
    count = FlopCount()
    value = loss(WARMUP_ITERATIONS - 1)
    recorder.begin(lambda: count.total)
    with count:
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    ddp.zero_grad(set_to_none=True)
    launches = tuple(tuple(launched) for launched in recorder.iterations)
    return Measurement(overlap_potential(launches[-1], count.total), count.total, launches)
