"""The reference of a mode: eager DDP under the same option, and its rounding errors.

Invariant: all ranks take part in every collective of a reference, even if some of them fail: errors are
exchanged first.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpopt.cases.case import Case
from ddpopt.errors import InfrastructureError, UnsupportedError
from ddpopt.judge.compare import Sum, bitwise, contribution, exact
from ddpopt.judge.engine import Engine, Gradients, Named
from ddpopt.judge.judging.arithmetic import Arithmetic
from ddpopt.judge.judging.evidence import Peer, peer_of
from ddpopt.judge.judging.failing import FailedAloneError, Failure, failure_of, own_of, stalled, told
from ddpopt.judge.judging.record import Record, pairs
from ddpopt.judge.judging.rounding import (
    SAMPLES,
    autocast_dtypes,
    coarsest,
    learned,
    perturbed,
    perturbed_state,
    widened,
)
from ddpopt.judge.meshes import Grid
from ddpopt.judge.modes import LOCAL, mode
from ddpopt.judge.moments import EXTRAS, NAMES, ExtraStepError
from ddpopt.judge.option_cases import in_dtype, trainable
from ddpopt.judge.trainer import Course, Option, Place, Trainer
from ddpopt.judge.training import train
from ddpopt.judge.updating import repeated
from ddpopt.ranks.group import Ranks, new_group
from ddpopt.ranks.pool import launch

COLLECTIVE_LIMIT_S = 20.0
"""For small models. Otherwise a rank may have to wait as long as a peer compiles."""
RESUMED = 1
"""Steps before a checkpoint."""
CHEAP = ("eager", "aot_eager")
"""Backends that generate no code, with which one more graph costs little."""
PATIENCE_S = 10.0
"""For peers of a rank that failed on its own: a collective of a group that it cannot close may hold them."""
CALM_LIMIT_S = 300.0
"""In the comparison's own group no mode can cause a failure; a rank may just be busy for a long time."""


@dataclass(frozen=True)
class Subject:
    """The thing to verify.

    Attributes:
        case: the case.
        option: how DDP is used.
        steps: the number of training steps.
        device: the device to compute on.
        evaluates: whether the model is evaluated after the last step, which compiles it twice more.
        grid: the place of this process; by default each rank trains a copy of the whole model.
    """

    case: Case
    option: Option
    steps: int
    device: torch.device
    evaluates: bool = True
    grid: Grid | None = None

    @functools.cached_property
    def adapted(self) -> Case:
        """The case as the option changes it."""
        return self.option.adapt(self.case)


class Bench:
    """Runs one subject on these ranks, each run in a new process group.

    Args:
        subject: the subject to run.
        ranks: the ranks to run it on.
        collective_limit_s: how long a rank waits for its peers in a collective of the run.
    """

    def __init__(
        self, subject: Subject, ranks: Ranks, collective_limit_s: float = COLLECTIVE_LIMIT_S
    ) -> None:
        self.subject = subject
        self.ranks = ranks
        self.collective_limit_s = collective_limit_s
        self.grid = subject.grid or Grid(None, ranks.rank, ranks.size)
        self.calm = new_group(max(collective_limit_s, CALM_LIMIT_S), self.grid.columns)
        self.failures: list[Failure] = []
        self.unevaluated = ""
        self.extras = [*NAMES] if subject.option.extras else []
        self.not_taken: dict[str, str] = {}
        self.has_momentum = True

    def close(self) -> None:
        """Destroy the process group of the comparison."""
        dist.destroy_process_group(self.calm)

    def run(self, how: Engine, backend: Any, **more: Any) -> Record | None:
        """Train in a mode.

        Args:
            how: the mode.
            backend: the Dynamo backend.
            more: fields of `ddpopt.judge.trainer.Course`, which may replace the case.

        Returns:
            The record; None if the run failed on any rank. `failures` then says on which, and how.
        """
        subject, resumes = self.subject, self.subject.option.resumes
        course = Course(
            more.pop("case", subject.adapted),
            subject.option,
            backend,
            RESUMED if resumes else subject.steps,
            evaluate=subject.evaluates and how is not LOCAL and not self.unevaluated and not resumes,
            extras=self._extras_of(how, backend) if subject.evaluates and not resumes else (),
            has_momentum=self.has_momentum,
            **more,
        )
        record, failure = None, None
        # Compiled code may leave gradients disabled; that must not affect later runs.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            grid, limit_s = self.grid, self.collective_limit_s
            group = new_group(limit_s, grid.columns)
            try:
                if resumes and grid.columns:
                    raise UnsupportedError(f"the option {subject.option.name} resumes no parts of models")
                course = replace(course, case=subject.option.grouped(course.case, group))
                with grid.laid(subject.device.type, group, limit_s):
                    record = train(course, how, Place(grid.rank, grid.size, group, subject.device))
            except ExtraStepError as error:
                failure = replace(failure_of(self.ranks.rank, error.__cause__ or error), extra=error.name)
            except (Exception, SystemExit) as error:
                failure = failure_of(self.ranks.rank, error)
            later = replace(course, steps=max(subject.steps, RESUMED + 1))
            # A reducer that is the last to hold its group would join the group's threads while it holds
            # Python's lock, for which they may wait.
            del course
            gc.collect()
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
            # Peers learn of a failure from closed connections, so no reference to the group may remain.
            del group
            gc.collect()
        self.failures = [other for other in self._gathered(failure) if other is not None]
        if record is not None and not self.failures and resumes:
            return self._resumed(record, later, how)
        return None if self.failures else record

    def _gathered(self, failure: Failure | None) -> list[Failure | None]:
        """How each rank failed, if it did; a rank that failed on its own does not wait for long."""
        if failure is None or failure.lost:
            return self.ranks.gather(failure)
        try:
            return self.ranks.gather(failure, PATIENCE_S)
        except InfrastructureError as error:
            raise FailedAloneError(f"{failure.text}; the other ranks waited for this one") from error

    def _extras_of(self, how: Engine, backend: Any) -> list[str]:
        """The extra steps of a run: all that eager takes, where compiling what is new for them is cheap."""
        if how is LOCAL:
            return []
        is_cheap = not isinstance(backend, str) or backend in CHEAP
        dear = {name for name, extra in EXTRAS.items() if extra.compiles}
        return [name for name in self.extras if is_cheap or name not in dear]

    def _resumed(self, record: Record, course: Course, how: Engine) -> Record | None:
        """Let new processes on the first rank's machine take the remaining steps."""
        checkpoints = self.ranks.gather(record.checkpoint)
        found, failure = list[Record](), None
        if self.ranks.rank == 0:
            device, nproc = self.subject.device.type, self.ranks.size
            try:
                found = launch(
                    _resume, course, how, checkpoints, nproc=nproc, limit_s=CALM_LIMIT_S, device=device
                )
            except Exception as error:
                failure = failure_of(0, error)
        found, failure = self.ranks.gather((found, failure))[0]
        self.failures = [failure] if failure else []
        return record.continued(found[self.ranks.rank]) if found else None

    def run_eager(self, **more: Any) -> Record | None:
        """Train in eager DDP; an evaluation or an extra step that fails in it is left out from then on."""
        record = self.run(mode("eager"), None, **more)
        while record is None and self._leaves_out():
            record = self.run(mode("eager"), None, **more)
        return record

    def _leaves_out(self) -> bool:
        """Leave out the extra step, or the evaluation, in which eager failed; whether there was one."""
        if self.stalled or any(failure.of_judge for failure in self.failures):
            return False
        failed = {failure.extra: failure.text for failure in self.failures if failure.extra}
        self.extras = [name for name in self.extras if name not in failed]
        self.not_taken |= failed
        if failed:
            return True
        if self.unevaluated:
            return False
        self.unevaluated = told(self.failures)
        return True

    @property
    def stalled(self) -> str:
        """How the last run failed only because of a time limit; empty if it did not."""
        return stalled(self.failures, self.ranks.size, self.collective_limit_s)

    def peers(self, record: Record) -> list[Peer]:
        """The summary of a run of every rank that trains a copy of the same part."""
        found = self.ranks.gather(peer_of(self.grid.rank, record))
        columns = self.grid.columns or [[*range(len(found))]]
        return [found[rank] for column in columns if self.ranks.rank in column for rank in column]

    def sums(self, gradients: Gradients, like: Named) -> dict[str, Sum]:
        """The contributions of the ranks to each gradient.

        Args:
            gradients: the gradients of this rank. None counts as zeros, and so does a gradient whose size is
                not its parameter's, which would break the collective; L3 reports it.
            like: the parameters.

        Returns:
            A sum for each gradient, on the device of the model, from which the process group can send.
        """
        found, device = {}, self.subject.device
        for name, gradient in gradients.items():
            shape = exact(like[name]).shape
            own = None if gradient is None else contribution(gradient).to(device)
            if own is None or own[0].numel() != shape.numel():
                own = contribution(torch.zeros(shape, device=device))
            own = own.reshape(3, *shape).contiguous()
            dist.all_reduce(own, group=self.calm)
            total, magnitude, terms = own
            found[name] = Sum(total, magnitude, self.grid.size, terms)
        return found


def _resume(ranks: Ranks, course: Course, how: Engine, checkpoints: Sequence[Any]) -> Record:
    """Go on from a checkpoint, a task for new ranks."""
    group: Any = dist.group.WORLD
    place = Place(ranks.rank, ranks.size, group, ranks.device)
    return train(replace(course, checkpoint=checkpoints[ranks.rank]), how, place)


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
        made, ready = cls(bench, eager, again), dict[str, None]()

        def prepare(trainer: Trainer) -> None:
            set_next = functools.partial(_set_buffers, iter(buffers))
            trainer.parallel.model.register_forward_pre_hook(set_next)
            parameter: Any  # torch does not type the method
            for name, parameter in trainable(trainer.parallel.model):
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.setdefault(name))

        if bench.subject.option.local:
            made.alone = bench.run(LOCAL, None, follow=eager.starts, tamper=prepare)
        if made.alone is not None:
            made.ready = [*(ready | dict.fromkeys(made.ready))]
            made.sums = [bench.sums(step.gradients, step.state) for step in made.alone.steps]
        return made

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
    def arithmetic(self) -> list[dict[str, Arithmetic]]:
        """The rounding of each number in eager, for each step. A collective at its first access."""
        bench, eager, option = self.bench, self.eager, self.bench.subject.option
        case, runs = bench.subject.adapted, [eager]
        own = bench.ranks.gather(autocast_dtypes(case, bench.grid.rank, bench.subject.device))
        computes = option.computes or coarsest(dtype for dtypes in own for dtype in dtypes)
        for number in range(1, SAMPLES):
            follow = [perturbed_state(state, number, computes) for state in eager.starts]
            moved = perturbed(case, number, computes)
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
