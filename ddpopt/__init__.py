"""torch.compile and DistributedDataParallel agree on gradient buckets, and it is proved that they do."""

from ddpopt.backend import compile, replacing_ddp_optimizer
from ddpopt.capture import plan
from ddpopt.errors import DdpoptError
from ddpopt.explain import explain
from ddpopt.explanation import Explanation
from ddpopt.impose import impose
from ddpopt.observe import observe
from ddpopt.plan import Plan

__all__ = [
    "DdpoptError",
    "Explanation",
    "Plan",
    "compile",
    "explain",
    "impose",
    "observe",
    "plan",
    "replacing_ddp_optimizer",
]
__version__ = "0.1.0"
