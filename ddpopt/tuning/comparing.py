"""``ddpopt tune`` and ``ddpopt link``: profile a case on ranks, tune its buckets, and compare them.

First the case is profiled, in turns with steps that show how much sending delays its computation. The tuned
plan and all predictions come from that. Then one compiled module runs all plans in turns, every second turn
backwards, so that a busy minute affects all of them. Equal buckets are measured once. The cuts of the
strategy ``split`` are compiled for one plan; there each plan has one long turn, after compiling again.

Invariant: a plan is written as tuned only if none is predicted to be faster, and if its measured steps are
shorter by more than the noise.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddpopt.cases.case import Case
from ddpopt.ddp.runtime_log import log_every_iteration
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.planning.bucket_rule import own_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.observed import record
from ddpopt.tuning.recording import Procedure, Value, Watch, require_profilable, slowest
from ddpopt.tuning.records import LARGEST, Link, Profile, ms
from ddpopt.tuning.simulate import Timeline, calibrated, simulate
from ddpopt.tuning.tune import plan_of, tune

STRATEGIES = {"ddpopt-inline": "inline", "ddpopt-split": "split", "eager": "eager"}
"""By mode."""
Compile = Callable[..., Any]
"""Compiles a DDP module for a strategy and any buckets."""
CAPS = ("bucket_cap_mb", "bucket_cap_mb_list")
WARM_UP = 3
"""Steps until all is compiled."""
PROFILED = 20
"""Profiled steps."""
PROFILINGS = 15
"""How often some more steps are profiled."""
TURNS = 30
"""Turns of each plan."""
A_TURN = 2
"""Measured steps in a turn."""
CONFIDENT = 1.96
"""The quantile of the normal distribution for a two-sided confidence of 95 %."""


@dataclass(frozen=True)
class Row:
    """Some buckets, and how long a step takes with them.

    Attributes:
        name: whose buckets they are.
        plan: the buckets.
        predicted: the step by the model.
        measured_s: the measured steps, in seconds, each on the slowest rank.
    """

    name: str
    plan: Plan
    predicted: Timeline
    measured_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """The measured step: the median."""
        return median(self.measured_s)


@dataclass(frozen=True)
class Gain:
    """How much shorter a step is with the tuned buckets than with the best of the others.

    Attributes:
        other: the name of those.
        gain_s: the difference in seconds; negative if a step is longer.
        noise_s: how far it may be off by chance, in seconds.
        predicted_s: the predicted difference to those whose prediction is best.
        is_measured: whether steps were measured; else they were predicted for a link from a file.
    """

    other: str
    gain_s: float
    noise_s: float
    predicted_s: float
    is_measured: bool

    @property
    def is_won(self) -> bool:
        """Whether the tuned buckets are faster, and not by the prediction slower than others."""
        return self.gain_s > self.noise_s and self.predicted_s >= 0

    def __str__(self) -> str:
        by = "shorter" if self.gain_s >= 0 else "longer"
        how = "measured" if self.is_measured else "predicted"
        said = (
            f"a step is {ms(abs(self.gain_s))} {by} than with {self.other} ({how}, noise {ms(self.noise_s)})"
        )
        return said if self.predicted_s >= 0 else f"{said}; {ms(-self.predicted_s)} longer is predicted"


@dataclass(frozen=True)
class Tuned:
    """What `tuned_on` found.

    Attributes:
        profile: of the case.
        link: of its ranks, as it delays this case; or the one that was given.
        rows: DDP's default, the given cap if there is one, and the tuned buckets.
        gain: of the tuned buckets.
        observed: one step with the tuned buckets, on each rank; empty on GPUs.
    """

    profile: Profile
    link: Link
    rows: tuple[Row, ...]
    gain: Gain
    observed: tuple[Timeline, ...] = ()

    @property
    def chosen(self) -> Row:
        """The tuned buckets if they are faster, or else the best of the others."""
        name = self.rows[-1].name if self.gain.is_won else self.gain.other
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> str:
        """The chosen plan as `Plan.from_json` reads it, with the profile, the link and all rows."""
        records = {
            "profile": self.profile.document(),
            "link": self.link.document(),
            "rows": [{**asdict(row), "plan": row.plan.fingerprint} for row in self.rows],
            "chosen": self.chosen.name,
            "gain": asdict(self.gain),
        }
        return json.dumps({**self.chosen.plan.document(), **records}, indent=2)


def gain_of(rows: Sequence[Row], link: Link | None) -> Gain:
    """Compare the last of some buckets, the tuned ones, with the best of the others.

    Steps of one turn are compared with each other. The noise is how far the median of the turns' differences
    may be off, from their order statistics (a confidence of 95 % whatever their distribution is). With a link
    from a file, steps are predicted, and the noise is what the link's formula is off.

    Args:
        rows: all buckets; the steps of each in turns of `A_TURN`, or all in one turn.
        link: from a file; None if the link was measured with the steps.
    """
    *others, tuned = rows

    def step_s(row: Row) -> float:
        return row.step_s if link is None else row.predicted.step_s

    best = min(others, key=step_s)
    ahead_s = min(row.predicted.step_s for row in others) - tuned.predicted.step_s
    if link is not None:
        return Gain(best.name, ahead_s, link.residual * best.predicted.exposed_s, ahead_s, is_measured=False)
    turns = [[*batched(row.measured_s)] for row in (best, tuned)]
    differences = sorted(median(one) - median(other) for one, other in zip(*turns, strict=True))
    count = len(differences)
    lowest = max(0, int((count - CONFIDENT * math.sqrt(count)) / 2))
    gain_s = median(differences)
    return Gain(best.name, gain_s, gain_s - differences[lowest], ahead_s, is_measured=True)


def batched(steps: Sequence[float]) -> Iterator[Sequence[float]]:
    """The steps of each turn."""
    for begin in range(0, len(steps), A_TURN):
        yield steps[begin : begin + A_TURN]


def link_on(ranks: Ranks, group: Any = None) -> Link:
    """Measure the link of a group of ranks, or of all, a task for all of them."""
    ranks.emit("measuring all-reduces")
    return measure_link(group or dist.group.WORLD, ranks.device)


def tuned_on(  # what a user of 'ddpopt tune' chooses
    ranks: Ranks,
    case: Case,
    strategy: str,
    compile: Compile | None,
    link: Link | None,
    caps: Sequence[float] = (),
    most_bytes: float = LARGEST,
) -> Tuned:
    """Profile, tune and compare, a task for all ranks.

    Args:
        ranks: the ranks.
        case: what they train.
        strategy: ``"inline"``, ``"split"``, or ``"eager"``.
        compile: `ddpopt.compile` with a backend; None to compile nothing.
        link: a stored link; None to measure it.
        caps: more values of ``bucket_cap_mb`` to compare with.
        most_bytes: as for `tune`.

    Raises:
        UsageError: the case cannot be tuned.
        RuntimeError: DDP cannot train it; the message is torch's.
    """
    ranks.emit("compiling")
    trainee = _Trainee(ranks, case, strategy, compile)
    require_profilable(trainee.watch.ddp)
    trainee.run(trainee.watch.steps(WARM_UP))

    profile, found_link, tuned = _choose(ranks, trainee, link, most_bytes)
    plans = {**_others(trainee.watch.ddp, case.ddp_kwargs, caps, profile), "tuned": tuned}
    measured = _measure(ranks, trainee, plans)
    rows = [
        Row(name, plan, simulate(plan, profile, found_link), measured[plan.fingerprint])
        for name, plan in plans.items()
    ]

    trainee.use(tuned)
    buckets = running_buckets(trainee.watch.ddp)
    step = record(trainee.step, buckets) if ranks.device.type == "cpu" else None
    observed = tuple(each for each in ranks.gather(step) if each)
    return Tuned(profile, found_link, tuple(rows), gain_of(rows, link), observed)


def _choose(
    ranks: Ranks, trainee: "_Trainee", stored: Link | None, most_bytes: float
) -> tuple[Profile, Link, Plan]:
    """Profile a case, and tune its buckets with what was found last.

    Without a stored link, steps with the buckets so far show how much sending delays the computation.
    """
    watch = trainee.watch
    strategy = trainee.strategy
    held = ranks.gather(watch.one_each())[0]

    def profiled(steps: int) -> Profile:
        ranks.emit("profiling")
        trainee.use(held, holds=True)
        return trainee.run(watch.profiled(steps, strategy))

    profile = profiled(PROFILED)
    link = stored or link_on(ranks, watch.ddp.process_group)
    plan = tune(profile, link, most_bytes)
    turns, steps = (1, PROFILED) if trainee.recompiles else (PROFILINGS, 2 * A_TURN)
    computed: list[list[float]] = []
    for _ in range(turns):
        if stored is None:
            computed += trainee.computed(plan, steps)
        profile = profiled(steps)
        if stored is None:
            [computed_s] = slowest(computed, watch.ddp.process_group, ranks.device)
            link = calibrated(link, plan, profile, profile.forward_s + computed_s)
        before = plan
        plan = tune(profile, link, most_bytes)
        if plan.fingerprint != before.fingerprint:
            computed.clear()  # that was with other buckets
    return profile, link, plan


def _others(
    ddp: Any, kwargs: Mapping[str, Any], caps: Sequence[float], profile: Profile
) -> Mapping[str, Plan]:
    """The buckets to compare with, by name: DDP's default, the case's own, and those of some caps."""
    order = [gradient.spec for gradient in profile.gradients]
    own = {cap: kwargs[cap] for cap in CAPS if cap in kwargs}
    found = {}
    for limits in ({}, own, *({CAPS[0]: cap} for cap in caps)):
        name = ", ".join(f"{cap}={value}" for cap, value in limits.items()) or "DDP's default"
        config = BucketConfig.from_kwargs(**{**kwargs, **dict.fromkeys(CAPS), **limits})
        found[name] = plan_of(own_buckets(specs_from_ddp(ddp), order, config), name)
    return found


def _measure(ranks: Ranks, trainee: "_Trainee", plans: Mapping[str, Plan]) -> Mapping[str, tuple[float, ...]]:
    """The steps with each plan, each on the slowest rank, in seconds; by the plan's fingerprint."""
    by_buckets = {plan.fingerprint: plan for plan in plans.values()}
    own: dict[str, list[float]] = {each: [] for each in by_buckets}
    turns, steps = (1, TURNS * A_TURN) if trainee.recompiles else (TURNS, A_TURN)
    for turn in range(turns):
        backwards = turn % 2 == 1
        for each, plan in sorted(by_buckets.items(), reverse=backwards):
            ranks.emit(f"turn {turn + 1} of {turns}: {len(plan.buckets)} buckets")
            trainee.use(plan)
            own[each] += trainee.run(trainee.watch.steps(steps))
    return {each: tuple(map(max, zip(*ranks.gather(mine), strict=True))) for each, mine in own.items()}


class _Trainee:
    """A case in training on this rank, always with its first inputs.

    Attributes:
        strategy: how it is compiled.
        recompiles: whether other buckets need another compilation.
        watch: of its DDP module.
    """

    def __init__(self, ranks: Ranks, case: Case, strategy: str, compile: Compile | None) -> None:
        self._case = case
        self.strategy = strategy
        self.recompiles = strategy == "split"
        # detached, as what is computed from parameters has a graph for one backward
        self._inputs: Any = tree_map_only(
            torch.Tensor,
            lambda given: given.detach().to(ranks.device).requires_grad_(given.requires_grad),
            case.inputs(ranks.rank, 0),
        )
        self._ddp: Any = DistributedDataParallel(case.model().to(ranks.device), **case.ddp_kwargs)
        self.watch = Watch(self._ddp)
        if compile is not None:
            self._ddp = compile(self._ddp, strategy=strategy, buckets="open")
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-4)

    def run(self, procedure: Procedure[Value]) -> Value:
        """Run a procedure with steps of this training."""
        while True:
            try:
                next(procedure)
            except StopIteration as ended:
                return cast("Value", ended.value)
            self.step()

    def computed(self, plan: Plan, steps: int) -> list[list[float]]:
        """When the last gradient was complete in each of some steps, in seconds after backward began."""
        self.use(plan)
        found = []
        for _ in range(steps):
            log_every_iteration(self.watch.ddp)
            self.step()
            found.append([max(self.watch.ddp.reducer.get_backward_stats()) / 1e9])
        return found

    def use(self, plan: Plan, *, holds: bool = False) -> None:
        """Change the buckets."""
        self.watch.install(plan, holds=holds)
        if self.recompiles:
            torch._dynamo.reset()
        self.run(self.watch.steps(WARM_UP if self.recompiles else 1))

    def step(self) -> None:
        """Train one step."""
        args, kwargs = self._inputs
        torch.autograd.backward(self._case.loss(self._ddp(*args, **kwargs)))
        self._optimizer.step()
        self._optimizer.zero_grad()
