"""What the properties of drawn graphs ask of one: its facts, its plans, and what a cut of it must keep."""

import torch
from hypothesis import strategies as st
from torch import fx

from ddpopt.planning.facts import GraphFacts, collect
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from tests.support.effects import Effects
from tests.support.graph_builder import SmallGraph, real_inputs
from tests.support.tracing import cut_before, parameter_names


def small_configs() -> st.SearchStrategy[BucketConfig]:
    """Limits around the 16 to 128 bytes of a drawn graph's parameters."""
    sizes = st.sampled_from((1, 16, 17, 64, 80, 100, 128, 200, 10_000))
    lists = st.lists(sizes, max_size=3).map(tuple)
    return st.builds(BucketConfig, cap_bytes=sizes, first_bucket_bytes=sizes, cap_bytes_list=lists)


def facts_of(graph: SmallGraph) -> GraphFacts:
    return collect(graph.gm, graph.example_values, graph.specs())


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


def assert_recomposes(graph: SmallGraph, plan: Plan) -> None:
    """Cut as planned, and require the same program of it."""
    assert_same_program(graph, plan, partition(graph.gm, plan))


def assert_same_program(graph: SmallGraph, plan: Plan, stitched: fx.GraphModule) -> None:
    """Prove a cut, run both, and require that the cut hands on what is needed alone."""
    for module in stitched.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
    prove(graph, stitched, plan)
    inputs = list(real_inputs(graph))
    Effects(stitched, inputs).assert_equal(Effects(graph.gm, inputs))
    assert_nothing_is_handed_on_in_vain(stitched)


def assert_nothing_is_handed_on_in_vain(stitched: fx.GraphModule) -> None:
    """A segment reads each tensor that it is given; what it returns is read by another one, or returned."""
    for call in stitched.graph.find_nodes(op="call_module"):
        segment = getattr(stitched, str(call.target)).graph
        given = [n for n in segment.find_nodes(op="placeholder") if is_tensor(n)]
        assert all(node.users for node in given)
        handed_on = len(segment.output_node().args[0])
        items = {user.args[1] for user in call.users if user.users}
        assert items == set(range(handed_on))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
