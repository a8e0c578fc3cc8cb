"""The actions of options around a step: accumulate, hook, clip, join.

Invariant: a step uses only its `Trainer`, so the reference and every mode do the same.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable

from ddpopt.cases.option_cases import set_extra, smaller_batch, trainable
from ddpopt.judge.training.trainer import Place, Trainer
from ddpopt.judge.training.updating import LEARNING_RATE, SCALE

MAX_NORM = 0.01

# ------------------------------------------------------------------------------------------------ steps


def accumulate(trainer: Trainer) -> None:
    """Take two micro-batches without reducing, and one with."""
    with trainer.parallel.no_sync():
        for part in (1, 2):
            trainer.backward(trainer.loss(part))
    trainer.backward(trainer.loss())


def accumulate_later(trainer: Trainer) -> None:
    """Accumulate from the second step on: a static graph is recorded in the first."""
    if trainer.step == 0:
        trainer.backward(trainer.loss())
    else:
        accumulate(trainer)


def mixed_forwards(trainer: Trainer) -> None:
    """Run one backward through two forwards, of which only one syncs."""
    first = trainer.loss()
    with trainer.parallel.no_sync():
        second = trainer.loss(part=1)
    trainer.backward(first + second)


def two_forwards(trainer: Trainer) -> None:
    """Run one backward through two forwards that sync."""
    trainer.backward(trainer.loss() + trainer.loss(part=1))


def autocast(trainer: Trainer) -> None:
    """Run the forward under bfloat16 autocast."""
    with torch.autocast(trainer.place.device.type, dtype=torch.bfloat16):
        loss = trainer.loss()
    trainer.backward(loss)


def scaled(trainer: Trainer) -> None:
    """Scale the loss, as for half precision."""
    loss = trainer.updates.scaler.scale(trainer.loss())
    trainer.backward(loss * trainer.updates.factor.to(loss))


def evaluate_between(trainer: Trainer) -> None:
    """Evaluate between two micro-batches, and between a forward and its backward."""
    with trainer.parallel.no_sync():
        trainer.backward(trainer.loss(1))
    trainer.evaluate(2)
    loss = trainer.loss()
    trainer.evaluate(3)
    trainer.backward(loss)


def both_models(trainer: Trainer) -> None:
    """Run one backward through two independent models."""
    loss = trainer.loss()
    if trainer.other is not None:
        loss = loss + trainer.loss_of_other(part=1)
    trainer.backward(loss)


# --------------------------------------------------------------------------------- before and after a step


def keep_other_gradients(trainer: Trainer) -> None:
    """Add the gradients of the other model to the comparison."""
    if trainer.other is not None:
        trainer.extras |= {f"other {name}": each for name, each in trainer.other.gradients().items()}
        trainer.other.zero_grad()


def clip(trainer: Trainer) -> None:
    """Clip gradients by their total norm."""
    trainer.extras["norm"] = trainer.parallel.clip(MAX_NORM)


def rescale(trainer: Trainer) -> None:
    """Change the scale on all ranks alike; in the second step the loss of the first rank overflows."""
    overflows = (trainer.step, trainer.place.rank) == (1, 0)
    trainer.updates.factor = torch.tensor(torch.inf if overflows else 1.0)
    if trainer.step:
        trainer.updates.scaler.update(SCALE * 2**trainer.step)


def unscale(trainer: Trainer) -> None:
    """Divide gradients by the scale of the loss."""
    trainer.updates.scaler.unscale_(trainer.updates.optimizer)


def shrink_last(trainer: Trainer) -> None:
    """Use fewer samples in each third step, as at the end of an epoch."""
    trainer.resized = smaller_batch if trainer.step % 3 == 2 else None


def use_extra_somewhere(trainer: Trainer) -> None:
    """Use the extra parameter on every third rank and step."""
    set_extra(trainer.parallel.model, (trainer.step + trainer.place.rank) % 3 == 0)


def use_extra_nowhere(trainer: Trainer) -> None:
    """Use the extra parameter on no rank."""
    set_extra(trainer.parallel.model, used=False)


def evaluate_between_steps(trainer: Trainer) -> None:
    """Evaluate the model once, without gradients."""
    if trainer.step == 0:
        return
    trainer.parallel.model.eval()
    with torch.no_grad():
        trainer.extras["evaluated"] = trainer.loss(part=1)
    trainer.parallel.model.train()


def fewer_steps_later(place: Place, steps: int) -> int:
    """Return fewer steps for higher ranks, but at least one."""
    return max(1, steps - place.rank)


# ---------------------------------------------------------------------------------------------- configure


def comm_hook(trainer: Trainer, hook: Callable[..., Any]) -> None:
    """Register one of torch's communication hooks."""
    if trainer.ddp is not None:
        trainer.ddp.register_comm_hook(trainer.place.group, hook)


def other_model(trainer: Trainer) -> None:
    """Make another model, from the same weights."""
    trainer.other = trainer.make()


def hook_stepping(trainer: Trainer) -> None:
    """Register a communication hook that steps the parameters of a bucket as soon as it is reduced."""

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        def step(reduced: torch.futures.Future[Tensor]) -> Tensor:
            with torch.no_grad():
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    parameter.add_(gradient, alpha=-LEARNING_RATE)
            return reduced.value()

        return default_hooks.allreduce_hook(trainer.place.group, bucket).then(step)

    if trainer.ddp is not None:
        trainer.ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def tensor_hook(trainer: Trainer) -> None:
    """Double the gradient of the first trainable parameter."""
    first: Any = trainable(trainer.parallel.model)[0][1]
    first.register_hook(lambda gradient: gradient * 2)  # torch does not type its hooks


def accumulated_hooks(trainer: Trainer) -> None:
    """Count how often each gradient is accumulated."""
    parameter: Any  # torch does not type its hooks
    for name, parameter in trainable(trainer.parallel.model):
        parameter.register_post_accumulate_grad_hook(_counting(trainer, f"accumulated {name}"))


def _counting(trainer: Trainer, what: str) -> Callable[..., None]:
    def count(*_: Any) -> None:
        trainer.extras[what] = trainer.extras.get(what, 0) + 1

    return count


def module_hooks(trainer: Trainer) -> None:
    """Count forwards and backwards of the model."""
    trainer.parallel.model.register_forward_hook(_counting(trainer, "forwards"))
    trainer.parallel.model.register_full_backward_hook(_counting(trainer, "backwards"))


def joining(trainer: Trainer) -> AbstractContextManager[Any]:
    """Let ranks that are done join the others' collectives."""
    own = [each for each in (trainer.ddp, trainer.updates.optimizer) if isinstance(each, Joinable)]
    return Join(own) if own else contextlib.nullcontext()


def saving_otherwise(_: Trainer) -> AbstractContextManager[Any]:
    """Store autograd's saved tensors in another dtype, wide enough for every float and for small integers."""

    def pack(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
        if tensor.dtype in (torch.float32, torch.bfloat16):
            return tensor.dtype, tensor.double()
        return tensor.dtype, tensor.bfloat16() if tensor.dtype == torch.int64 else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[1].to(saved[0]))
