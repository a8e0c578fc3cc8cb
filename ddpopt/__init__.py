"""Make torch.compile and DistributedDataParallel agree on gradient buckets, and check the gradients.

Public names are imported on first use: pytest loads this package in every run where it is installed
(`ddpopt.testing.plugin`), and importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.ddp.impose import impose
    from ddpopt.dynamo.api import compile, replacing_ddp_optimizer
    from ddpopt.dynamo.backend import DdpoptBackend
    from ddpopt.errors import DdpoptError
    from ddpopt.explanation.explain import explain
    from ddpopt.explanation.result import Explanation
    from ddpopt.judge.runner import verify
    from ddpopt.judge.verdict import Verdict
    from ddpopt.observation.observe import observe
    from ddpopt.planning.capture import plan
    from ddpopt.planning.plan import Plan

__all__ = [
    "DdpoptBackend",
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
    "DdpoptBackend": "dynamo.backend",
    "DdpoptError": "errors",
    "Explanation": "explanation.result",
    "Plan": "planning.plan",
    "Verdict": "judge.verdict",
    "compile": "dynamo.api",
    "explain": "explanation.explain",
    "impose": "ddp.impose",
    "observe": "observation.observe",
    "plan": "planning.capture",
    "replacing_ddp_optimizer": "dynamo.api",
    "verify": "judge.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except (ImportError, AttributeError):
        from ddpopt.torch_private import require_supported

        require_supported()  # an unsupported release of torch is the likeliest reason
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
