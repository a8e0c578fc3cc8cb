"""What the properties of drawn graphs ask of one: its facts, its plans, and what a cut of it must keep."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from torch import fx

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import GraphFacts, ParamUse, collect
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.graph_builder import SmallGraph, real_inputs
from tests.unit.effects import Effects
from tests.unit.tracing import cut_before, parameter_names

Gradient = tuple[int, str, bool]
"""Its bytes, its dtype, and whether it is sparse."""


def small_configs() -> st.SearchStrategy[BucketConfig]:
    """Limits around the 16 to 128 bytes of a drawn graph's parameters."""
    sizes = st.sampled_from((1, 16, 17, 64, 80, 100, 128, 200, 10_000))
    lists = st.lists(sizes, max_size=3).map(tuple)
    return st.builds(BucketConfig, cap_bytes=sizes, first_bucket_bytes=sizes, cap_bytes_list=lists)


def facts_of(graph: SmallGraph) -> GraphFacts:
    return collect(graph.gm, graph.example_values, graph.specs())


def interleaved_gradients() -> st.SearchStrategy[list[list[Gradient]]]:
    """Gradients of up to three dtypes that take turns, in groups that complete together; few are sparse."""
    dtypes = st.sampled_from(("bfloat16", "float16", "float32"))
    gradient = st.tuples(st.integers(0, 9), dtypes, st.sampled_from((*[False] * 15, True)))
    return st.lists(st.lists(gradient, min_size=1, max_size=3), min_size=2, max_size=8)


def facts_of_gradients(groups: Sequence[Sequence[Gradient]]) -> GraphFacts:
    """A graph with a node for each group of gradients, which complete in the order of the groups."""
    uses = [
        ParamUse(spec, (len(groups) - 1 - place,))
        for place, group in enumerate(groups)
        for spec in specs_of_gradients(group, f"{place}.")
    ]
    nodes = tuple(f"node_{place}" for place in range(len(groups)))
    return GraphFacts(nodes, tuple(uses), (None,) * len(groups))


def specs_of_gradients(gradients: Sequence[Gradient], prefix: str) -> list[ParamSpec]:
    return [
        ParamSpec(f"{prefix}{index}", nbytes, dtype, "cpu", sparse)
        for index, (nbytes, dtype, sparse) in enumerate(gradients)
    ]


def possible_cuts(graph: SmallGraph) -> list[str]:
    """Names of the nodes in front of which a cut may lie."""
    facts = facts_of(graph)
    return [name for name, why in zip(facts.nodes[1:], facts.blocked[1:], strict=True) if why is None]


def cut_wherever_it_can_be(graph: SmallGraph) -> Plan:
    return cut_before(graph.gm, *possible_cuts(graph))


def prove(graph: SmallGraph, stitched: fx.GraphModule, plan: Plan) -> None:
    """Certify a cut; a plan without buckets promises nothing of parameters."""
    specs = graph.specs() if plan.buckets else {}
    certify(graph.gm, stitched, plan, parameter_names(graph.gm, graph.example_values, specs))


def assert_recomposes(graph: SmallGraph, plan: Plan) -> fx.GraphModule:
    """Cut as planned, prove it, and run both; the stitched module."""
    stitched = partition(graph.gm, plan)
    for module in stitched.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
    prove(graph, stitched, plan)
    inputs = list(real_inputs(graph))
    Effects(stitched, inputs).assert_equal(Effects(graph.gm, inputs))
    return stitched
