"""The passes over a captured step, in their order; Inductor's `Schedule` and the backend come after them.

Each pass takes the step and the settings, and changes the step's graph or adds to the step. A way to send
gradients, a user's override: each is a pass here, or a value that a pass reads.
"""

from collections.abc import Callable

from ddpopt.step.collectives import insert_collectives, plan_step
from ddpopt.step.gathering import gather_parameters
from ddpopt.step.graphs import CapturedStep
from ddpopt.step.overrides import passed
from ddpopt.step.settings import StepSettings
from ddpopt.step.state import TRANSFORM, Declared, StatefulTransform, add_values

Pass = Callable[[CapturedStep, StepSettings], None]


def apply_overrides(step: CapturedStep, settings: StepSettings) -> None:
    """Let the user's overrides change the graph, before it has collectives.

    Raises:
        UsageError: an override returns no graph.
    """
    for override in settings.overrides:
        what = f"{type(override).__name__}.transform"
        step.gm = passed(override.transform, step.gm, what, step.tensors)


def plan_buckets(step: CapturedStep, _: StepSettings) -> None:
    """Plan the buckets of each DDP module."""
    step.plans = plan_step(step)


def send_buckets(step: CapturedStep, settings: StepSettings) -> None:
    """Insert a collective for each bucket."""
    parallel = settings.parallel
    shares = None if parallel is None else parallel.shares(step.replicas)
    insert_collectives(step, step.plans, settings.fusion, shares)


def apply_transform(step: CapturedStep, settings: StepSettings) -> None:
    """Let the user's transform change the graph with its collectives.

    Raises:
        UsageError: it returns no graph, or what it declares cannot be used.
    """
    if settings.transform is not None:
        add_values(step.gm.graph)
    if isinstance(settings.transform, StatefulTransform):
        declared = Declared(step.gm.graph, step.tensors, step.state)
        step.gm = passed(settings.transform, step.gm, TRANSFORM, declared)
        step.state.declare(declared.tensors, declared.own)
        step.added = (*declared.tensors,)
    elif settings.transform is not None:
        step.gm = passed(settings.transform, step.gm, TRANSFORM)


PASSES: tuple[Pass, ...] = (
    apply_overrides,
    plan_buckets,
    send_buckets,
    gather_parameters,
    apply_transform,
)
