"""Test data-parallel models: cases, engines, ranks for pytest, one assertion, and drawn models.

In: a test marked with ``world_size(n)``. Out: the test, run on `n` ranks. Invariant: a test passes only if it
passes on every rank.

Names are imported at first use: pytest loads this package's plugin in every run of an environment where it is
installed, and torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.cases.case import Case as Case
    from ddpopt.cases.case import mean_square as mean_square
    from ddpopt.cases.case import step_seed as step_seed
    from ddpopt.cases.targets import resolve as resolve
    from ddpopt.judge.engines.engine import Engine as Engine
    from ddpopt.ranks.group import Ranks as Ranks
    from ddpopt.testing.equality import DdpNotEqualError as DdpNotEqualError
    from ddpopt.testing.equality import assert_ddp_equal as assert_ddp_equal

_HOMES = {
    **dict.fromkeys(("Case", "mean_square", "step_seed"), "cases.case"),
    **dict.fromkeys(("DdpNotEqualError", "assert_ddp_equal"), "testing.equality"),
    "Engine": "judge.engines.engine",
    "Ranks": "ranks.group",
    "resolve": "cases.targets",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddpopt.{_HOMES[name]}"), name)
