"""ddpopt.planning: it plans from data alone, and touches neither DDP modules nor traces."""

import ast
from pathlib import Path

import pytest

import ddpopt
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.join import GraphPlan, join_plans
from ddpopt.planning.limits import MIB, BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_for_buckets, plan_graph, plan_whole

MODULES = sorted((Path(ddpopt.__file__).parent / "planning").glob("*.py"))
OF_DDP = {"reducer", "requires_grad_", "parameters_to_ignore", "_get_ddp_logging_data"}
"""Attributes of a DDP module or of its parameters that only `ddpopt.ddp` may use."""
TRACERS = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch.nn.parallel", "torch.distributed")

FACTS = GraphFacts(
    nodes=("embed", "first", "second", "head"),
    params=tuple(
        ParamUse(ParamSpec(f"{name}.weight", size * MIB, "float32", "cpu"), (place,))
        for place, (name, size) in enumerate({"embed": 6, "first": 2, "second": 2, "head": 6}.items())
    ),
    blocked=(None, None, "a span", None),
)
"""A graph that nobody traced: four readers, and one place between them where it cannot be cut."""


def summary(plan: Plan) -> list[tuple[tuple[str, ...], int]]:
    return [(bucket.params, bucket.segment) for bucket in plan.buckets]


def test_a_plan_is_made_from_names_sizes_and_places() -> None:
    plan = plan_graph(FACTS, BucketConfig.from_kwargs(bucket_cap_mb=4))
    assert [segment.nodes for segment in plan.segments] == [
        ("embed",),
        ("first", "second"),
        ("head",),
    ]
    assert summary(plan) == [
        (("head.weight",), 2),
        (("second.weight", "first.weight"), 1),
        (("embed.weight",), 0),
    ]


def test_a_graph_that_stays_whole_is_planned_from_the_same_facts() -> None:
    specs = [use.spec for use in FACTS.params]
    graph = GraphPlan(plan_whole(FACTS), ready=FACTS.ready)
    plan = join_plans([graph], specs, BucketConfig.from_kwargs(bucket_cap_mb=4))
    assert summary(plan) == [
        (("head.weight",), 0),
        (("second.weight", "first.weight"), 0),
        (("embed.weight",), 0),
    ]


def test_given_buckets_are_followed() -> None:
    names = [use.spec.name for use in FACTS.params]
    plan = plan_for_buckets(FACTS, [names[2:], names[:2]])
    assert [bucket.params for bucket in plan.buckets] == [
        ("second.weight", "head.weight"),
        ("embed.weight", "first.weight"),
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_planning_reads_no_ddp_module_and_traces_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    assert not OF_DDP & {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if path.stem != "limits":  # which reads the names of the constructor's arguments
        assert "DistributedDataParallel" not in {node.id for node in nodes if isinstance(node, ast.Name)}
        assert "parallel" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    assert not [name for name in imported if name.startswith(TRACERS)]
