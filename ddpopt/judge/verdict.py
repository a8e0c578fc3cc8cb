"""The results of a verification: trials, each with its findings, and the verdict over all of them.

Plain data, without torch: the process that started the ranks, the reports and readers of the JSON need no
tensors. Invariant: a verdict is true only if something was judged, nothing was wrong, and nothing broke.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from ddpopt.errors import DdpoptError, InfrastructureError, VerificationError


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    WRONG = "wrong"
    REFUSED = "refused"
    """ddpopt does not support it, and says so, or the mode has no such option."""
    NOT_POSSIBLE = "not possible"
    """Eager DDP itself was seen to fail at it on this machine."""
    BROKEN = "broken"
    """A rank died or stalled, or the judge failed or could not judge everything: it may be right or wrong."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: ``"L0"`` bitwise, ``"L1"`` communication bound, ``"L2"`` compiled arithmetic, ``"L3"``
            structure, ``"run"`` the step itself failed.
        claim: the invariant that does not hold, as a short sentence.
        message: what was expected, what was observed, and where.
        rank: the rank that saw it, or where it is worst; None if it concerns the whole run.
        step: the first training step in which it is wrong, from 0; None if it concerns the whole run.
        parameter: name as in ``module.named_parameters()``, or of a buffer.
        bucket: index of the bucket that carried the parameter.
        ulps: largest distance in units in the last place of the gradient's dtype.
        error: largest error, in the unit of the gradient.
        bound: the largest allowed error, in the unit of the gradient.
        ranks: all ranks that saw it.
        indices: the smallest part of the tensor that holds all wrong elements, as an index.
        got: the value of the worst element.
        expected: what it should be.
    """

    level: str
    claim: str
    message: str
    rank: int | None = None
    step: int | None = None
    parameter: str | None = None
    bucket: int | None = None
    ulps: float | None = None
    error: float | None = None
    bound: float | None = None
    ranks: tuple[int, ...] = ()
    indices: str | None = None
    got: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class Measured:
    """The worst comparison of one parameter at one level, over steps and ranks.

    Where it is wrong, this is the first step that is wrong.

    Attributes:
        parameter: its name.
        level: the level of the ladder that judged it.
        bucket: index of the bucket that carried it, if known.
        ulps: largest distance in units in the last place; 0 if bitwise equal.
        error: the error to which `bound` applies.
        bound: the largest allowed error; 0 if equality is required.
        rank: the rank with the worst comparison.
        step: the step with the worst comparison, from 0; evaluations and extra steps are counted after them.
        moment: its name: ``"step 0"``, ``"the evaluation"``, or that of an extra step.
    """

    parameter: str
    level: str
    bucket: int | None
    ulps: float
    error: float
    bound: float
    rank: int
    step: int
    moment: str = ""

    @property
    def share(self) -> float:
        """The error as a share of its bound: above 1 is wrong, infinite if equality was required and missed.

        >>> Measured("w", "L1", 0, 3.0, error=2.0, bound=4.0, rank=0, step=0).share
        0.5
        >>> Measured("w", "L0", 0, 1.0, error=1e-9, bound=0.0, rank=0, step=0).share
        inf
        """
        if self.error == 0 and self.bound >= 0:
            return 0.0
        taken = self.error / self.bound if self.bound > 0 else math.inf
        return math.inf if math.isnan(taken) else taken


@dataclass(frozen=True)
class SeenBucket:
    """A bucket that the running reducer sent.

    Attributes:
        index: place in the order of reduction.
        params: names of the parameters whose gradients it holds.
        nbytes: its size in bytes.
        dtype: of its elements, for instance ``"float32"``.
    """

    index: int
    params: tuple[str, ...]
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Drift:
    """How far one number was from eager's along a trajectory.

    Attributes:
        name: the number.
        steps: the steps, from 0.
        distances: the root mean square of its distance from eager's at each of them.
        bounds: what rounding explains.
        sizes: the root mean square of eager's values.
    """

    name: str
    steps: tuple[int, ...]
    distances: tuple[float, ...]
    bounds: tuple[float, ...]
    sizes: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """One mode of one case under one option, on all ranks.

    Attributes:
        case: name of the case or target.
        mode: name of the mode, for instance ``"ddpopt-inline"``.
        option: name of the option, for instance ``"static_graph"``.
        backend: the Dynamo backend; empty for modes that compile nothing.
        status: how it ended.
        reason: why it was refused or not possible, or what broke; empty otherwise.
        findings: everything that is wrong.
        unjudged: what should have been judged and could not be, each with the reason. A trial with one of
            these is broken, unless something is wrong.
        levels: the levels of the ladder that were applied, in order.
        notes: remarks that are not findings (a level that could not be applied and why, values whose gradient
            may be summed in another order, gradients that are nothing but noise).
        measured: one entry for each parameter and level.
        buckets: the buckets of the last synchronized step.
        graphs: the number of compiled graphs, including recompilations.
        seconds: wall time.
        simulated: the number of ranks that one process simulated; 0 for ranks of their own.
        trajectory: the number of steps that went on from each other; 0 if each began with eager's state.
        drifts: those of the numbers that a picture of that trajectory shows.
    """

    case: str
    mode: str
    option: str
    backend: str
    status: Status
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    buckets: tuple[SeenBucket, ...] = ()
    graphs: int = 0
    seconds: float = 0.0
    simulated: int = 0
    trajectory: int = 0
    drifts: tuple[Drift, ...] = ()

    @property
    def name(self) -> str:
        """Case, mode, option, backend, simulated ranks and trajectory in one line."""
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.case}: {self.mode} / {self.option}{backend}{self.way}"

    @property
    def way(self) -> str:
        """How it was judged, if not on real ranks step by step; may be empty.

        >>> Trial("gpt", "eager", "default", "", Status.OK, trajectory=50).way
        ', 50 steps'
        """
        simulated = f", {self.simulated} simulated ranks" if self.simulated else ""
        return f", {self.trajectory} steps" if self.trajectory else simulated

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was not judged, and the notes."""
        return (*(f"not judged: {what}" for what in self.unjudged), *self.notes)


@dataclass(frozen=True)
class Rung:
    """One step of the search for the layer that is wrong.

    Attributes:
        name: what ran, for instance ``"aot_eager, no DDP"``.
        agrees: whether it agreed with eager at its level; None if it could not be judged.
        detail: the worst parameter, or the error that ended it.
    """

    name: str
    agrees: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Location:
    """Where a wrong trial goes wrong.

    Attributes:
        rungs: the rungs that were tried, from eager upwards.
        layer: the lowest layer that is wrong, as text.
        segments: the smallest set of segments that must be compiled for the difference to appear, each as
            ``"graph 0, segment 2: linear, relu"``; empty if no segment is to blame.
        script: file name of the standalone script that shows it; empty if there is none.
        reproduces: whether the script was run in a fresh interpreter and showed the difference; None if that
            run did not end in time.
        note: why there is no script, or another remark.
    """

    rungs: tuple[Rung, ...]
    layer: str
    segments: tuple[str, ...] = ()
    script: str = ""
    reproduces: bool | None = False
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What :func:`ddpopt.verify` returns; true if the program under test is right.

    Attributes:
        target: what was verified.
        world_size: number of ranks; of simulated ones if there are no others.
        trials: in the order in which they ran.
        environment: versions and hardware: ``torch``, ``ddpopt``, ``python``, ``device``, ``platform``.
        location: where it goes wrong, if that was searched for.
    """

    target: str
    world_size: int
    trials: tuple[Trial, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    location: Location | None = None

    def __bool__(self) -> bool:
        return self.exit_code == 0

    @property
    def ranks(self) -> str:
        """The ranks that it is about, in words.

        >>> trials = tuple(Trial("gpt", "eager", "default", "", Status.OK, simulated=n) for n in (0, 64))
        >>> Verdict("gpt", 2, trials).ranks, Verdict("gpt", 64, trials[1:]).ranks, Verdict("gpt", 1, ()).ranks
        ('2 ranks and 64 simulated ranks', '64 simulated ranks', '1 rank')
        """
        simulated = sorted({trial.simulated for trial in self.trials} - {0})
        words = [f"{size} simulated rank{'' if size == 1 else 's'}" for size in simulated]
        if not simulated or any(not trial.simulated for trial in self.trials):
            words.insert(0, f"{self.world_size} rank{'' if self.world_size == 1 else 's'}")
        return " and ".join(words)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings of all trials, in order."""
        return tuple(finding for trial in self.trials for finding in trial.findings)

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong, 3 if a trial broke, or if none could be judged."""
        statuses = [trial.status for trial in self.trials]
        if Status.WRONG in statuses:
            return VerificationError.exit_code
        if Status.BROKEN in statuses or Status.OK not in statuses:
            return InfrastructureError.exit_code
        return 0

    def require(self) -> None:
        """Raise unless the verdict is true.

        Raises:
            VerificationError: something is wrong; the message has every finding.
            InfrastructureError: a trial broke, or none could be judged.
        """
        if self:
            return
        lines = [f"{self.target} on {self.ranks}: {len(self.findings)} finding(s)"]
        for trial in self.trials:
            if trial.status is not Status.OK:
                reason = f": {trial.reason}" if trial.reason else ""
                lines.append(f"  {trial.name}: {trial.status}{reason}")
                lines += [f"    - {finding.level} {finding.message}" for finding in trial.findings]
        kind: type[DdpoptError] = VerificationError if self.exit_code == 1 else InfrastructureError
        raise kind("\n".join(lines))

    def to_json(self) -> str:
        """Return the verdict as a JSON object.

        It is strict JSON, which has only finite numbers; others are the strings
        ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``.
        """
        data = json.dumps(asdict(self) | {"right": bool(self)}, default=str)
        return json.dumps(json.loads(data, parse_constant=str), indent=2, allow_nan=False)
