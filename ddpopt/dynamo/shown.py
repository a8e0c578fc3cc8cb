"""What ``TORCH_LOGS`` shows of a planned graph: all with ``ddp_graphs``, lines with the names of ``LOGGERS``.

Invariant: a text is made only if it is shown.
"""

import logging

from ddpopt.graph.artifacts import code_of, log_text, show
from ddpopt.planning.plan import Plan
from ddpopt.strategies.protocol import Planned
from ddpopt.terminal.tables import Column, names, numbers, table

LOGGERS = [logging.getLogger(f"torch.{name}.ddpopt") for name in ("_dynamo", "distributed")]
"""Children of those that ``TORCH_LOGS=dynamo`` and ``TORCH_LOGS=distributed`` turn on."""


def show_planned(planned: Planned) -> None:
    """Show a graph, and the buckets in which its gradients are reduced."""
    plan = planned.plan
    log_text("ddpopt_original_graph", code_of(planned.captured.gm))
    log_text("ddpopt_buckets", lambda: table_of(plan))
    show("ddpopt_plan", plan.to_json, "json")
    is_whole = planned.inline or not plan.cuts
    how = "stays whole" if is_whole else f"is cut into {len(plan.segments)} segments"
    for logger in LOGGERS:
        if logger.isEnabledFor(logging.INFO):
            count = len(plan.buckets)
            logger.info("ddpopt: a graph with %d bucket%s %s", count, "s" * (count != 1), how)
            for bucket in plan.buckets:
                held = names(bucket.params)
                line = "ddpopt: bucket %d: %d bytes of %s: %s; %s"
                logger.info(line, bucket.index, bucket.nbytes, bucket.dtype, held, bucket.reason)


def table_of(plan: Plan) -> str:
    """The buckets of a plan, with the reason why each ends where it does."""
    rows = [(each.index, each.nbytes, names(each.params), each.reason) for each in plan.buckets]
    return table([*numbers("bucket", "bytes"), Column("parameters"), Column("why it ends there")], rows)
