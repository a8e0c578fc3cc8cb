"""A worker: a pool of ranks that answers questions about models, even if its processes die.

A model may crash its ranks, or never end. Then all ranks are ended, the failure is an answer like any other,
and the next question starts new ranks. Invariant: each task gets an answer for each of its modes.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace

from ddpopt.fuzz.questions import WHOLE, Answer, Outcome, Task
from ddpopt.fuzz.signatures import NO_END, FailureSignature, of_death, of_error
from ddpopt.ranks.failures import RankFailure, RanksFailed
from ddpopt.ranks.group import Ranks
from ddpopt.ranks.pool import Pool
from ddpopt.ranks.process import RankProcess

STARTING_LIMIT_S = 300.0
COLLECTIVE_LIMIT_S = 60.0
EAGER = "eager"
"""The work of a rank before it runs the first mode."""
DETAIL = 2000
"""Characters of stacks or output that are kept."""
TASKS = 300
"""Number of tasks after which a worker is replaced, because Dynamo's caches grow."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """Answers tasks, on as many ranks as each needs.

    Args:
        limit_s: limit of one mode of one model, in seconds.
    """

    def __init__(self, limit_s: float = 120.0) -> None:
        self._limit_s = limit_s
        self._tasks = 0
        self._pool = Pool(1, host=answer_tasks)

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def ask(self, task: Task) -> Iterator[Answer]:
        """Answer a task.

        Args:
            task: the question.

        Yields:
            An answer for each mode.
        """
        left = list(task.modes)
        while left:
            answers = self._asked(replace(task, modes=tuple(left)))
            if self._tasks > 1 and {answer.kind for answer in answers} == {Outcome.EAGER}:
                self._pool.close()  # an earlier model may have broken the ranks: ask again in new ones
                continue
            if len(answers) == 1 and answers[0].kind is Outcome.WRONG and answers[0].mode != WHOLE:
                answers = self._attributed(task, answers[0])
            yield from answers
            done = {answer.mode for answer in answers}
            left = [name for name in left if name not in done]

    def _asked(self, task: Task) -> list[Answer]:
        """Send a task, and wait until it is done or a rank is lost."""
        if self._tasks >= TASKS or self._pool.size != task.setting.nproc:
            self._pool.close()
            self._pool = Pool(task.setting.nproc, host=answer_tasks)
        self._tasks = self._tasks + 1 if self._pool.is_running else 1
        limit_s = STARTING_LIMIT_S + self._limit_s * (1 + len(task.modes))
        try:
            return self._pool.run(answers_of, task, self._limit_s, limit_s=limit_s)[0]
        except RanksFailed as failed:
            return _lost(task, failed)

    def _attributed(self, task: Task, answer: Answer) -> list[Answer]:
        """Attribute a mode's death: check whether the backend without any optimizer dies too."""
        if answer.signature is None or answer.signature.kind not in ("death", "no end"):
            return [answer]
        whole = self._asked(replace(task, modes=(WHOLE,)))
        if whole[0].signature is not None and whole[0].signature.kind == answer.signature.kind:
            return [replace(answer, kind=Outcome.BACKEND)]
        return [answer]


def answer_tasks(process: RankProcess) -> None:
    """Serve a worker's tasks, in one of its processes.

    Args:
        process: the rank.
    """
    import torch

    from ddpopt.judge.trials.on_rank import gc_frozen

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with gc_frozen():
        process.serve(lambda _: process.joined(COLLECTIVE_LIMIT_S))


def answers_of(ranks: Ranks, task: Task, limit_s: float) -> list[Answer]:
    """Answer a task, with a limit on each mode; runs on each rank."""
    from ddpopt.fuzz.examine import examine
    from ddpopt.judge.trials.on_rank import collect_and_freeze

    collect_and_freeze()
    with contextlib.ExitStack() as limit:

        def begin(mode: str) -> None:
            limit.close()
            limit.enter_context(ranks.limited(limit_s, mode or EAGER))

        return examine(ranks, task, begin)


def _lost(task: Task, failed: RanksFailed) -> list[Answer]:
    """The answer for a mode that crashed its ranks; for all modes, if that was eager.

    Raises:
        RanksFailed: the ranks failed elsewhere.
    """
    failure = failed.culprits[0]
    signature, detail = _signature(failure)
    detail = f"{detail}\n{failed.parting}".strip("\n")
    if failure.what == EAGER:
        return [Answer(name, Outcome.EAGER, signature, detail) for name in task.modes]
    if failure.what not in task.modes:
        raise failed
    # a model's exceptions are caught, so an exception here comes from verification itself
    if failure.kind == "raised":
        kind = Outcome.BROKEN
    else:
        kind = Outcome.BACKEND if failure.what == WHOLE else Outcome.WRONG
    return [Answer(failure.what, kind, signature, detail)]


def _signature(failure: RankFailure) -> tuple[FailureSignature, str]:
    """The signature of a failure, and its full text."""
    if failure.kind == "raised":
        return of_error(failure.error), failure.stack[-DETAIL:]
    _, found, crashed = failure.stack.rpartition("Current thread")
    shown = f"{found}{crashed}"[:DETAIL] if failure.stack else failure.output[-DETAIL:]
    if failure.kind != "died":
        return NO_END, f"no end within the time limit\n{shown}"
    how = failure.signal or f"exit code {failure.exit_code}"
    return of_death(how, failure.stack), f"the process {failure.how}\n{shown}"
