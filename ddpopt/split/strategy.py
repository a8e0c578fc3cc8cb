"""The strategy ``split``: the graph is cut where buckets end, and its segments are compiled one by one."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from ddpopt.errors import SegmentError
from ddpopt.graph.artifacts import say, show_cut
from ddpopt.planning.facts import collect
from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import certify
from ddpopt.split.expand_calls import Expanded, expanded_and_planned
from ddpopt.split.partition import partition
from ddpopt.split.segments import compile_segments
from ddpopt.strategies.protocol import Captured, Compilation, Decide, Planned, compile_whole
from ddpopt.strategies.quiet import isolated

logger = logging.getLogger("ddpopt")
SHOWN = 4
"""Parameters that a message names."""


class Split:
    """Compiled segments; see `ddpopt.split.partition` and `ddpopt.split.segments`."""

    stays_whole = False

    def why_not(self, captured: Captured) -> str | None:
        """None: any graph can be cut, or has no place for a cut and is compiled whole."""
        del captured
        return None

    def plan(self, captured: Captured, decide: Decide) -> Planned:
        """Plan a graph; calls in which buckets end are expanded, so that they can be cut."""

        def planned(form: fx.GraphModule) -> Expanded:
            facts = collect(form, captured.example_inputs, captured.specs)
            return Expanded(form, facts, decide(facts, False))

        undivided = Expanded(captured.gm, captured.facts, decide(captured.facts, False))
        gm, facts, plan = expanded_and_planned(undivided, planned)
        return Planned(replace(captured, gm=gm, facts=facts), plan, self)

    def compile(self, planned: Planned, how: Compilation) -> Callable[..., Any]:
        """Cut a graph, prove the cuts, and compile the segments; whole, if the plan has no cuts.

        Raises:
            CertificateError: the cut graph is not what the plan says, which is a fault of ddpopt's.
            SegmentError: the backend fails for a segment, and nothing may run uncompiled.
        """
        captured = planned.captured
        plan = planned.plan
        if not plan.cuts:
            is_single = len(plan.buckets) == 1
            why = "it has a single bucket" if is_single else "one segment completes all its buckets"
            return compile_whole(why, planned, how)
        with isolated():
            stitched = partition(captured.gm, plan)
            show_cut(stitched)
            certify(captured.gm, stitched, plan, self._held(planned))
        if planned.why_not is not None:
            say(f"a graph is split and not compiled inline: {planned.why_not}", how.level)
        reasons = [None, *(cut.reason for cut in plan.cuts)]
        run, distinct = compile_segments(
            stitched,
            captured.example_inputs,
            how.compiler,
            reasons,
            share=not captured.is_replayed,
            failed=partial(_failed, plan, falls_back=how.falls_back),
        )
        logger.info(
            "ddpopt: %d buckets, %d segments, %d of them distinct",
            len(plan.buckets),
            len(plan.segments),
            distinct,
        )
        return run

    def _held(self, planned: Planned) -> dict[Any, str]:
        """The parameters whose gradients this graph completes, as the graph holds them."""
        sources = planned.captured.facts.sources
        return {
            key: name
            for names in sources.values()
            for key, name in names.items()
            if name not in planned.completed
        }


def _failed(plan: Plan, number: int, error: Exception, *, falls_back: bool) -> None:
    """Warn that a segment runs uncompiled because the backend fails for it; or raise, if nothing may."""
    segment = plan.segments[number]
    held = ", ".join(segment.params[:SHOWN]) or "no parameters"
    more = f", and {left} more" if (left := len(segment.params) - SHOWN) > 0 else ""
    words = f"the backend fails for segment {number} of {len(plan.segments)} ({held}{more})"
    cause = getattr(error, "inner_exception", error)  # Inductor wraps what went wrong
    reason = f"{type(cause).__name__}: {cause}"
    if not falls_back:
        raise SegmentError(f"{words}: {reason}") from error
    say(f"{words}, which runs uncompiled: {reason}", logging.WARNING)
