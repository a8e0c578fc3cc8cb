"""Compare a mode's free run with eager's: what one rank finds, and what all ranks found together.

Pure functions of figures. Invariant: a step in which nothing can be said of any gradient or parameter is
never called right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpopt.judge.rules.ladder import number_in_words
from ddpopt.judge.training.record import LOSS, STATE, NumberKind
from ddpopt.judge.trajectory.envelope import Band, Reach
from ddpopt.judge.trajectory.track import ComparedNumber, KnownNumber
from ddpopt.judge.verdict import Drift, Measured

ORDER = tuple(NumberKind)
"""What is computed first in a step comes first."""
OF_THE_TRAINING = (NumberKind.GRADIENT, NumberKind.PARAMETER)
EQUALITY = "it must be equal, bit for bit"
HIDDEN = "rounding may make these as large as they are, so nothing can be said of them there"
SILENT = (
    "{steps}: nothing can be said of any gradient or parameter, as eager runs that rounding cannot tell "
    "apart differ by as much as the values (a chaotic model, or one that diverges); ask for {step} steps"
)
Bands = Sequence[Mapping[str, Band]]


@dataclass(frozen=True)
class TrackedNumber:
    """One number at one step of the mode's run.

    Attributes:
        rank: the rank.
        step: the step.
        name: the number.
        kind: what it depends on.
        compared: how far it is from eager's.
        band: its envelope; None if no number differs, so that none was needed.
        is_exact: whether it must be equal.
    """

    rank: int
    step: int
    name: str
    kind: NumberKind
    compared: ComparedNumber
    band: Band | None
    is_exact: bool

    @property
    def is_hidden(self) -> bool:
        """Whether nothing can be said of it."""
        return not self.is_exact and self.band is not None and not self.band.says_something

    @property
    def reach(self) -> Reach:
        """How far into its envelope it goes."""
        if self.band is None or self.is_hidden:
            return Reach("nothing", 0.0, 0.0)
        return self.band.reach(self.compared.distance)

    @property
    def is_wrong(self) -> bool:
        """Whether it is farther from eager than rounding explains, or not equal where it must be."""
        if self.is_exact:
            return not self.compared.is_equal
        return self.compared.is_missing or self.reach.share > 1

    @property
    def weight(self) -> tuple[bool, float, float]:
        """Larger for what is worse."""
        return self.is_wrong, self.reach.share, self.compared.ulps

    @property
    def place(self) -> tuple[int, int, bool, float]:
        """Smaller for what is computed earlier, in the step and in the run; then for what is worse."""
        is_parameter = self.kind is NumberKind.PARAMETER and not self.name.startswith(STATE)
        return self.step, ORDER.index(self.kind), is_parameter, -self.reach.share

    @property
    def message(self) -> str:
        """What is wrong with it."""
        what = f"{number_in_words(self.name)}, step {self.step}, rank {self.rank}"
        if self.compared.is_missing:
            return f"{what}: eager DDP has one, of that shape and dtype, and this run has not"
        reach = self.reach
        if self.is_exact:
            share = f", {reach.share:.2g} of what rounding explains" if self.band is not None else ""
            off = f"off by {self.compared.distance.largest:.3g} ({self.compared.ulps:.3g} ULP{share})"
            return f"{what}: {off}; {EQUALITY}"
        return f"{what}: {reach.measure} {reach.error:.3g}, where rounding explains {reach.bound:.3g}"

    def measured(self) -> Measured:
        """Its figures."""
        level = "L0" if self.is_exact else "L2"
        exact = Reach("", self.compared.distance.largest, 0.0)
        reach = exact if self.is_exact else self.reach
        moment = f"step {self.step}"
        return Measured(
            self.name, level, None, self.compared.ulps, reach.error, reach.bound, self.rank, self.step, moment
        )


@dataclass(frozen=True)
class TrajectorySheet:
    """What one rank found.

    Attributes:
        wrong: the numbers of its first wrong step, what is computed first at the beginning.
        worst: the worst step of each number.
        hidden: numbers of which nothing can be said from some step on, with that step.
        silent: the first step in which nothing can be said of any gradient or parameter; None if there is
            none.
        drifts: what a picture shows.
    """

    wrong: tuple[TrackedNumber, ...]
    worst: tuple[TrackedNumber, ...]
    hidden: Mapping[str, int]
    silent: int | None
    drifts: tuple[Drift, ...]


def sheet(
    rank: int,
    eager: Sequence[Mapping[str, KnownNumber]],
    got: Sequence[Mapping[str, ComparedNumber]],
    bands: Bands | None,
    *,
    is_exact: bool,
) -> TrajectorySheet:
    """Compare every number of every step.

    Args:
        rank: this rank.
        eager: what is known of eager's numbers at each step.
        got: the mode's, next to them.
        bands: their envelopes; None if none is needed, as no number differs.
        is_exact: whether all must be equal.
    """
    numbers = [*_all(rank, eager, got, bands, is_exact=is_exact)]
    telling = {number.step for number in numbers if number.kind in OF_THE_TRAINING and not number.is_hidden}
    silent = next((step for step in range(len(eager)) if step not in telling), None)
    if silent is not None:  # what follows from a step of which nothing is known says nothing either
        numbers = [number for number in numbers if number.step < silent]
    wrong = sorted((number for number in numbers if number.is_wrong), key=lambda number: number.place)
    wrong = [number for number in wrong if number.step == wrong[0].step]
    worst: dict[str, TrackedNumber] = {}
    hidden: dict[str, int] = {}
    for number in numbers:
        if number.name not in worst or number.weight > worst[number.name].weight:
            worst[number.name] = number
        if number.is_hidden:
            hidden.setdefault(number.name, number.step)
    first = wrong[0].name if wrong else ""
    drifts = () if bands is None else tuple(_drifts(numbers, first, [*worst.values()]))
    return TrajectorySheet(tuple(wrong), tuple(worst.values()), hidden, silent, drifts)


def _all(
    rank: int,
    eager: Sequence[Mapping[str, KnownNumber]],
    got: Sequence[Mapping[str, ComparedNumber]],
    bands: Bands | None,
    *,
    is_exact: bool,
) -> Iterator[TrackedNumber]:
    """All numbers, but for those that the mode does not have even in the first step: that is judged there."""
    never = {name for name, found in got[0].items() if found.is_missing} if got else set()
    for step, (known, numbers) in enumerate(zip(eager, got, strict=False)):
        for name, found in numbers.items():
            if name not in never:
                band = None if bands is None else bands[step][name]
                yield TrackedNumber(rank, step, name, known[name].kind, found, band, is_exact)


def _drifts(numbers: Sequence[TrackedNumber], first: str, worst: Sequence[TrackedNumber]) -> Iterator[Drift]:
    """The drift of the loss, of what was wrong first, and of the worst number of each kind."""
    names = dict.fromkeys([first, LOSS])
    for kind in OF_THE_TRAINING:
        of_kind = [number for number in worst if number.kind is kind]
        if of_kind:
            names[max(of_kind, key=lambda number: number.weight).name] = None
    for name in names:
        history = [number for number in numbers if number.name == name]
        bands = [number.band for number in history if number.band is not None]
        if bands:
            yield Drift(
                name=number_in_words(name),
                steps=tuple(number.step for number in history),
                distances=tuple(number.compared.distance.rms for number in history),
                bounds=tuple(band.rms for band in bands),
                sizes=tuple(band.size for band in bands),
            )


def first_wrong(sheets: Sequence[TrajectorySheet]) -> list[TrackedNumber]:
    """The wrong numbers of the first step in which any rank has one, in the order of computation."""
    wrong = sorted((number for one in sheets for number in one.wrong), key=lambda number: number.place)
    return [number for number in wrong if number.step == wrong[0].step]


def measured(sheets: Sequence[TrajectorySheet]) -> list[Measured]:
    """The worst step of each number, over all ranks."""
    worst: dict[str, TrackedNumber] = {}
    for number in (one for sheet in sheets for one in sheet.worst):
        if number.name not in worst or number.weight > worst[number.name].weight:
            worst[number.name] = number
    return [number.measured() for number in worst.values()]


def remarks(sheets: Sequence[TrajectorySheet], steps: int) -> Iterator[str]:
    """How near to eager the run stayed, and of what nothing can be said."""
    worst = [number for sheet in sheets for number in sheet.worst]
    silent = first_silent(sheets)
    which = f"in all of {steps} steps" if silent is None else f"before step {silent}"
    if worst and all(number.compared.is_equal for number in worst):
        yield f"equal to eager DDP, bit for bit, {which}"
    elif worst and not any(number.is_wrong for number in worst):
        far = max(worst, key=lambda number: number.reach.share)
        yield (
            f"within rounding {which}: at most {far.reach.share:.0%} into the envelope "
            f"({number_in_words(far.name)}, step {far.step})"
        )
    hidden: dict[str, int] = {}
    for sheet in sheets:
        for name, step in sheet.hidden.items():
            hidden[name] = min(step, hidden.get(name, step))
    if hidden:
        names = ", ".join(f"{name} (step {step})" for name, step in hidden.items())
        yield f"{HIDDEN}: {names}"


def first_silent(sheets: Sequence[TrajectorySheet]) -> int | None:
    """The first step of which no rank can say anything; None if there is none."""
    return min((sheet.silent for sheet in sheets if sheet.silent is not None), default=None)


def silence(sheets: Sequence[TrajectorySheet], steps: int) -> str:
    """What was not judged because the model is chaotic; empty if everything was."""
    step = first_silent(sheets)
    if step is None:
        return ""
    which = f"step {step}" if step == steps - 1 else f"steps from {step} on"
    return SILENT.format(steps=which, step=step)
