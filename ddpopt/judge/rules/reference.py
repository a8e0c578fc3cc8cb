"""The reference of a mode: eager DDP under the same option, and its rounding errors.

Invariant: all ranks take part in every collective of a reference, even if some of them fail: errors are
exchanged first.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ddpopt.cases.option_cases import in_dtype, trainable
from ddpopt.judge.compare import Sum, bitwise
from ddpopt.judge.engines.engine import Named
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.rules.arithmetic import Arithmetic
from ddpopt.judge.rules.bench import Bench
from ddpopt.judge.rules.failing import own_of, told
from ddpopt.judge.rules.rounding import (
    SAMPLES,
    autocast_dtypes,
    coarsest,
    learned,
    perturbed,
    perturbed_state,
    widened,
)
from ddpopt.judge.training.record import Record, pairs
from ddpopt.judge.training.trainer import Trainer
from ddpopt.judge.training.updating import repeated


def _remember_buffers(seen: list[Named], trainer: Trainer) -> None:
    """Record the buffers that each forward of a run sees, so that a run of the model alone can use them.

    DDP broadcasts the first rank's buffers before some forwards. On another rank, the model alone computes
    the gradients that DDP reduces only if it reads those buffers. If a run has more forwards than the one it
    follows, the extra forwards keep their own buffers.
    """

    def note(model: nn.Module, _: object) -> None:
        if trainer.is_training:
            seen.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})

    seen.clear()  # of a run that failed
    trainer.parallel.model.register_forward_pre_hook(note)


def _note_ready(ready: dict[str, None], name: str, _: nn.Parameter) -> None:
    ready.setdefault(name)


def _set_buffers(left: Iterator[Named], model: nn.Module, _: object) -> None:
    known: Named = next(left, {})
    for name, buffer in model.named_buffers():
        if name in known:
            buffer.detach().copy_(known[name])


class Reference:
    """Eager DDP's run of a subject, and everything derived from it.

    Attributes:
        bench: the bench that ran it.
        eager: its record.
        unjudged: what could not be derived, with the reason.
        again: the record of a second run, each step from the same state.
        unstable: names of numbers that differed in the second run, on any rank.
        written: names of parameters that something other than the optimizer writes to.
        sums: for each step, the contributions of the ranks to each gradient; empty if the reduced gradient is
            not the mean of what the model alone computes, or if the model alone fails.
        alone: the model's own run on this rank, from the states of the eager run.
        ready: names of the parameters, in the order in which a backward of the model alone completes their
            gradients; in reverse order of registration if it was not run.
    """

    def __init__(self, bench: Bench, eager: Record, again: Record) -> None:
        self.bench = bench
        self.eager = eager
        self.again = again
        self.unjudged: tuple[str, ...] = ()
        self.unstable = frozenset[str]().union(*bench.ranks.gather(_changed(eager, again)))
        own = _written(eager)
        self.written = frozenset[str]().union(*bench.ranks.gather(own))
        bench.has_momentum = not self.written
        self.alone: Record | None = None
        self.ready = list(eager.steps[0].gradients)[::-1] if eager.steps else []
        self.sums: list[dict[str, Sum]] = []
        self.eager_peers = bench.peers(eager)

    @classmethod
    def make(cls, bench: Bench) -> "Reference | None":
        """Run eager DDP twice, and the model alone.

        Returns:
            The reference; None if eager DDP fails here, in which case `bench.failures` says how.
        """
        buffers = list[Named]()
        eager = bench.run_eager(tamper=functools.partial(_remember_buffers, buffers))
        if eager is None:
            return None
        again = bench.run(mode("eager"), None, follow=eager.starts)
        if again is None:
            return None
        reference = cls(bench, eager, again)
        ready = dict[str, None]()

        def prepare(trainer: Trainer) -> None:
            set_next = functools.partial(_set_buffers, iter(buffers))
            trainer.parallel.model.register_forward_pre_hook(set_next)
            parameter: Any  # torch does not type the method
            for name, parameter in trainable(trainer.parallel.model):
                parameter.register_post_accumulate_grad_hook(functools.partial(_note_ready, ready, name))

        if bench.subject.option.local:
            reference.alone = bench.run(LOCAL, None, follow=eager.starts, tamper=prepare)
        if reference.alone is not None:
            reference.ready = [*(ready | dict.fromkeys(reference.ready))]
            reference.sums = [bench.sums(step.gradients, step.state) for step in reference.alone.steps]
        return reference

    @functools.cached_property
    def graphs(self) -> list[int] | None:
        """Dynamo's number of graphs for the model alone after each step; None if the model fails."""
        record = self.bench.run(LOCAL, "eager", follow=self.eager.starts)
        if record is None:
            self._miss("how many graphs the model alone has")
            return None
        return record.graphs_after

    def _miss(self, what: str) -> None:
        """Note what is not known, because the last run failed."""
        self.unjudged += (f"{what} ({told(own_of(self.bench.failures))})",)

    @functools.cached_property
    def computes(self) -> torch.dtype | None:
        """The dtype in which operations round, if not their operands'. A collective at first access."""
        bench = self.bench
        case = bench.subject.adapted
        own = bench.ranks.gather(autocast_dtypes(case, bench.grid.rank, bench.subject.device))
        return bench.subject.option.computes or coarsest(dtype for dtypes in own for dtype in dtypes)

    @functools.cached_property
    def arithmetic(self) -> list[dict[str, Arithmetic]]:
        """The rounding of each number in eager, for each step. A collective at its first access."""
        bench = self.bench
        eager = self.eager
        option = self.bench.subject.option
        case = bench.subject.adapted
        runs = [eager]
        for number in range(1, SAMPLES):
            follow = [perturbed_state(state, number, self.computes) for state in eager.starts]
            moved = perturbed(case, number, self.computes)
            run = bench.run(mode("eager"), None, case=moved, follow=follow)
            if run is None:
                self._miss(f"the rounding of eager in neighboring run {number} of {SAMPLES - 1}")
            else:
                runs.append(run)
        follow = [widened(state) for state in eager.starts]
        truth = bench.run(mode("eager"), None, case=in_dtype(case, torch.float64), follow=follow)
        return learned(
            runs, truth, self.sums, option.comm_dtype, unstable=self.unstable, written=self.written
        )


def _changed(eager: Record, again: Record) -> set[str]:
    """Names of the numbers on which two runs disagree."""
    return {n.key for n in pairs(again, eager) if not bitwise(n.got, n.eager).right}


def _written(eager: Record) -> set[str]:
    """Names of parameters that differ from the optimizer's update."""
    return {
        name
        for step, updated in zip(eager.steps, repeated(eager), strict=True)
        for name, expected in updated.parameters.items()
        if not bitwise(step.state[name], expected).right
    }
