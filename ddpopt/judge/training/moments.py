"""What a run does after its steps: evaluations, and extra steps that a training takes only sometimes.

Each begins from the state that eager DDP's last step left. Invariant: none of them updates a parameter,
except the last, after which nothing is recorded.
"""

import contextlib
import gc
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.engines.engine import Named
from ddpopt.judge.engines.meshes import has_parts
from ddpopt.judge.training.memory import Pairs
from ddpopt.judge.training.record import RecordedStep, unreduced
from ddpopt.judge.training.trainer import Option, Trainer, evaluating, random_state
from ddpopt.judge.training.values import form_of

EVALUATION = "the evaluation"
TWO_BACKWARDS = "two backwards"
UNREDUCED = "the last step under no_sync"
CHANGES = "list of what it changed"
FURTHER_STEPS = 4
Sent = tuple[str, ...]


@dataclass(frozen=True)
class Extra:
    """An extra step.

    Attributes:
        take: runs it, and returns the collectives of what needs no gradients in it.
        compiles: whether Dynamo may compile a graph for it that no step before it needed.
    """

    take: Callable[[Trainer], Sent]
    compiles: bool = False


def evaluation_between(trainer: Trainer) -> Sent:
    """Evaluate the model on other data between a forward and its backward."""
    loss = trainer.loss()
    with evaluating(trainer.parallel.model), torch.no_grad():
        sent = trainer.noting(lambda: trainer.forward(part=1))
    trainer.backward(loss)
    return sent


def two_backwards(trainer: Trainer) -> Sent:
    """Two forwards, each with a reduced backward of its own; the gradients add up."""
    for part in (0, 1):
        trainer.backward(trainer.loss(part))
    return ()


def in_evaluation_mode(trainer: Trainer) -> Sent:
    """A forward and a backward of a model in evaluation mode, as in fine-tuning with frozen statistics."""
    with evaluating(trainer.parallel.model):
        trainer.backward(trainer.loss())
    return ()


def without_gradients(trainer: Trainer) -> Sent:
    """A forward of a model in training mode without gradients."""
    with torch.no_grad():
        return trainer.noting(trainer.forward)


def with_a_smaller_batch(trainer: Trainer) -> Sent:
    """A step on fewer samples, as at the end of an epoch."""
    with trainer.fewer_samples():
        trainer.backward(trainer.loss())
    return ()


def further_steps(trainer: Trainer) -> None:
    """Take some more steps, and note how much memory each of them keeps at least."""
    kept = []
    for _ in range(FURTHER_STEPS):
        trainer.parallel.zero_grad()
        trainer.sight.before_step(keep=False)
        trainer.advance()
        trainer.extras = {}
        kept.append(bytes_of_tensors())
    trainer.record.growth = min(later - earlier for earlier, later in itertools.pairwise(kept))


EXTRAS: dict[str, Extra] = {
    "an evaluation between forward and backward": Extra(evaluation_between),
    TWO_BACKWARDS: Extra(two_backwards),
    "a step in evaluation mode": Extra(in_evaluation_mode, compiles=True),
    "a forward in training mode without gradients": Extra(without_gradients, compiles=True),
    "a smaller batch": Extra(with_a_smaller_batch, compiles=True),
}
FURTHER = "further steps"
INFERENCE = "inference"
SENDS_IN_INFERENCE = "what inference sends"
"""Run on its own: what notes collectives makes ``linear`` round otherwise in inference mode."""
NAMES = (*EXTRAS, FURTHER)
"""All extra steps in their order: those that may compile, and then may be left out, come last."""


class ExtraStepError(Exception):
    """An extra step failed; the cause is what it raised.

    Attributes:
        name: the name of the extra step.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"in an extra step, {name}")
        self.name = name


def extra_step(trainer: Trainer, name: str) -> None:
    """Take an extra step, from the state that eager DDP's last step left, and record it.

    Raises:
        ExtraStepError: it failed.
    """
    record = trainer.record
    if trainer.parallel.whole is not None and name != FURTHER:  # a captured step is captured as a step
        return
    trainer.step = len(record.steps) - 1
    trainer.parallel.load((record.follow or record.starts)[-1])
    trainer.extras = {}
    trainer.seed()
    trainer.parallel.zero_grad()
    trainer.sight.before_step(keep=False)
    before = trainer.parallel.state()
    try:
        if name == FURTHER:
            further_steps(trainer)
            return
        sent = EXTRAS[name].take(trainer)
    except Exception as error:
        raise ExtraStepError(name) from error
    random = random_state(trainer.place.device)
    gradients = trainer.parallel.gradients()
    extras = trainer.extras | trainer.sight.after_step() | trainer.sight.settings(trainer.place.device)
    extras[CHANGES] = ", ".join(_changed(trainer, before, but=gradients)) or "none"
    state = {name: tensor for name, tensor in trainer.parallel.state().items() if name not in gradients}
    record.extras[name] = RecordedStep(
        moment=name, loss=None, gradients=gradients, state=state, random=random, extras=extras, sent=sent
    )


def evaluate(trainer: Trainer) -> None:
    """Run the model once from the first step's initial state, and twice from eager's final state."""
    record = trainer.record
    states = record.follow or record.starts
    last = len(record.steps)
    extras: dict[str, Any] = {}
    sharing: Pairs = frozenset()
    sent: tuple[str, ...] = ()
    with evaluating(trainer.parallel.model):
        ways: list[Any] = [("first evaluation", 0, torch.no_grad), ("evaluation", last, torch.no_grad)]
        if not has_parts(trainer.parallel.model):  # DTensor's layers compute in another order in inference
            ways += [(name, last, torch.inference_mode) for name in (SENDS_IN_INFERENCE, INFERENCE)]
        for name, steps, without_gradients in ways:
            trainer.parallel.load(states[steps])
            trainer.step = max(0, steps - 1)
            trainer.extras = {}
            trainer.seed()
            trainer.parallel.zero_grad()
            before = trainer.parallel.state()
            trainer.sight.before_step(keep=False)
            with without_gradients():
                if name == INFERENCE:
                    trainer.forward()
                else:
                    sent += trainer.noting(trainer.forward)
                if name == SENDS_IN_INFERENCE:
                    continue
                seen = trainer.extras | trainer.sight.after_step()
                sharing |= trainer.sight.memory()[0]
            seen |= trainer.sight.settings(trainer.place.device)
            seen[CHANGES] = ", ".join(_changed(trainer, before)) or "none"
            drawn = random_state(trainer.place.device)
            seen["state of torch's generators"] = hashlib.blake2b(raw_bytes(drawn), digest_size=8).hexdigest()
            for what, value in seen.items():
                is_of_inference = isinstance(value, Tensor) and value.is_inference()
                # an inference tensor may not be used outside inference mode
                extras[f"{name}'s {what}"] = value.clone() if is_of_inference else value
    trained = record.steps[-1].gradients
    state = {name: tensor for name, tensor in trainer.parallel.state().items() if name not in trained}
    shared = None if trainer.parallel.is_sharded else sharing
    record.evaluation = RecordedStep(
        moment=EVALUATION,
        loss=None,
        gradients={},
        state=state,
        random=random_state(trainer.place.device),
        extras=extras,
        sharing=shared,
        sent=sent,
    )


def _changed(trainer: Trainer, before: Named, but: Any = ()) -> Iterator[str]:
    """Names of parameters and buffers that changed in value, form or gradient.

    Args:
        trainer: the trainer.
        before: parameters and buffers as they were.
        but: names that may have a gradient.
    """
    now = trainer.parallel.state()
    gradients = trainer.parallel.gradients()
    for name, tensor in before.items():
        if name not in now:
            yield name
            continue
        is_form_kept = trainer.parallel.moves_parameters or form_of(now[name]) == form_of(tensor)
        is_as_before = is_form_kept and torch.equal(now[name], tensor)
        has_gradient = name not in but and gradients.get(name) is not None
        is_buffer_of_training = name not in gradients and bool(but)  # buffers are compared themselves
        if has_gradient or not (is_as_before or is_buffer_of_training):
            yield name


def probe(trainer: Trainer, option: Option) -> None:
    """Repeat the last step under no_sync."""
    record = trainer.record
    ddp = trainer.ddp
    trainer.step = len(record.steps) - 1
    trainer.parallel.load(record.starts[trainer.step])
    trainer.seed()
    trainer.parallel.zero_grad()
    broadcasts = ddp.require_forward_param_sync
    with trainer.parallel.no_sync():
        option.take_step(trainer)
    ddp.require_forward_param_sync = broadcasts  # broadcasts buffers before the next forward
    gradients = {unreduced(name): gradient for name, gradient in trainer.parallel.gradients().items()}
    random = random_state(trainer.place.device)
    record.local = RecordedStep(
        moment=UNREDUCED, loss=None, gradients={}, state={}, random=random, extras=gradients
    )


def bytes_of_tensors() -> int:
    """The bytes of all memory that tensors of this process hold, as far as Python can reach them."""
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter, nn.Buffer) and each.layout is torch.strided:
            with contextlib.suppress(
                NotImplementedError
            ):  # a wrapper of functorch, without memory of its own
                storage = each.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
