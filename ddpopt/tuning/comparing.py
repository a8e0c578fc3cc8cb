"""``ddpopt tune`` and ``ddpopt link``: profile a case on ranks, tune its buckets, and compare them.

One compiled module runs all plans in turns, so that a busy minute affects all of them, and the profile that
predicts them. Equal buckets are measured once. The cuts of the strategy ``split`` are compiled for one plan;
there each plan has one long turn, after compiling again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ddpopt.cases.case import Case
from ddpopt.dynamo import api
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.planning.bucket_rule import own_buckets, specs_from_ddp
from ddpopt.planning.limits import MIB, BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.observed import record
from ddpopt.tuning.recording import Watch, one_each, require_profilable, run
from ddpopt.tuning.records import Link, Profile, ms, plan_of
from ddpopt.tuning.simulate import Timeline, simulate
from ddpopt.tuning.tune import tune

STRATEGIES = {"ddpopt-inline": "inline", "ddpopt-split": "split", "eager": "eager"}
"""By mode."""
CAPS = ("bucket_cap_mb", "bucket_cap_mb_list")
WARM_UP, PROFILED, TURNS, A_TURN = 3, 8, 8, 5
"""Steps of a plan that are not measured, profiled steps, turns of each plan, and measured steps in a turn."""
How = tuple[Any, Any]
Groups = tuple[tuple[str, ...], ...]


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
        title: the case and how it ran.
        profile: of the case.
        link: of its ranks, or the one that was given.
        rows: DDP's default, the given cap if there is one, and the tuned buckets.
    """

    title: str
    profile: Profile
    link: Link
    rows: tuple[Row, ...]
    observed: tuple[Timeline, ...] = ()

    def __str__(self) -> str:
        """The table that the command prints."""
        cells = [["", "buckets", "predicted", "measured", "exposed", "first MiB", "last MiB"]]
        for row in self.rows:
            times = map(ms, (row.predicted.step_s, row.step_s, row.predicted.exposed_s))
            sizes = (f"{row.plan.buckets[place].nbytes / MIB:.2f}" for place in (0, -1))
            cells.append([row.name, str(len(row.plan.buckets)), *times, *sizes])
        lines = [f"{name:24}" + "".join(f"{cell:>11}" for cell in others) for name, *others in cells]
        return "\n".join([self.title, str(self.link), "", *lines])

    def to_json(self) -> str:
        """The tuned plan as `Plan.from_json` reads it, with the profile, the link and all rows."""
        found = {each: json.loads(getattr(self, each).to_json()) for each in ("profile", "link")}
        found["rows"] = [{**asdict(row), "plan": row.plan.fingerprint} for row in self.rows]
        return json.dumps({**json.loads(self.rows[-1].plan.to_json()), **found}, indent=2)


def link_on(ranks: Ranks) -> Link:
    """Measure the link between ranks, a task for all of them."""
    ranks.emit("measuring all-reduces")
    return measure_link(dist.group.WORLD, ranks.device)


def tuned_on(ranks: Ranks, case: Case, how: How, link: Link | None, caps: Sequence[float] = ()) -> Tuned:
    """Profile, tune and compare, a task for all ranks.

    Args:
        ranks: the ranks.
        case: what they train.
        how: the strategy, ``"inline"``, ``"split"``, or ``"eager"`` to compile nothing, and the backend.
        link: a stored link; None to measure it.
        caps: more values of ``bucket_cap_mb`` to compare with.
    """
    ranks.emit("compiling")
    trainee = _Trainee(ranks, case, *how)
    watch, strategy, kwargs, profiles = trainee.watch, how[0], case.ddp_kwargs, list[Any]()
    group = watch.ddp.process_group
    require_profilable(watch.ddp)
    run(watch.steps(WARM_UP), trainee.step)
    order, own = watch.ready_order(), specs_from_ddp(watch.ddp)
    ranks.emit("profiling")

    def profiled(steps: int) -> Profile:
        trainee.use(one_each(order), holds=True)
        return run(watch.profiled(order, steps, strategy, profiles), trainee.step)

    profile = profiled(PROFILED)
    ranks.emit("measuring all-reduces")
    link = link or measure_link(group, ranks.device)
    plans = {}
    own_caps = {cap: kwargs[cap] for cap in CAPS if cap in kwargs}
    for limits in ({}, own_caps, *({CAPS[0]: cap} for cap in caps)):
        name = ", ".join(f"{cap}={value}" for cap, value in limits.items()) or "DDP's default"
        config = BucketConfig.from_kwargs(**{**kwargs, **dict.fromkeys(CAPS), **limits})
        plans[name] = plan_of(own_buckets(own, order, config), name)
    plans["tuned"] = tune(profile, link)
    by_buckets = {_groups(plan): plan for plan in plans.values()}  # the tuned one is the last to run
    by_buckets[_groups(plans["tuned"])] = by_buckets.pop(_groups(plans["tuned"]))
    measured: dict[Groups, list[float]] = {groups: [] for groups in by_buckets}
    turns = 1 if strategy == "split" else TURNS
    for turn in range(turns):
        ranks.emit(f"turn {turn + 1} of {turns}: profiling")
        profile = profiled(PROFILED + (turn + 1) * A_TURN)
        for groups, plan in by_buckets.items():
            ranks.emit(f"turn {turn + 1} of {turns}: {len(groups)} buckets")
            trainee.use(plan)
            measured[groups] += run(watch.steps(A_TURN * TURNS // turns), trainee.step)
    slowest = {key: tuple(map(max, zip(*ranks.gather(own), strict=True))) for key, own in measured.items()}
    step = record(trainee.step, running_buckets(watch.ddp)) if ranks.device.type == "cpu" else None
    observed = tuple(each for each in ranks.gather(step) if each)
    rows = [Row(name, p, simulate(p, profile, link), slowest[_groups(p)]) for name, p in plans.items()]
    return Tuned(f"{case.name} on {ranks.size} ranks, {strategy}", profile, link, tuple(rows), observed)


def _groups(plan: Plan) -> Groups:
    return tuple(bucket.params for bucket in plan.buckets)


class _Trainee:
    """A case in training on this rank, always with its first inputs."""

    def __init__(self, ranks: Ranks, case: Case, strategy: Any, backend: Any) -> None:
        self._ranks, self._case, self._recompiles = ranks, case, strategy == "split"
        ddp: Any = DistributedDataParallel(case.model().to(ranks.device), **case.ddp_kwargs)
        self.watch = Watch(ddp)
        if strategy != "eager":
            ddp = api.compile(ddp, backend=backend, strategy=strategy, buckets="open")
        self._call = ddp
        self._optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        self._inputs: Any = None

    def use(self, plan: Plan, *, holds: bool = False) -> None:
        """Change the buckets."""
        self.watch.install(plan, holds=holds)
        if self._recompiles:
            torch._dynamo.reset()
        run(self.watch.steps(WARM_UP), self.step)

    def step(self) -> None:
        """Train one step."""
        # what is computed from parameters has a graph for one backward
        if self._inputs is None or any(getattr(each, "grad_fn", None) for each in tree_leaves(self._inputs)):
            made, device = self._case.inputs(self._ranks.rank, 0), self._ranks.device
            self._inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), made)
        args, kwargs = self._inputs
        torch.autograd.backward(self._case.loss(self._call(*args, **kwargs)))
        self._optimizer.step()
        self._optimizer.zero_grad()
