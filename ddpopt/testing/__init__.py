"""What people build tests of data-parallel models from: cases, the corpus of those that ship, and ranks.

Imported when first used, as pytest loads the plugin in this package where nobody may want torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.cases.case import Case, mean_square, resolve, step_seed
    from ddpopt.ranks.group import Ranks
    from ddpopt.testing.equality import DdpNotEqualError, assert_ddp_equal

__all__ = [
    "Case",
    "DdpNotEqualError",
    "Ranks",
    "assert_ddp_equal",
    "mean_square",
    "resolve",
    "step_seed",
]

_HOMES = {
    "Case": "cases.case",
    "DdpNotEqualError": "testing.equality",
    "Ranks": "ranks.group",
    "assert_ddp_equal": "testing.equality",
    "mean_square": "cases.case",
    "resolve": "cases.case",
    "step_seed": "cases.case",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddpopt.{_HOMES[name]}"), name)
