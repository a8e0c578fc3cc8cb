"""torch.compile and DistributedDataParallel agree on gradient buckets, and it is proved that they do.

The public names are imported when they are first used: pytest loads this package in every run of an
environment where it is installed (`ddpopt.testing.plugin`), and torch takes seconds to import.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.backend import compile, replacing_ddp_optimizer
    from ddpopt.capture import plan
    from ddpopt.errors import DdpoptError
    from ddpopt.explain import explain
    from ddpopt.explanation import Explanation
    from ddpopt.impose import impose
    from ddpopt.observe import observe
    from ddpopt.plan import Plan
    from ddpopt.verify.runner import verify
    from ddpopt.verify.verdict import Verdict

__all__ = [
    "DdpoptError",
    "Explanation",
    "Plan",
    "Verdict",
    "compile",
    "explain",
    "impose",
    "observe",
    "plan",
    "replacing_ddp_optimizer",
    "verify",
]
__version__ = "0.1.0"

_HOMES = {
    "DdpoptError": "errors",
    "Explanation": "explanation",
    "Plan": "plan",
    "Verdict": "verify.verdict",
    "compile": "backend",
    "explain": "explain",
    "impose": "impose",
    "observe": "observe",
    "plan": "capture",
    "replacing_ddp_optimizer": "backend",
    "verify": "verify.runner",
}


class _Facade(ModuleType):
    """A package whose public names come from its modules, also where a module has the same name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_HOMES[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Python binds each imported module in its package: ddpopt.plan stays the function.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Facade
