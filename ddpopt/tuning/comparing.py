"""``ddpopt tune`` and ``ddpopt link``: profile a case on ranks, tune its buckets, and compare them.

One compiled module runs all plans in turns, every second turn backwards, so that a busy minute affects all of
them, and the profile that predicts them. How much sending delays the model's computation is measured in more
steps with the tuned plan, and the buckets are tuned again with that. Equal buckets are measured once. The
cuts of the strategy ``split`` are compiled for one plan; there each plan has one long turn, after compiling
again.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddpopt.cases.case import Case
from ddpopt.dynamo import api
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.planning.bucket_rule import own_buckets, specs_from_ddp
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.observed import record
from ddpopt.tuning.recording import Course, Value, Watch, require_profilable, slowest
from ddpopt.tuning.records import LARGEST, Link, Profile
from ddpopt.tuning.simulate import Timeline, calibrated, simulate
from ddpopt.tuning.tune import plan_of, tune

STRATEGIES = {"ddpopt-inline": "inline", "ddpopt-split": "split", "eager": "eager"}
"""By mode."""
CAPS = ("bucket_cap_mb", "bucket_cap_mb_list")
WARM_UP, PROFILED, TURNS, A_TURN = 3, 20, 30, 2
"""Steps until all is compiled, profiled steps, turns of each plan, and measured steps in a turn."""


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
class Tuned:
    """What `tuned_on` found.

    Attributes:
        profile: of the case.
        link: of its ranks, as it delays this case; or the one that was given.
        rows: DDP's default, the given cap if there is one, and the tuned buckets.
        observed: one step with the tuned buckets, on each rank; empty on GPUs.
    """

    profile: Profile
    link: Link
    rows: tuple[Row, ...]
    observed: tuple[Timeline, ...] = ()

    def to_json(self) -> str:
        """The tuned plan as `Plan.from_json` reads it, with the profile, the link and all rows."""
        records = {"profile": self.profile.document(), "link": self.link.document()}
        rows = [{**asdict(row), "plan": row.plan.fingerprint} for row in self.rows]
        return json.dumps({**self.rows[-1].plan.document(), **records, "rows": rows}, indent=2)


def link_on(ranks: Ranks, group: Any = None) -> Link:
    """Measure the link of a group of ranks, or of all, a task for all of them."""
    ranks.emit("measuring all-reduces")
    return measure_link(group or dist.group.WORLD, ranks.device)


def tuned_on(
    ranks: Ranks,
    case: Case,
    how: tuple[Any, Any],
    link: Link | None,
    caps: Sequence[float] = (),
    most_bytes: float = LARGEST,
) -> Tuned:
    """Profile, tune and compare, a task for all ranks.

    Args:
        ranks: the ranks.
        case: what they train.
        how: the strategy, ``"inline"``, ``"split"``, or ``"eager"`` to compile nothing, and the backend.
        link: a stored link; None to measure it.
        caps: more values of ``bucket_cap_mb`` to compare with.
        most_bytes: as for `tune`.

    Raises:
        UsageError: the case cannot be tuned.
        RuntimeError: DDP cannot train it; the message is torch's.
    """
    ranks.emit("compiling")
    strategy, kwargs, trainee = how[0], case.ddp_kwargs, _Trainee(ranks, case, *how)
    watch = trainee.watch
    require_profilable(watch.ddp)
    trainee.run(watch.steps(WARM_UP))
    held = ranks.gather(watch.one_each())[0]

    def profiled(steps: int) -> Profile:
        ranks.emit("profiling")
        trainee.use(held, holds=True)
        return trainee.run(watch.profiled(steps, strategy))

    def delayed(link: Link, steps: int) -> Link:
        trainee.use(plans["tuned"])
        for _ in range(steps):
            watch.ddp._set_ddp_runtime_logging_sample_rate(1)
            trainee.step()
            computed.append([max(watch.ddp.reducer.get_backward_stats()) / 1e9])
        [computed_s] = slowest(computed, watch.ddp.process_group, ranks.device)
        return calibrated(link, plans["tuned"], profile, profile.forward_s + computed_s)

    profile, plans = profiled(PROFILED), dict[str, Plan]()
    order = [gradient.spec for gradient in profile.gradients]
    is_given, link = link is not None, link or link_on(ranks, watch.ddp.process_group)
    for limits in ({}, {c: kwargs[c] for c in CAPS if c in kwargs}, *({CAPS[0]: cap} for cap in caps)):
        name = ", ".join(f"{cap}={value}" for cap, value in limits.items()) or "DDP's default"
        config = BucketConfig.from_kwargs(**{**kwargs, **dict.fromkeys(CAPS), **limits})
        plans[name] = plan_of(own_buckets(specs_from_ddp(watch.ddp), order, config), name)
    for _ in range(1 if is_given else 2):  # the first plan shows how much sending delays this model
        plans["tuned"], computed = tune(profile, link, most_bytes), list[list[float]]()
        link = link if is_given else delayed(link, PROFILED)
    by_buckets = {plan.fingerprint: plan for plan in plans.values()}
    measured: dict[str, list[float]] = {each: [] for each in by_buckets}
    turns, steps = (1, TURNS * A_TURN) if strategy == "split" else (TURNS, A_TURN)
    for turn in range(turns):
        profile = profiled(2 * A_TURN)  # more than of one plan, as all predictions depend on it
        link = link if is_given else delayed(link, 2 * steps)
        for each, plan in [*by_buckets.items()][:: -1 if turn % 2 else 1]:
            ranks.emit(f"turn {turn + 1} of {turns}: {len(plan.buckets)} buckets")
            trainee.use(plan)
            measured[each] += trainee.run(watch.steps(steps))
    trainee.use(plans["tuned"])
    longest = {each: tuple(map(max, zip(*ranks.gather(own), strict=True))) for each, own in measured.items()}
    step = record(trainee.step, running_buckets(watch.ddp)) if ranks.device.type == "cpu" else None
    observed = tuple(each for each in ranks.gather(step) if each)
    rows = [Row(name, p, simulate(p, profile, link), longest[p.fingerprint]) for name, p in plans.items()]
    return Tuned(profile, link, tuple(rows), observed)


class _Trainee:
    """A case in training on this rank, always with its first inputs."""

    def __init__(self, ranks: Ranks, case: Case, strategy: Any, backend: Any) -> None:
        self._case, self._recompiles = case, strategy == "split"
        # detached, as what is computed from parameters has a graph for one backward
        self._inputs: Any = tree_map_only(
            torch.Tensor,
            lambda given: given.detach().to(ranks.device).requires_grad_(given.requires_grad),
            case.inputs(ranks.rank, 0),
        )
        self._ddp: Any = DistributedDataParallel(case.model().to(ranks.device), **case.ddp_kwargs)
        self.watch = Watch(self._ddp)
        if strategy != "eager":
            self._ddp = api.compile(self._ddp, backend=backend, strategy=strategy, buckets="open")
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-4)

    def run(self, course: Course[Value]) -> Value:
        """Run a course with steps of this training."""
        while True:
            try:
                next(course)
            except StopIteration as ended:
                return cast("Value", ended.value)
            self.step()

    def use(self, plan: Plan, *, holds: bool = False) -> None:
        """Change the buckets."""
        self.watch.install(plan, holds=holds)
        if self._recompiles:
            torch._dynamo.reset()
        self.run(self.watch.steps(WARM_UP if self._recompiles else 1))

    def step(self) -> None:
        """Train one step."""
        args, kwargs = self._inputs
        torch.autograd.backward(self._case.loss(self._ddp(*args, **kwargs)))
        self._optimizer.step()
        self._optimizer.zero_grad()
