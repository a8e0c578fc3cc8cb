"""Faults in the partition: the stitched module is another program than the graph it was cut from."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import fx

from ddpopt.graph.nodes import write_code
from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import certify
from ddpopt.split import strategy
from ddpopt.split.partition import partition
from tests.selftest.sites import Inject, Site, first
from tests.support.mutants import Edits, calls, is_crossing, recompile


def cutting(edits: Edits | None, *, certified: bool = True) -> Inject:
    """Do the first of such edits of what partition made, or none, and perhaps have nobody prove it.

    The fault has run once the certificate was asked of the edited module; uncertified, once that module ran.
    """

    @contextlib.contextmanager
    def inject(site: Site) -> Iterator[None]:
        edited: list[fx.GraphModule] = []

        def changed(gm: fx.GraphModule, plan: Plan, *more: Any) -> fx.GraphModule:
            stitched = partition(gm, plan, *more)
            if stitched is not gm:
                if edits:
                    first(edits(stitched), "something to edit")()
                recompile(stitched)
                edited.append(stitched)
                if not certified:
                    _mark_when_run(stitched, site)
            return stitched

        def proved(gm: fx.GraphModule, stitched: fx.GraphModule, *more: Any) -> None:
            if certified:
                if stitched in edited:
                    site.mark()
                certify(gm, stitched, *more)

        with patch.object(strategy, "partition", changed), patch.object(strategy, "certify", proved):
            yield

    return inject


def _mark_when_run(stitched: fx.GraphModule, site: Site) -> None:
    write_code(stitched)
    forward = stitched.forward

    def marking(*inputs: Any) -> Any:
        site.mark()
        return forward(*inputs)

    stitched.forward = marking  # of this module alone


def writes(node: fx.Node) -> bool:
    """Whether a step changes an activation in place."""
    return node.target == "mul_"


def crosses(call: fx.Node, source: fx.Node) -> bool:
    """Whether the second segment receives a value of the first."""
    return is_crossing(source) and call is calls(call.graph)[1]


def is_input_of_the_first(call: fx.Node, source: fx.Node, other: fx.Node) -> bool:
    """Whether a value that crosses the first cut would be replaced by an input of the first segment."""
    return crosses(call, source) and other.op == "placeholder" and "weight" not in other.name


def is_last_of_several(call: fx.Node, source: fx.Node) -> bool:
    """Whether the last segment receives a parameter that another one also has."""
    return not is_crossing(source) and len(source.users) > 1 and call is calls(call.graph)[-1]
