"""Test data-parallel models: cases, engines, ranks for pytest, one assertion, and drawn models.

In: a test marked with ``world_size(n)``. Out: the test, run on `n` ranks. Invariant: a test passes only if it
passes on every rank.

Names are imported at first use: pytest loads this package's plugin in every run of an environment where it is
installed, and torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.cases.case import Case, mean_square, step_seed
    from ddpopt.cases.targets import resolve
    from ddpopt.judge.engine import Engine
    from ddpopt.ranks.group import Ranks
    from ddpopt.testing.equality import DdpNotEqualError, assert_ddp_equal

_HOMES = {
    **dict.fromkeys(("Case", "mean_square", "step_seed"), "cases.case"),
    **dict.fromkeys(("DdpNotEqualError", "assert_ddp_equal"), "testing.equality"),
    "Engine": "judge.engine",
    "Ranks": "ranks.group",
    "resolve": "cases.targets",
}
__all__ = [
    "Case",
    "DdpNotEqualError",
    "Engine",
    "Ranks",
    "assert_ddp_equal",
    "mean_square",
    "resolve",
    "step_seed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddpopt.{_HOMES[name]}"), name)
