"""Independent proof that a stitched module is the program it was cut from, and keeps the plan's promises.

The proof is a table of named invariants. Each one checks the evidence, which is read from both graphs once,
and yields a sentence for each violation; all violations are collected and raised together.

Invariant: shares no code with planning and cutting, except the data classes of `ddpopt.planning.plan` and
what `ddpopt.graph` says about a single node; takes time linear in nodes.
"""

import json
from collections.abc import Mapping

from torch import fx

from ddpopt.errors import CertificateError
from ddpopt.graph.artifacts import show
from ddpopt.planning.plan import Plan
from ddpopt.proof import memory, program, promises
from ddpopt.proof.evidence import Invariant, gather

INVARIANTS: tuple[Invariant, ...] = (
    Invariant("inputs", program.inputs_are_kept),
    Invariant("nodes", program.nodes_run_once),
    Invariant("nothing added", program.nothing_is_added),
    Invariant("order", program.order_is_kept),
    Invariant("definitions", program.values_are_defined),
    Invariant("outputs", program.outputs_are_equal),
    Invariant("calls", program.steps_are_equal),
    Invariant("metadata", program.metadata_is_kept),
    Invariant("state", program.states_are_equal),
    Invariant("balance", program.segments_are_balanced),
    Invariant("writes", memory.writes_follow_reads_in_one_segment),
    Invariant("aliases", memory.writers_know_one_name),
    Invariant("descriptions", memory.values_cross_as_they_are_described),
    Invariant("detached values", memory.detached_values_get_no_gradient),
    Invariant("views without gradient", memory.views_without_gradient_stay),
    Invariant("gradients", memory.values_that_cross_get_their_gradient),
    Invariant("own gradients", memory.gradients_of_their_own_stay),
    Invariant("symbols", program.symbols_are_bound),
    Invariant("planned nodes", promises.segments_hold_the_planned_nodes),
    Invariant("planned cuts", promises.cuts_open_segments),
    Invariant("one bucket", promises.params_are_in_one_bucket),
    Invariant("bucket segment", promises.buckets_complete_as_planned),
    Invariant("bucket order", promises.buckets_follow_backward),
    Invariant("segment contents", promises.segments_list_what_they_complete),
)
"""All invariants of a stitched module; the docstring of each check states its invariant in one sentence."""


def certify(original: fx.GraphModule, stitched: fx.GraphModule, plan: Plan, names: Mapping[str, str]) -> None:
    """Prove that `stitched` is the program of `original`, and that it keeps the promises of `plan`.

    Args:
        original: the graph as Dynamo gave it, with example values on its nodes.
        stitched: a module that calls one submodule per segment; or `original` itself if there is no cut.
        plan: the plan that was carried out.
        names: for each node of `original` that brings in a trainable parameter (a placeholder or attribute),
            the parameter's name; for a module call the key is ``"<node name>.<name in the module>"``.

    Raises:
        CertificateError: with a sentence for each violation, in the order of `INVARIANTS`.
    """
    evidence = gather(original, stitched, plan, names)
    found = [f"{name}: {sentence}" for name, check in INVARIANTS for sentence in check(evidence)]
    violations = tuple(dict.fromkeys(found))
    verdict = {"invariants": [*dict(INVARIANTS)], "violations": violations}
    show("ddpopt_proof", lambda: json.dumps(verdict, indent=2), "json")
    if violations:
        raise CertificateError(violations)
