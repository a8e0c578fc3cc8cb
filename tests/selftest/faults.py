"""Faults that are injected on purpose, to check that verification finds them.

Four layers: the plan that the reducer follows, the partition of the graph, the compiled code, and
communication. Each fault is a small function that changes a running training, in memory and for one run.
Invariant: a fault changes nothing but the run that it is put into.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from tests.selftest import codes as code
from tests.selftest import graphs, plans, shown, sites, wires
from tests.selftest.metadata import shared_metadata
from tests.selftest.sites import Inject, Tamper, second_rank
from tests.support import mutants
from tests.support.mutants import Edits

Layer = Literal["plan", "partition", "compiled code", "communication"]
NUMBERS = ("L0", "L1", "L2")
"""The levels that compare numbers: L0 where equality is required, L1 and L2 where rounding is allowed."""


@dataclass(frozen=True)
class Fault:
    """A fault, and where to put it.

    Attributes:
        name: unique.
        layer: what it breaks.
        seen_by: which checks may find it: ``"L0"`` to ``"L3"``; ``"certificate"``: ddpopt refuses the
            graph; ``"agreement"``: ddpopt refuses the ranks' plans; ``"run"``: the step fails; ``"ranks"``:
            a rank dies or stalls.
        inject: from the rank's site to a context that holds while the mode runs: something of ddpopt's is
            replaced.
        tamper: changes the trainer once the model is data-parallel.
        carriers: the ranks on which broken code has to run.
        mode: the mode into which it is injected.
        case: name of the case that shows it, of the matrix or of the corpus.
        option: the option that shows it.
        backend: ``"aot_eager"``; ``"rounding"`` for one that is held to L2; ``"reusing"`` for one that
            reuses memory as Inductor does.
        tiny: whether it moves a number by one unit in the last place, which is rounding on three ranks.
        reduced: whether the wrong numbers are sums over ranks, which must be equal only on two ranks.
    """

    name: str
    layer: Layer
    seen_by: tuple[str, ...]
    inject: Inject = sites.no_change
    tamper: Tamper = sites.untouched
    carriers: sites.Carriers = sites.every_rank
    mode: str = "ddpopt-inline"
    case: str = "plain"
    option: str = "default"
    backend: str = "aot_eager"
    tiny: bool = False
    reduced: bool = True

    def due(self, levels: Iterable[str], size: int) -> tuple[str, ...]:
        """Those that have to find it, where these levels were applied on so many ranks.

        L0 has to where equality is asked for: of reduced gradients on two ranks, of all else on any; of
        gradients of a cut graph not, where L2 judged them instead. L1
        holds what is received against what was sent, so it has to find faults in communication; of other
        wrong gradients it has to hear only where nothing else compares them.
        """
        applied = {*levels, "certificate", "agreement"}
        resummed = self.mode == "ddpopt-split" and "L2" in applied
        if (size > 2 and self.reduced) or self.backend == "rounding" or resummed:
            applied -= {"L0"}
        if self.layer != "communication" and not applied.isdisjoint(("L0", "L2")):
            applied -= {"L1"}
        return tuple(name for name in self.seen_by if name in applied)

    def shows_on(self, size: int) -> bool:
        """Whether this number of ranks can show it."""
        return size == 2 or (size > 2 and not self.tiny)


Levels = tuple[str, ...]
Pair = tuple[Fault, Fault]


def _plan(name: str, inject: Inject, seen_by: str = "L3", **given: Any) -> Fault:
    return Fault(name, "plan", (seen_by,), inject, **given)


def _of_one_rank(name: str, inject: Inject = sites.no_change, **given: Any) -> Fault:
    return _plan(name, inject, "agreement", carriers=second_rank, **given)


def _cut(name: str, edits: Edits | None, case: str = "plain", seen_by: Levels = NUMBERS) -> Pair:
    """A wrong partition: as it is, and without the certificate, so that the numbers must show it."""
    proved = Fault(name, "partition", ("certificate",), graphs.cutting(edits), mode="ddpopt-split", case=case)
    unproved = graphs.cutting(edits, certified=False)
    return proved, replace(proved, name=f"{name}, uncertified", seen_by=seen_by, inject=unproved)


def _writing(name: str, edits: Any) -> Pair:
    """A wrong partition of a case that writes, in its writes."""
    return _cut(name, partial(edits, where=graphs.writes), "writing")


def _code(name: str, tamper: Tamper, seen_by: Levels = NUMBERS, **given: Any) -> Pair:
    """Wrong numbers: where equality is required, and where rounding is allowed."""
    exact = Fault(name, "compiled code", seen_by, tamper=tamper, **given)
    rounded = f"{name}, where rounding is allowed"
    return exact, replace(exact, name=rounded, mode="ddpopt-split", backend="rounding")


def _strict(name: str, tamper: Tamper, option: str = "default") -> Fault:
    return Fault(name, "compiled code", ("L3",), tamper=tamper, option=option)


def _tiny(name: str, layer: Layer, tamper: Tamper) -> Fault:
    return Fault(name, layer, ("L0",), tamper=tamper, tiny=True)


def _wire(name: str, tamper: Tamper, seen_by: Levels = NUMBERS, **given: Any) -> Fault:
    """Wrong communication; under an option for which L1 compares with what each rank computed alone."""
    return Fault(name, "communication", seen_by, tamper=tamper, **{"option": "bucket_view", **given})


METADATA: Any = {"mode": "ddpopt-split", "case": "weight_norm", "backend": "reusing"}
LATE_ON_SECOND = plans.bucketing(plans.late, second_rank)
DEADLY = replace(
    _plan("one rank's reducer has other buckets", LATE_ON_SECOND, carriers=second_rank),
    seen_by=("L3", "run", "ranks"),
)
"""A fault that crashes a rank."""
FAULTS: tuple[Fault, ...] = (
    _plan("two buckets are swapped", plans.bucketing(plans.swapped)),
    _plan("a parameter is one bucket late", plans.bucketing(plans.late), mode="ddpopt-split"),
    _plan("a bucket is dropped", plans.bucketing(plans.dropped), "run"),
    _plan("a bucket is doubled", plans.bucketing(plans.doubled), "run"),
    _plan("all parameters are in one bucket", plans.bucketing(plans.merged), mode="ddpopt-split"),
    _of_one_rank("one rank has another plan", tamper=plans.other_plan_on_one_rank),
    _of_one_rank("one rank's plan does not fit its model", plans.unfit_plan_on_one_rank),
    _plan("no plan is in force", plans.no_plan),
    *_cut(
        "a segment reads what the one before it read",
        partial(mutants.given_another, where=graphs.is_input_of_the_first),
        seen_by=(*NUMBERS, "run"),
    ),
    *_cut("two segments swap their parameters", mutants.inputs_exchanged),
    *_cut("a tied contribution is lost", mutants.through("detach", graphs.is_last_of_several), "tied"),
    *_cut("no gradient crosses a cut", mutants.through("detach", graphs.crosses), seen_by=(*NUMBERS, "run")),
    *_cut("what crosses a cut is rounded to bfloat16", mutants.through(mutants.rounded, graphs.crosses)),
    *_writing("a mutation is lost", mutants.left_out),
    *_writing("a mutation runs at the end of its segment", mutants.run_late),
    *_writing("a mutation is moved across a cut", mutants.in_next_segment),
    *_writing("a mutation runs twice", mutants.run_twice),
    *_cut("segments run in another order", mutants.segments_swapped),
    Fault("a segment has another one's metadata", "compiled code", ("L0",), shared_metadata, **METADATA),
    *_code("a gradient is zeroed", code.on_gradient(torch.zeros_like)),
    *_code("a gradient is doubled", code.on_gradient(lambda g: g * 2)),
    *_code("a gradient is negated", code.on_gradient(torch.neg)),
    *_code("a gradient is transposed", code.on_gradient(lambda g: g.t().contiguous())),
    *_code("a gradient is that of the last step", code.on_gradient(code.Stale)),
    *_code("a gradient is another rank's", code.from_first_rank, carriers=lambda size: range(1, size)),
    *_code("a gradient is cast to bfloat16 and back", code.on_gradient(code.halved)),
    *_code("rows of a gradient are rolled", code.on_gradient(lambda g: g.roll(1, 0))),
    *_code("one element of a gradient is zero", code.on_gradient(code.holed)),
    *_code("one element of a gradient is NaN", code.on_gradient(code.poisoned)),
    *_code("two gradients are swapped", code.swapped_gradients),
    *_code("a gradient is missing", code.on_weight(code.missing_gradient), seen_by=("L3",)),
    *_code("a gradient has lost a dimension", code.reshaped_gradient, seen_by=("L3",)),
    *_code("a buffer is not updated", code.stale_buffer, case="normed", reduced=False),
    *_code("a counter is not updated", code.stale_counter, case="normed", seen_by=("L3",)),
    *_code("random numbers are replayed", code.replayed_random, case="noisy"),
    *_code("a micro-batch is counted twice", code.counted_twice, option="accumulation"),
    _tiny("a gradient is off by one ULP", "compiled code", code.on_gradient(code.next_up)),
    _tiny("a parameter is off by one ULP", "compiled code", code.on_weight(code.moved_parameter)),
    _strict("a hook runs twice", code.hook_twice, "accumulated_hook"),
    _strict("a gradient has other strides", code.on_weight(code.restrided_gradient)),
    _strict("a graph is compiled again in each step", code.recompiling),
    *(
        Fault(name, "compiled code", (level,), tamper=tamper, case="shown", reduced=False)
        for name, (level, tamper) in shown.FAULTS.items()
    ),
    _wire("a bucket is not reduced", wires.through(lambda mean, own, group: own)),
    _wire("a bucket is reduced twice", wires.through(wires.reduced_twice)),
    _wire("a bucket is scaled by N", wires.through(lambda mean, own, group: mean * group.size() ** 2)),
    _wire("a bucket is not averaged", wires.through(lambda mean, own, group: mean * group.size())),
    _wire("a bucket is another rank's", wires.through(wires.from_first_rank)),
    _wire("a bucket is that of the last step", wires.on_mean(code.Stale)),
    _wire("a bucket is cast to bfloat16 on the way", wires.on_mean(code.halved)),
    _wire("a parameter in a bucket is not reduced", wires.through(wires.partly_reduced)),
    _wire("a rank's contribution is lost", wires.through(wires.contribution_lost)),
    _tiny("a bucket is off by one ULP", "communication", wires.on_mean(code.next_up)),
    _wire("nothing is reduced", wires.hooks_removed, ("L3",)),
    _wire("something else is sent", wires.sending(lambda trainer: trainer.place.group), ("L3",)),
    _wire("something else is sent in another group", wires.sending(lambda _: None), ("L3",)),
    _wire("no_sync is ignored", wires.no_sync_ignored, ("L3",), option="accumulation"),
    _wire("buffers are not broadcast", wires.buffers_not_broadcast, ("L0",), case="normed", option="default"),
    _wire("a rank's parameters drift", wires.drifting_rank, ("L3",), carriers=lambda n: range(n - 1, n)),
)
PLACEBOS: tuple[Fault, ...] = (
    replace(_plan("the reducer's buckets", plans.bucketing(list)), seen_by=()),
    replace(_cut("a partition", None)[0], seen_by=()),
    replace(_code("a gradient", code.on_gradient(torch.clone))[0], seen_by=()),
    replace(_code("a gradient", code.on_gradient(torch.clone))[1], seen_by=()),
    _wire("a bucket", wires.on_mean(torch.clone), ()),
    Fault("metadata", "compiled code", (), **METADATA),
)
"""The ways in which faults are injected, without a fault: verification must find nothing."""
