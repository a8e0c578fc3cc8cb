"""All ranks in turn, each of their steps in eager DDP and in the mode under test.

Eager's parameters are those of both. After the last rank the mean of eager's gradients updates them, and the
next step begins. Invariant: a rank that would send something else than its peers is found before its numbers
mean anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddpopt.cases.case import Case
from ddpopt.errors import numbered
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.rules.bench import CHEAP, Subject
from ddpopt.judge.rules.evidence import Peer, RunEvidence
from ddpopt.judge.rules.ladder import Sheet, findings, remarks, worst
from ddpopt.judge.rules.outcome import ended, has_gradients, is_exact
from ddpopt.judge.rules.structure import structure
from ddpopt.judge.simulation.causes import Line
from ddpopt.judge.simulation.early import EndedEarlyError, eager_failed, eager_fails, mode_fails
from ddpopt.judge.simulation.evaluating import Evaluations
from ddpopt.judge.simulation.hidden import VALUES
from ddpopt.judge.simulation.models import Models
from ddpopt.judge.simulation.numbers import Again, Numbers, add_parts, in_form
from ddpopt.judge.simulation.program import EAGER, Failures, Why, finding_of, unlike_models
from ddpopt.judge.simulation.recompiling import Recompilations, Suspicion
from ddpopt.judge.simulation.repeats import Repeats
from ddpopt.judge.simulation.sequences import Sequences, sent_in_words
from ddpopt.judge.simulation.shared_model import SEEN, SharedModel, Taken
from ddpopt.judge.simulation.world import Sends, World
from ddpopt.judge.training.record import Record, buckets_of
from ddpopt.judge.training.visible import SETTINGS
from ddpopt.judge.verdict import SeenBucket, Status

MADE_OTHERWISE = "ranks make models that differ, so that one model cannot be each of them"
NOT_MEANT = "timing, and memory that grows with the steps, are not simulated"
NOT_FOLLOWED_UP = "what evaluation and extra steps leave was simulated {whose}"
COMPILED_AGAIN = "compiled again for each rank, as the code of another rank does not compute the same"


@dataclass
class StepOfRanks:
    """One step of all ranks, as far as it was taken.

    Attributes:
        index: its index.
        start: parameters and buffers before it.
        failures: the ranks that failed in eager.
        eager: what each rank sends in eager.
        got: what each rank sends in the mode.
        unused: for each rank the parameters that have no gradient in eager.
        incomplete: the ranks whose reducer waits for gradients that never come.
        total: the sum over ranks of each gradient, of which each rank sends an N-th.
        after: parameters and buffers after the first rank's step.
    """

    index: int
    start: Named
    failures: Failures
    eager: Sequences
    got: Sequences
    unused: dict[int, list[str]] = field(default_factory=dict)
    incomplete: list[int] = field(default_factory=list)
    total: dict[str, Tensor] = field(default_factory=dict)
    after: Named = field(default_factory=dict)


class Lockstep:
    """One trial on simulated ranks.

    Args:
        subject: the case, under an option.
        mode: the mode.
        backend: the Dynamo backend; None to compile nothing.
        world: the ranks.
        sends: what they send.
    """

    def __init__(self, subject: Subject, mode: Engine, backend: Any, world: World, sends: Sends) -> None:
        self.subject = subject
        self.mode = mode
        self.backend = backend
        self.world = world
        self.sends = sends
        self.is_exact = is_exact(mode, subject.option, backend)
        self.ranks_differ = subject.adapted.ranks_differ or subject.option.more_graphs
        self.sheets = {rank: Sheet(rank, {}) for rank in range(world.size)}
        self.wrong: set[int] = set()
        self.unjudged: dict[str, None] = {}
        self.notes: dict[str, None] = {NOT_MEANT: None}
        self.recompilations = Recompilations()
        self.suspicion: Suspicion | None = None
        self.graphs = 0
        self.buckets: tuple[SeenBucket, ...] = ()
        self.settings = ""
        self.made_otherwise = ""
        self.judged_any = False

    def judged(self) -> dict[str, Any]:
        """Take all steps, and return the fields of the trial."""
        said, self.made_otherwise = unlike_models(self.subject.adapted, self.world, self.sends)
        if said:
            return {"status": Status.WRONG, "findings": tuple(said), "levels": ("L3",)}
        try:
            self._take_steps()
        except EndedEarlyError as end:
            return end.fields
        except Exception:
            if not self.wrong:  # a mode that leaves the process damaged may have broken what came after it
                raise
        if self.repeats.not_reproduced:
            return {"status": Status.BROKEN, "reason": self.repeats.not_reproduced}
        if self.models.compiles_for_each:
            self.notes[COMPILED_AGAIN] = None
        sheets = list(self.sheets.values())
        sheets[0].findings += self.repeats.findings
        judged = worst(item for sheet in sheets for item in sheet.judged)
        ready = [name for bucket in self.buckets for name in bucket.params]
        found = findings(sheets, judged, ready)
        unjudged = (*self.unjudged, *self.repeats.unjudged)
        return {
            **ended(found, self.judged_any, unjudged),
            "findings": found,
            "unjudged": unjudged,
            "levels": tuple(sorted({"L3", *(item.measured.level for item in judged)})),
            "notes": (*remarks(sheets), *self.notes, *self.repeats.notes),
            "measured": tuple(item.measured for item in judged),
            "buckets": self.buckets,
            "graphs": self.graphs,
        }

    def _take_steps(self) -> None:
        try:
            self.models = Models(self.subject, self.mode, self.backend, self.world, self.sends)
        except Exception as error:
            raise eager_fails(0, error) from error
        is_cheap = not isinstance(self.backend, str) or self.backend in CHEAP
        self.repeats = Repeats(self.models, self.sends, is_cheap=is_cheap)
        self.numbers = Numbers(
            self.subject, self.mode, exact=self.is_exact, models=self.models, size=self.world.size
        )
        if self.made_otherwise:
            self.models.make_for_each()
        else:
            self._compare_first_steps()
        start = before = self.models.start
        for index in range(self.subject.steps):
            before = start
            start = self._all_ranks(index, start)
        self._follow_up(before, start)
        evaluations = Evaluations(self.models, self.world, self.subject, start)
        self.sheets[0].findings += evaluations.findings(self.mode.name)
        if self.suspicion is not None:
            self._compile_alone(self.suspicion, start)

    def _compare_first_steps(self) -> None:
        """Compare the very first steps: what they change, later ones only find changed."""
        try:
            got = self.models.got.first
        except Exception as error:
            raise mode_fails(0, error) from error
        expected = self.models.eager.first
        if not got or not expected:
            return
        self.settings = expected[0].steps[0].extras[SETTINGS]
        start = self.models.start

        def again(model: SharedModel, case: Case | None, change: Callable[[Named], Named]) -> Record:
            return model.step(0, 0, change(start), case=case, is_repeated=True).record

        for mine, eager in zip(got, expected, strict=False):  # the mode may fail in the second
            sheet = self._compared(0, 0, mine, eager, again)
            self.sheets[0] = self.sheets[0].with_more(sheet)
            if sheet.findings or sheet.wrong():
                self.wrong.add(0)

    def _all_ranks(self, index: int, start: Named) -> Named:
        """Let all ranks take a step; return the parameters and buffers after it."""
        size = self.world.size
        members = self.world.members
        step = StepOfRanks(index, start, Failures(size), Sequences(members), Sequences(members))
        self.repeats.first_rank(index, start)
        for rank in range(size):
            eager = self._in_eager(step, rank)
            if eager is None:
                continue
            if rank == 0:
                step.after = eager.record.steps[0].state
            if step.got.are_equal:
                self._in_mode(step, rank, eager)
        self._end_if_ranks_differ(step, step.failures, step.eager, mode=EAGER)
        if message := step.eager.messages.first:
            self.unjudged[f"{VALUES}: {sent_in_words(message)}"] = None
        if len(step.incomplete) == size:
            self._end_as_ddp_does(step)
        self._end_if_ranks_differ(step, Failures(size), step.got, mode=self.mode.name)
        suspicion = self.recompilations.end(index)
        if self.backend is not None and not self.ranks_differ:
            self.suspicion = self.suspicion or suspicion
        updating = self.models.eager
        kept = updating.trainer.record.ignored
        names = [name for name in updating.trainer.parallel.gradients() if name not in kept]
        reduced = {name: step.total.get(name) for name in names}
        return updating.update(start, in_form(reduced, start), step.after)

    # --------------------------------------------------------------------------------------------- one rank

    def _in_eager(self, step: StepOfRanks, rank: int) -> Taken | None:
        """Let a rank take the step in eager; None if there is nothing to compare a mode with."""
        models = self.models
        if self.made_otherwise:
            models.renew_eager(rank)
        try:
            eager = models.eager.step(rank, step.index, models.eager.begins(rank, step.start))
        except Exception as error:
            step.failures.add(rank, error)
            models.renew_eager()
            return None
        step.eager.add(rank, eager.sent)
        if self.settings and rank < SEEN:  # not as the mode may have left them
            eager.record.steps[0].extras[SETTINGS] = self.settings
        gradients = eager.record.steps[0].gradients
        step.unused[rank] = [name for name, gradient in gradients.items() if gradient is None]
        if not eager.is_complete:
            step.incomplete.append(rank)
        if step.incomplete or not models.settles:
            models.renew_eager()
        if self.made_otherwise or step.incomplete or step.failures.of_ranks or not step.eager.are_equal:
            return None
        add_parts(step.total, gradients)
        return eager

    def _in_mode(self, step: StepOfRanks, rank: int, eager: Taken) -> None:
        """Let a rank take the step in the mode, and compare."""
        got = self._taken(step, rank, eager)
        sheet = self._sheet(step, rank, got, eager)
        if self._is_unlike(step, got, sheet) and self.models.may_be_code_of_another(rank) and not self.wrong:
            self.models.renew_code(rank)
            self.models.got.undo(rank)
            got = self._taken(step, rank, eager)
            sheet = self._sheet(step, rank, got, eager)
            self.models.compiles_for_each = not self._is_unlike(step, got, sheet)
        if self._is_wrong(sheet):
            self.wrong.add(rank)
        step.got.add(rank, got.sent)
        self.numbers.remember(rank, got.record)
        self.recompilations.add(rank, got)
        self.sheets[rank] = self.sheets[rank].with_more(sheet)
        self.judged_any |= has_gradients(eager.record)
        self.graphs = len(got.record.graphs)
        last = got.record.iterations[-1].buckets if got.record.iterations else ()
        self.buckets = tuple(SeenBucket(one.index, one.params, one.nbytes, one.dtype) for one in last)
        self.unjudged |= dict.fromkeys((*got.record.unjudged, *eager.record.unjudged))

    def _is_unlike(self, step: StepOfRanks, got: Taken, sheet: Sheet) -> bool:
        return self._is_wrong(sheet) or not step.got.would_be_equal(got.sent)

    def _is_wrong(self, sheet: Sheet) -> bool:
        return bool(sheet.findings or sheet.wrong())

    def _taken(self, step: StepOfRanks, rank: int, eager: Taken) -> Taken:
        model = self.models.got_as(rank)
        try:
            return model.step(rank, step.index, eager.record.start)
        except Exception as error:
            if self._compiles_again(rank):
                return self._taken(step, rank, eager)
            raise mode_fails(rank, error) from error

    def _sheet(self, step: StepOfRanks, rank: int, got: Taken, eager: Taken) -> Sheet:
        start = eager.record.start

        def again(model: SharedModel, case: Case | None, change: Callable[[Named], Named]) -> Record:
            return model.step(rank, step.index, change(start), case=case, is_repeated=True).record

        return self._compared(rank, step.index, got.record, eager.record, again)

    def _compared(self, rank: int, index: int, got: Record, eager: Record, again: Again) -> Sheet:
        """What is wrong on a rank in a step."""
        sheet = Sheet(rank, buckets_of(got))
        nobody = Peer(rank, (), (), ())
        evidence = RunEvidence(
            mode=self.mode,
            option=self.subject.option,
            compiled=self.backend is not None,
            got=got,
            eager=eager,
            peers=[nobody],
            eager_peers=[nobody],
            alone=None,
            ranks_differ=True,
            rank=rank,
        )
        sheet.findings += structure(evidence, rank)
        self.numbers.compare(sheet, index, got, eager, again)
        return sheet

    # ------------------------------------------------------------------------------------------ all ranks

    def _end_if_ranks_differ(
        self, step: StepOfRanks, failures: Failures, sends: Sequences, *, mode: str
    ) -> None:
        """End the trial if ranks differ in what they send, or if some fail."""
        if failures.are_of_all:
            raise eager_failed(failures.of_ranks[0])

        otherwise = f"{MADE_OTHERWISE}: {self.made_otherwise}" if self.made_otherwise else ""
        said = failures.findings(step.index)
        why = self._why(step.start)
        for parting in () if said else sends.partings():
            said.append(finding_of(parting, step.index, mode=mode, unused=step.unused, why=why))
        if said and self.repeats.not_reproduced:
            raise EndedEarlyError(status=Status.BROKEN, reason=self.repeats.not_reproduced)
        is_whole = mode != EAGER and self.models.got.trainer.parallel.whole is not None
        if said and is_whole and self.ranks_differ:  # the ranks of such a step refuse to go on
            raise EndedEarlyError(status=Status.REFUSED, reason=said[0].message)
        if said:
            notes = (otherwise,) if otherwise else ()
            raise EndedEarlyError(status=Status.WRONG, findings=tuple(said), notes=notes, levels=("L3",))
        if otherwise:
            raise EndedEarlyError(status=Status.BROKEN, reason=otherwise, levels=("L3",))

    def _why(self, start: Named) -> Why:
        def lines(rank: int, index: int) -> list[Line]:
            eager = self.models.make_eager(rank=rank)
            eager.remember(self.models.eager)
            found = eager.lines(rank, index, start)
            eager.close()
            return found

        return Why(self.world, self.subject.adapted, lines)

    def _end_as_ddp_does(self, step: StepOfRanks) -> None:
        """Take one more step with a reducer that still waits for gradients on every rank."""
        eager = self.models.make_eager()
        try:
            for _ in range(2):
                eager.step(0, step.index, step.start, is_repeated=True)
        except Exception as error:
            raise eager_fails(0, error) from error

    def _follow_up(self, start: Named, final: Named) -> None:
        """Compare the evaluation, and the extra steps, of the first ranks.

        Args:
            start: parameters and buffers before the last step.
            final: those after it.
        """
        is_wanted = self.subject.option.extras and self.models.settles
        ranks = range(min(SEEN, self.world.size)) if is_wanted else range(0)
        whose = f"only for {numbered('rank', ranks)}" if ranks else "for no rank"
        self.notes[NOT_FOLLOWED_UP.format(whose=whose)] = None
        last = self.subject.steps - 1
        for rank in ranks:
            sheet = self._followed_up(rank, last, start, final)
            if self._is_wrong(sheet) and self._compiles_again(rank):
                sheet = self._followed_up(rank, last, start, final)
            self.sheets[rank] = self.sheets[rank].with_more(sheet)

    def _followed_up(self, rank: int, last: int, start: Named, final: Named) -> Sheet:
        followed = self.repeats.after_training(rank, last, start, final)
        return Sheet(rank, {}) if followed is None else self._compared(rank, last, *followed)

    def _compiles_again(self, rank: int) -> bool:
        """Whether a rank that differs may do so for another rank's code; then each compiles for itself."""
        if not self.models.may_be_code_of_another(rank) or self.wrong:
            return False
        self.models.renew_code(rank)
        self.models.compiles_for_each = True
        return True

    def _compile_alone(self, suspicion: Suspicion, start: Named) -> None:
        """Try what a suspect rank compiles on its own."""
        try:
            found = suspicion.finding(
                lambda rank, index: self.models.graphs_alone(rank, index, start), self._why(start)
            )
        except Exception as error:
            raise mode_fails(suspicion.rank, error) from error
        if found is not None:
            self.sheets[suspicion.rank].findings.append(found)
