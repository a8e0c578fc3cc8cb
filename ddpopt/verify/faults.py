"""Faults that are put in by hand, to learn whether verification finds them.

Four layers: the plan that the reducer follows, the partition of the graph, the compiled code, and
communication. Each fault is a small function that changes a running training, in memory and for one run.
Invariant: a fault changes nothing but the run that it is put into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpopt.verify import fault_codes as code
from ddpopt.verify import fault_graphs as graphs
from ddpopt.verify import fault_plans as plans
from ddpopt.verify import fault_wires as wires
from ddpopt.verify.fault_sites import Inject, Tamper, no_change
from ddpopt.verify.judge import untampered

Layer = Literal["plan", "partition", "compiled code", "communication"]


@dataclass(frozen=True)
class Fault:
    """A fault, and where to put it.

    Attributes:
        name: unique.
        layer: what it breaks.
        inject: from the rank to a context that holds while the mode runs: something of ddpopt's is replaced.
        tamper: changes the trainer once the model is data-parallel.
        mode: the mode that it is put into.
        case: name of the case of the matrix that shows it.
        option: the option that shows it.
        backend: name of Dynamo's, or ``"rounding"`` for one that is held to L2.
    """

    name: str
    layer: Layer
    inject: Inject = no_change
    tamper: Tamper = untampered
    mode: str = "ddpopt-inline"
    case: str = "plain"
    option: str = "default"
    backend: str = "aot_eager"


def _plan(name: str, inject: Inject, mode: str = "ddpopt-inline") -> Fault:
    return Fault(name, "plan", inject, mode=mode)


def _cut(name: str, change: graphs.Change, case: str = "plain") -> tuple[Fault, Fault]:
    """A wrong partition: as it comes, and without the certificate, so that the numbers must show it."""
    return (
        Fault(name, "partition", graphs.cutting(change), mode="ddpopt-split", case=case),
        Fault(
            f"{name}, uncertified",
            "partition",
            graphs.cutting(change, certified=False),
            mode="ddpopt-split",
            case=case,
        ),
    )


def _code(name: str, tamper: Tamper, case: str = "plain", option: str = "default") -> tuple[Fault, Fault]:
    """Wrong gradients: where equality is asked for, and where rounding is allowed."""
    return (
        Fault(name, "compiled code", tamper=tamper, case=case, option=option),
        Fault(
            f"{name}, where rounding is allowed",
            "compiled code",
            tamper=tamper,
            mode="ddpopt-split",
            case=case,
            option=option,
            backend="rounding",
        ),
    )


def _strict(name: str, tamper: Tamper, case: str = "plain", option: str = "default") -> Fault:
    return Fault(name, "compiled code", tamper=tamper, case=case, option=option)


def _wire(name: str, tamper: Tamper, case: str = "plain", option: str = "default") -> Fault:
    return Fault(name, "communication", tamper=tamper, case=case, option=option)


FAULTS: tuple[Fault, ...] = (
    _plan("two buckets are swapped", plans.bucketing(plans.swapped)),
    _plan("a parameter is one bucket late", plans.bucketing(plans.late), "ddpopt-split"),
    _plan("a bucket is dropped", plans.bucketing(plans.dropped)),
    _plan("a bucket is doubled", plans.bucketing(plans.doubled)),
    _plan("all parameters are in one bucket", plans.bucketing(plans.merged), "ddpopt-split"),
    _plan("one rank has another plan", plans.other_plan_on_one_rank),
    _plan("one rank's reducer has other buckets", plans.bucketing(plans.late, only_rank=1)),
    _plan("no plan is in force", plans.no_plan),
    *_cut("a segment reads what the one before it read", graphs.skipped_segment),
    *_cut("two segments swap their parameters", graphs.swapped_parameters),
    *_cut("a tied contribution is lost", graphs.lost_contribution, "tied"),
    *_cut("no gradient crosses a cut", graphs.detached_crossing),
    *_cut("what crosses a cut is cast to bfloat16 and back", graphs.rounded_crossing),
    *_cut("a mutation is lost", graphs.lost_mutation, "writing"),
    *_cut("a mutation runs behind its cut", graphs.late_mutation, "writing"),
    *_cut("a mutation runs twice", graphs.repeated_mutation, "writing"),
    *_cut("segments run in another order", graphs.swapped_segments, "normed"),
    *_code("a gradient is zeroed", code.on_gradient(code.zeroed)),
    *_code("a gradient is doubled", code.on_gradient(code.doubled)),
    *_code("a gradient is negated", code.on_gradient(code.negated)),
    *_code("a gradient is transposed", code.on_gradient(code.transposed)),
    *_code("a gradient is that of the last step", code.on_gradient(code.Stale)),
    *_code("a gradient is cast to bfloat16 and back", code.on_gradient(code.halved)),
    *_code("rows of a gradient are rolled", code.on_gradient(code.rolled)),
    *_code("one element of a gradient is zero", code.on_gradient(code.holed)),
    *_code("one element of a gradient is NaN", code.on_gradient(code.poisoned)),
    *_code("two gradients are swapped", code.swapped_gradients),
    *_code("a gradient is missing", code.missing_gradient),
    *_code("a gradient has lost a dimension", code.reshaped_gradient),
    *_code("a buffer is not updated", code.stale_buffer, "normed"),
    *_code("a counter is not updated", code.stale_counter, "normed"),
    *_code("random numbers are replayed", code.replayed_random, "noisy"),
    *_code("a micro-batch is counted twice", code.counted_twice, option="accumulation"),
    _strict("a gradient is off by one ULP", code.on_gradient(code.next_up)),
    _strict("a parameter is off by one ULP", code.moved_parameter),
    _strict("a hook runs twice", code.hook_twice, option="accumulated_hook"),
    _strict("a gradient has other strides", code.restrided_gradient),
    _strict("a graph is compiled anew in each step", code.recompiling),
    _wire("a bucket is not reduced", wires.through(wires.not_reduced)),
    _wire("a bucket is reduced twice", wires.through(wires.reduced_twice)),
    _wire("a bucket is scaled by N", wires.through(wires.scaled_by_size)),
    _wire("a bucket is not averaged", wires.through(wires.summed)),
    _wire("a bucket is another rank's", wires.through(wires.from_first_rank)),
    _wire("a bucket is that of the last step", wires.through(wires.Stale)),
    _wire("a bucket is cast to bfloat16 on the way", wires.through(wires.halved)),
    _wire("a parameter in a bucket is not reduced", wires.through(wires.partly_reduced)),
    _wire("a rank's contribution is lost", wires.through(wires.contribution_lost)),
    _wire("a bucket is off by one ULP", wires.through(wires.next_up)),
    _wire("nothing is reduced", wires.hooks_removed),
    _wire("no_sync is ignored", wires.no_sync_ignored, option="accumulation"),
    _wire("buffers are not broadcast", wires.buffers_not_broadcast, "normed"),
    _wire("a rank's parameters drift", wires.drifting_rank),
)
