"""Which steps in one graph train which DDP modules now, for those who observe.

Invariant: a module that nothing else holds is not kept alive.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ddpopt.planning.plan import Plan

_running: "WeakKeyDictionary[Any, Plan]" = WeakKeyDictionary()


def running_plan(ddp: Any) -> Plan | None:
    """The plan of the step that last trained a DDP module; None if none has."""
    return _running.get(ddp)


def note_running(ddps: Sequence[Any], plans: Sequence[Plan]) -> None:
    """Note that a step trains its DDP modules now."""
    _running.update(zip(ddps, plans, strict=True))
