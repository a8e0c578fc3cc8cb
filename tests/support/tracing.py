"""Helpers of the unit tests: what Dynamo makes of a module, and a backend that notes what it compiles."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ddpopt.ddp.specs import specs_from_module
from ddpopt.graph.nodes import body_nodes
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import GraphFacts, collect, parameter_sources
from ddpopt.planning.plan import Cut, Plan, Segment

Specs = Mapping[int, ParamSpec]


@dataclass
class Recorder:
    """A Dynamo backend that compiles nothing and notes every graph."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.inputs.append(list(example_inputs))
        return gm.forward

    @property
    def calls(self) -> int:
        return len(self.graphs)


@dataclass(frozen=True)
class Traced:
    """One graph of a module, with the values that it was traced on."""

    model: nn.Module
    gm: fx.GraphModule
    inputs: list[Any]

    @property
    def specs(self) -> dict[int, ParamSpec]:
        by_name = dict(self.model.named_parameters())
        return {id(by_name[spec.name]): spec for spec in specs_from_module(self.model)}

    @property
    def facts(self) -> GraphFacts:
        return collect(self.gm, self.inputs, self.specs)

    def readers(self) -> dict[str, str]:
        """Which nodes read which parameter, by name."""
        facts = self.facts
        return {use.spec.name: " ".join(facts.nodes[i] for i in use.readers) for use in facts.params}


def parameter_names(gm: fx.GraphModule, inputs: Sequence[Any], specs: Specs) -> dict[str, str]:
    """The parameters that the graph reads, by what the graph calls them."""
    sources = parameter_sources(gm, inputs, specs)
    return {label: name for names in sources.values() for label, name in names.items()}


def trace_all(model: nn.Module, *inputs: Any, **options: Any) -> list[Traced]:
    """All graphs of one forward of `model`, compiled as under ``torch.compile(model, **options)``."""
    torch._dynamo.reset()
    recorder = Recorder()
    torch.compile(model, backend=recorder, **options)(*inputs)
    pairs = zip(recorder.graphs, recorder.inputs, strict=True)
    return [Traced(model, gm, given) for gm, given in pairs]


def trace(model: nn.Module, *inputs: Any, **options: Any) -> Traced:
    """The only graph of a forward of `model`."""
    (traced,) = trace_all(model, *inputs, **options)
    return traced


def written(gm: fx.GraphModule) -> list[str]:
    """What a graph calls, in order, and returns, each with the nodes that it reads."""
    nodes = (node for node in gm.graph.nodes if node.op.startswith("call") or node.op == "output")
    return [f"{node.name}({', '.join(map(str, node.all_input_nodes))})" for node in nodes]


def cut_before(gm: fx.GraphModule, *first_nodes: str) -> Plan:
    """A plan that cuts `gm` before the named nodes and plans no bucket."""
    names = [node.name for node in body_nodes(gm.graph)]
    edges = [0, *(names.index(node) for node in first_nodes), len(names)]
    pairs = enumerate(itertools.pairwise(edges))
    segments = [Segment(index, 0, tuple(names[first:last]), (), ()) for index, (first, last) in pairs]
    return Plan((), tuple(segments), tuple(Cut(0, node, "asked for") for node in first_nodes))
