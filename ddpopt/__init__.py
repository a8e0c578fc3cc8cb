"""Make torch.compile and DistributedDataParallel agree on gradient buckets, and check the gradients.

Public names are imported on first use: pytest loads this package in every run where it is installed
(`ddpopt.testing.plugin`), and importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpopt.ddp.impose import impose as impose
    from ddpopt.dynamo.api import compile as compile
    from ddpopt.dynamo.api import replacing_ddp_optimizer as replacing_ddp_optimizer
    from ddpopt.dynamo.backend import DdpoptBackend as DdpoptBackend
    from ddpopt.dynamo.capture import plan as plan
    from ddpopt.errors import DdpoptError as DdpoptError
    from ddpopt.explanation.explain import explain as explain
    from ddpopt.explanation.result import Explanation as Explanation
    from ddpopt.judge.trials.runner import verify as verify
    from ddpopt.judge.verdict import Verdict as Verdict
    from ddpopt.observation.observe import observe as observe
    from ddpopt.planning.plan import Plan as Plan
    from ddpopt.step.api import train_step as train_step
    from ddpopt.step.replicate import Replicate as Replicate
    from ddpopt.step.replicate import ShardOptimizer as ShardOptimizer
    from ddpopt.step.state import StatefulTransform as StatefulTransform

__version__ = "0.1.0"

_HOMES = {
    "DdpoptBackend": "dynamo.backend",
    "DdpoptError": "errors",
    "Explanation": "explanation.result",
    "Plan": "planning.plan",
    "Replicate": "step.replicate",
    "ShardOptimizer": "step.replicate",
    "StatefulTransform": "step.state",
    "Verdict": "judge.verdict",
    "compile": "dynamo.api",
    "explain": "explanation.explain",
    "impose": "ddp.impose",
    "observe": "observation.observe",
    "plan": "dynamo.capture",
    "replacing_ddp_optimizer": "dynamo.api",
    "train_step": "step.api",
    "verify": "judge.trials.runner",
}
__all__ = list(_HOMES)


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
