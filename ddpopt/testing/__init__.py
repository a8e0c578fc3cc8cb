"""What people build tests of data-parallel models from: cases, and the corpus of those that ship.

Imported when first used, as pytest loads the plugin in this package where nobody may want torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.testing.case import Case, mean_square, resolve, step_seed

__all__ = ["Case", "mean_square", "resolve", "step_seed"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddpopt.testing import case

    return getattr(case, name)
