"""What ddpopt keeps of each module: one record, which `state_of` finds.

| field | written by | read by |
|---|---|---|
| `planned` | `reducer.install` | `held.planned_reducer`, and through it `ddp`, `observation` and `dynamo` |
| `deferral` | `deferral.Deferral`, which begins and ends | `held.running_reducer`, `deferral.pending` |
| `keeps_buckets` | `deferral.Deferral` | `dynamo.backend` |
| `ready_hooks` | `ready_hooks.ready_hooks`, once | `ready_hooks.ready_hooks` |
| `replicated` | `step.replicate` | `step.replicate` |
| `step_plan` | `step.train` | `observation`, `explanation` and `judge` |
| `left_by_steps` | `step.reductions` | `step.reductions` |
| `graphs`, `backends` | `dynamo.backend` | `dynamo.backend` |
| `tuning` | `tuning.online` | `tuning.online` |

Invariant: a record dies with its module. It is no attribute of it, so no copy and no pickle has the record.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ddpopt.planning.plan import Plan


@dataclass(eq=False)
class ModuleState:
    """The record of one module: a DDP module, or a plain one that steps train.

    None of its values may keep the module alive.

    Attributes:
        planned: the last reducer that was made to follow a plan; DDP may have replaced it since.
        deferral: the decision about the module's buckets that was begun last; None once it has ended.
        keeps_buckets: whether the module's ranks found no plan. If one rank compiles a graph later, the
            others are not asked again.
        ready_hooks: the hooks that notify its reducer of gradients; None until they are needed.
        step_plan: the plan of the step in one graph that trained it last, if any did.
        left_by_steps: what steps in one graph left in its reducer, which later ones must know.
        replicated: of a plain module: the process groups in which a step has copied the first rank's
            parameters and buffers to the others.
        graphs: its graphs, as each backend sees them; backends that share them have one key.
        backends: those that have seen the module.
        tuning: a weak reference to what tunes it while it trains; its logger keeps that alive.
    """

    planned: weakref.ReferenceType[Any] | None = None
    deferral: Any = None
    keeps_buckets: bool = False
    ready_hooks: Any = None
    step_plan: Plan | None = None
    left_by_steps: Any = None
    replicated: set[str] = field(default_factory=set)
    graphs: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    backends: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    tuning: weakref.ReferenceType[Any] | None = None


_states: weakref.WeakKeyDictionary[nn.Module, ModuleState] = weakref.WeakKeyDictionary()


def state_of(module: nn.Module) -> ModuleState:
    """The record of a module; the first call makes an empty one."""
    state = _states.get(module)
    if state is None:
        state = _states[module] = ModuleState()
    return state
