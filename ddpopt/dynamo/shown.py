"""What ``TORCH_LOGS`` shows of a planned graph: all with ``ddp_graphs``, lines with the names of ``LOGGERS``.

Invariant: a text is made only if it is shown.
"""

import logging

from torch import fx

from ddpopt.graph.artifacts import code_of, log_text
from ddpopt.planning.plan import Plan
from ddpopt.terminal.tables import Column, names, numbers, table

LOGGERS = [logging.getLogger(f"torch.{name}.ddpopt") for name in ("_dynamo", "distributed")]
"""Children of those that ``TORCH_LOGS=dynamo`` and ``TORCH_LOGS=distributed`` turn on."""


def show_buckets(plan: Plan, gm: fx.GraphModule, title: str, how: str) -> None:
    """Show a graph, and the buckets in which its gradients are reduced.

    Args:
        plan: the buckets.
        gm: the graph.
        title: of the graph, in the log.
        how: what is done with it, in words.
    """
    log_text(title, code_of(gm))
    log_text("ddpopt_buckets", lambda: _table_of(plan))
    for logger in LOGGERS:
        if logger.isEnabledFor(logging.INFO):
            _log_lines(logger, plan, how)


def _log_lines(logger: logging.Logger, plan: Plan, how: str) -> None:
    """Log a line for a graph, and one for each bucket."""
    count = len(plan.buckets)
    logger.info("ddpopt: a graph with %d bucket%s %s", count, "" if count == 1 else "s", how)
    for bucket in plan.buckets:
        held = names(bucket.params)
        line = "ddpopt: bucket %d: %d bytes of %s: %s; %s"
        logger.info(line, bucket.index, bucket.nbytes, bucket.dtype, held, bucket.reason)


def _table_of(plan: Plan) -> str:
    """The buckets of a plan, with the reason why each ends where it does."""
    rows = [(each.index, each.nbytes, names(each.params), each.reason) for each in plan.buckets]
    return table([*numbers("bucket", "bytes"), Column("parameters"), Column("why it ends there")], rows)
