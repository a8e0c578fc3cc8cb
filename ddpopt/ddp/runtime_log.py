"""DDP's own log of an iteration: the calls that fill it, and what it says.

DDP fills its log for the first ten iterations, and then for every hundredth. Which functions of the logger it
calls, and when, also says what begins; `ddpopt.ddp.reducer.WatchedLogger` sees that.

Uses private names of torch: ``_set_ddp_runtime_logging_sample_rate`` and ``_get_ddp_logging_data``.
"""

from collections.abc import Mapping
from typing import Any

FORWARD_BEGINS = "set_runtime_stats_and_log"
"""DDP calls this function of its logger before each forward that will be synchronized."""
JOIN_BEGINS = "_set_uneven_input_join"
"""DDP calls this one on entering ``join()``."""
HOOK_REGISTERED = "_set_comm_hook_name"
"""DDP calls this one before a communication hook is registered."""

EVERY_ITERATION = 1
DEFAULT_SAMPLE_RATE = 100
"""torch's ``kDDPRuntimeLoggingSampleRate``, in torch/csrc/distributed/c10d/reducer.hpp."""


def log_every_iteration(ddp: Any) -> None:
    """Let the module's reducer record the times of each iteration from now on."""
    ddp.reducer._set_ddp_runtime_logging_sample_rate(EVERY_ITERATION)


def log_of_this_iteration(ddp: Any) -> Mapping[str, Any]:
    """What DDP's log says now; afterwards iterations are logged as often as by default.

    Args:
        ddp: the DDP module. Its reducer recorded the times of its last forward and backward only if
            `log_every_iteration` was called before, or if the iteration was one of its first ten.

    Returns:
        The log, as ``ddp._get_ddp_logging_data()`` gives it.
    """
    log_every_iteration(ddp)
    ddp.logger.set_runtime_stats_and_log()
    ddp.reducer._set_ddp_runtime_logging_sample_rate(DEFAULT_SAMPLE_RATE)
    log: Mapping[str, Any] = ddp._get_ddp_logging_data()
    return log
