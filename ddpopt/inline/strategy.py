"""The strategy ``inline``: one graph, whose backward hands its gradients to DDP as they complete."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpopt.inline.compile import compile_inline, lendable, together
from ddpopt.inline.inductor import in_order
from ddpopt.inline.order_in_calls import ordered_within_calls
from ddpopt.inline.why_not import why_not_inline
from ddpopt.strategies.protocol import Captured, Compilation, Decide, Planned, compile_whole

logger = logging.getLogger("ddpopt")


class Inline:
    """One compiled graph; see `ddpopt.inline.compile`."""

    stays_whole = True

    def why_not(self, captured: Captured) -> str | None:
        """Why a graph cannot be compiled inline, for the user; None if it can be."""
        if captured.is_replayed:
            return "CUDA graphs replay a backward without Python"
        return why_not_inline(captured.gm, captured.facts.sources)

    def plan(self, captured: Captured, decide: Decide) -> Planned:
        """Plan a graph; within a composite call, its gradients leave in the order of the call's parts."""
        first = decide(captured.facts, True)
        facts = ordered_within_calls(captured.gm, captured.facts, first)
        return Planned(replace(captured, facts=facts), decide(facts, True), self)

    def compile(self, planned: Planned, how: Compilation) -> Callable[..., Any]:
        """Compile a graph that hands its gradients over; whole, if that would send nothing earlier."""
        captured = planned.captured
        plan = planned.plan
        settled = planned.settled and not how.any_buckets
        is_last_of_model = settled and not captured.ends_in_break and not planned.completed
        if len(plan.buckets) == 1 and is_last_of_model:
            return compile_whole("it has a single bucket", planned, how)
        facts = captured.facts
        completed = {name for segment in plan.segments for name in segment.params}
        lent = [
            node
            for node in lendable(captured.gm, facts)
            if completed.issuperset(facts.sources[node].values())
        ]
        groups = together(lent, facts, plan.buckets) if settled else [[node] for node in lent]
        logger.info("ddpopt: %d buckets, one graph", len(plan.buckets))
        compiler = in_order(how.compiler, how.backend)
        return compile_inline(captured.gm, captured.example_inputs, groups, facts.late, compiler)
