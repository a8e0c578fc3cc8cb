"""Run one subject on these ranks: each run in a process group of its own, and none waits for a dead peer.

Invariant: all ranks take part in every collective of a bench, even if some of them fail: errors are exchanged
first.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ddpopt.cases.case import Case
from ddpopt.errors import InfrastructureError, UnsupportedError, UsageError
from ddpopt.judge.compare import Sum, contribution, exact
from ddpopt.judge.engines.engine import Engine, Gradients, Named
from ddpopt.judge.engines.meshes import Grid
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.rules.evidence import Peer, peer_of
from ddpopt.judge.rules.failing import FailedAloneError, Failure, failure_of, stalled, told
from ddpopt.judge.training.moments import EXTRAS, NAMES, ExtraStepError
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.train import train
from ddpopt.judge.training.trainer import Course, Option, Place
from ddpopt.ranks.group import Ranks, new_group

Resume = Callable[[Course, Engine, Sequence[Any], str], list[Record]]
"""Goes on from the checkpoint of each rank, on a device, in new processes; returns the record of each."""
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
        resume: takes the remaining steps of a run in new processes; only the option ``resumed`` needs it.
    """

    def __init__(
        self,
        subject: Subject,
        ranks: Ranks,
        collective_limit_s: float = COLLECTIVE_LIMIT_S,
        resume: Resume | None = None,
    ) -> None:
        self.subject = subject
        self.ranks = ranks
        self.collective_limit_s = collective_limit_s
        self.resume = resume
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
            more: fields of `ddpopt.judge.training.trainer.Course`, which may replace the case.

        Returns:
            The record; None if the run failed on any rank. `failures` then says on which, and how.
        """
        subject = self.subject
        resumes = subject.option.resumes
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
        record: Record | None = None
        failure: Failure | None = None
        # Compiled code may leave gradients disabled; that must not affect later runs.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            grid = self.grid
            limit_s = self.collective_limit_s
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
        if self.resume is None:
            raise UsageError(f"the option {course.option.name} needs a bench that starts new processes")
        checkpoints = self.ranks.gather(record.checkpoint)
        records = list[Record]()
        failure = None
        if self.ranks.rank == 0:
            try:
                records = self.resume(course, how, checkpoints, self.subject.device.type)
            except Exception as error:
                failure = failure_of(0, error)
        records, failure = self.ranks.gather((records, failure))[0]
        self.failures = [failure] if failure else []
        return record.continued(records[self.ranks.rank]) if records else None

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
        summaries = self.ranks.gather(peer_of(self.grid.rank, record))
        for column in self.grid.columns or []:
            if self.ranks.rank in column:
                return [summaries[rank] for rank in column]
        return summaries

    def sums(self, gradients: Gradients, like: Named) -> dict[str, Sum]:
        """The contributions of the ranks to each gradient.

        Args:
            gradients: the gradients of this rank. None counts as zeros, and so does a gradient whose size is
                not its parameter's, which would break the collective; L3 reports it.
            like: the parameters.

        Returns:
            A sum for each gradient, on the device of the model, from which the process group can send.
        """
        device = self.subject.device
        sums = dict[str, Sum]()
        for name, gradient in gradients.items():
            shape = exact(like[name]).shape
            summed = None if gradient is None else contribution(gradient).to(device)
            if summed is None or summed[0].numel() != shape.numel():
                summed = contribution(torch.zeros(shape, device=device))
            summed = summed.reshape(3, *shape).contiguous()
            dist.all_reduce(summed, group=self.calm)
            total, magnitude, terms = summed
            sums[name] = Sum(total, magnitude, self.grid.size, terms)
        return sums
