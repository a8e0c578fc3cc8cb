"""Compare what a rank leaves in the mode with what it leaves in eager DDP, by the levels of the ladder.

A gradient here is the part that the rank sends: its own, divided by the number of ranks. Invariant: every
number that eager leaves is compared; what is equal on later ranks is not listed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ddpopt.cases.case import Case
from ddpopt.cases.option_cases import in_dtype
from ddpopt.judge.compare import Difference, Sum, bitwise, communication, dense, exact
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.rules.arithmetic import Arithmetic, arithmetic
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.rules.factors import FALSE_ALARM
from ddpopt.judge.rules.ladder import NOT_FINITE, RESUMMED, Sheet
from ddpopt.judge.rules.rounding import (
    SAMPLES,
    autocast_dtypes,
    coarsest,
    learned,
    perturbed,
    perturbed_state,
    widened,
)
from ddpopt.judge.simulation.models import Models
from ddpopt.judge.simulation.shared_model import SEEN, SharedModel
from ddpopt.judge.training.record import (
    STATE,
    Number,
    NumberKind,
    Record,
    RecordedStep,
    Rules,
    alike,
    pairs,
    plain,
)
from ddpopt.judge.training.updating import Updated, repeated

Again = Callable[[SharedModel, Case | None, Callable[[Named], Named]], Record]
"""Lets a model do again what was recorded: with other inputs, from a changed state."""


class Numbers:
    """Compares the steps of all ranks in one mode.

    Args:
        subject: the case, under an option.
        mode: the mode.
        exact: whether it runs eager's operations in eager's order.
        models: the models.
        size: the number of ranks, each of which must not raise a false alarm.
    """

    def __init__(
        self,
        subject: Subject,
        mode: Engine,
        *,
        exact: bool,
        models: Models,
        size: int,
    ) -> None:
        self._subject = subject
        self._mode = mode
        self._models = models
        self._steps: dict[int, list[tuple[Named, RecordedStep]]] = {}
        # a number is divided by N, or multiplied by 1 / N, which is as right
        self._rounds_when_divided = size & (size - 1) != 0
        self._chance = FALSE_ALARM / size
        self._rules = Rules(
            exact=exact, ordered=True, means=False, ignored=models.eager.trainer.record.ignored
        )

    def compare(self, sheet: Sheet, step: int, got: Record, eager: Record, again: Again) -> None:
        """Compare one step of one rank, and write the result on its sheet.

        Args:
            sheet: that of the rank.
            step: index of the step.
            got: its record in the mode.
            eager: its record in eager.
            again: lets a model in eager do the same on other data.
        """
        rounding = _Rounding(self, eager, again)
        is_cut = bool(got.plan and got.plan.cuts) or self._mode.optimize_ddp == "ddp_optimizer"
        may_be_resummed = is_cut or self._subject.option.forwards > 1
        is_brief = sheet.rank >= SEEN
        updated = None if is_brief or got.evaluation is not None else self._updated(sheet.rank, got)
        for number in pairs(got, eager):
            level = self._rules.levels(number)[0]
            if is_brief and level == "L0" and torch.equal(dense(number.got), dense(number.eager)):
                continue
            if not bool(dense(number.eager).isfinite().all()):
                sheet.say(NOT_FINITE, number.name)
            if number.kind is NumberKind.PARAMETER and got.evaluation is not None:
                continue  # a step that was compared before
            expected = number.eager
            if updated is not None and number.kind is NumberKind.PARAMETER:
                expected = updated.parameters.get(plain(number.name), expected)
            difference = _compared(level, replace(number, eager=expected), rounding)
            if (
                level == "L0"
                and not difference.right
                and number.kind is NumberKind.GRADIENT
                and self._rounds_when_divided
            ):
                level = "L1"
                difference = communication(number.got, _one_term(number.eager), eager=number.eager)
            is_sum = self._rules.sums(number.kind, number.name)
            if level != "L2" and not difference.right and is_sum and may_be_resummed:
                level = "L2"
                difference = _compared(level, number, rounding)
                sheet.say(RESUMMED, number.name)
            sheet.add(level, replace(number, step=step + number.step), difference)
        if updated is not None:
            self._optimized(sheet, step, got.steps[0], updated.state)
        sheet.judged = sheet.in_short().judged

    def remember(self, rank: int, got: Record) -> None:
        """Add a rank's step to those from which its optimizer's state follows."""
        if rank < SEEN:
            step = replace(got.steps[0], extras={}, state={})
            self._steps.setdefault(rank, []).append((got.start, step))

    def _updated(self, rank: int, got: Record) -> Updated:
        """What the gradients of all steps of a rank, this one included, make of its parameters."""
        history = [*self._steps.get(rank, ()), (got.start, got.steps[0])]
        starts = [start for start, _ in history]
        steps = [step for _, step in history]
        return repeated(Record(starts[0], starts, steps, recipe=got.recipe))[-1]

    def _optimized(self, sheet: Sheet, step: int, got: RecordedStep, states: Named) -> None:
        """Compare the optimizer's state with what the gradients make of it."""
        for name, expected in states.items():
            value = got.optimizer.get(name)
            if value is not None and alike(value, expected):
                number = Number(step, got.moment, STATE + name, NumberKind.PARAMETER, value, expected)
                sheet.add("L0", number, bitwise(value, expected))

    @cached_property
    def _computes(self) -> torch.dtype | None:
        case = self._subject.adapted
        return self._subject.option.computes or coarsest(autocast_dtypes(case, 0, self._subject.device))

    @cached_property
    def _wide(self) -> SharedModel:
        """The model in float64."""
        return self._models.make_eager(in_dtype(self._subject.adapted, torch.float64))

    def rounding_of(self, eager: Record, again: Again) -> list[dict[str, Arithmetic]]:
        """Learn the rounding of what eager did from neighboring data, and from float64."""
        case = self._subject.adapted
        records = [eager]
        for number in range(1, SAMPLES):
            moved = perturbed(case, number, self._computes)
            change = partial(perturbed_state, number=number, computes=self._computes)
            records.append(again(self._models.eager, moved, change))
        truth = None
        try:
            truth = again(self._wide, None, widened)
        except Exception:  # a model that cannot run in float64 is compared with its samples' mean
            truth = None
        return learned(records, truth, chance=self._chance)


class _Rounding:
    """The rounding of what one rank did, learned when it is first needed."""

    def __init__(self, numbers: Numbers, eager: Record, again: Again) -> None:
        self._numbers = numbers
        self._eager = eager
        self._again = again

    @cached_property
    def by_place(self) -> list[dict[str, Arithmetic]]:
        """For each moment of eager's record, the rounding by the name of the number."""
        return self._numbers.rounding_of(self._eager, self._again)


def _one_term(gradient: Tensor) -> Sum:
    """A rank's part of a gradient as a sum of one term, which is rounded when it is divided."""
    part = exact(gradient)
    return Sum(part, part.abs(), 1, torch.ones_like(part))


def _compared(level: str, number: Number, rounding: _Rounding) -> Difference:
    if level == "L2" and number.kind is not NumberKind.PARAMETER:
        return arithmetic(number.got, rounding.by_place[number.step][number.name])
    return bitwise(number.got, number.eager)


def add_parts(total: dict[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
    """Add one rank's part of each gradient, which DDP has divided by the number of ranks."""
    for name, gradient in gradients.items():
        if gradient is not None:
            part = exact(gradient)
            total[name] = total[name] + part if name in total else part


def in_form(reduced: Mapping[str, Tensor | None], start: Named) -> dict[str, Tensor | None]:
    """Gradients in the form of their parameters: complex numbers were pairs."""
    found: dict[str, Tensor | None] = {}
    for name, value in reduced.items():
        is_pairs = value is not None and start[name].is_complex()
        found[name] = torch.view_as_complex(value.contiguous()) if value is not None and is_pairs else value
    return found
