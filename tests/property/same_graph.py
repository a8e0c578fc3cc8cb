"""The same graph in another guise: under other names, or in an order that means the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ddpopt.graph.nodes import body_nodes
from tests.graph_builder import SmallGraph, real_inputs
from tests.mutants import is_switch


def copied(
    graph: SmallGraph, order: list[fx.Node], names: Mapping[str, str], params: Mapping[str, str]
) -> SmallGraph:
    """The nodes of a graph in an order, under other names."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = names.get(node.name, node.name)
        target = name if node.op == "placeholder" else node.target
        copies[node] = made.create_node(node.op, target, args, kwargs, name=name)
        copies[node].meta = dict(node.meta)
    made.lint()
    held = {copies[n].name: params.get(p, p) for n, p in _parameters(graph).items()}
    return SmallGraph(fx.GraphModule(graph.gm, made), held, graph.example_values)


def _parameters(graph: SmallGraph) -> dict[fx.Node, str]:
    placeholders = graph.gm.graph.find_nodes(op="placeholder")
    return {n: graph.param_placeholders[n.name] for n in placeholders if n.name in graph.param_placeholders}


def renamed(graph: SmallGraph, random: Random) -> tuple[SmallGraph, dict[str, str], dict[str, str]]:
    """A graph under other names; those of its nodes and of its parameters, by the old ones."""
    order = list(graph.gm.graph.nodes)
    nodes = dict(zip((n.name for n in order), _numbered("v", len(order), random), strict=True))
    owned = list(graph.param_placeholders.values())
    params = dict(zip(owned, _numbered("p", len(owned), random), strict=True))
    return copied(graph, order, nodes, params), nodes, params


def _numbered(letter: str, count: int, random: Random) -> list[str]:
    return [f"{letter}{number}" for number in random.sample(range(10, 10 + 9 * count), count)]


def reordered(graph: SmallGraph, in_order: list[str], random: Random) -> SmallGraph:
    """A graph in another order that computes the same, its inputs too.

    What writes or draws, what touches a tensor that is written to, and what switches autograd or autocast
    stays in its order; the nodes between two switches stay between them.

    Args:
        graph: the graph.
        in_order: names of nodes that keep their order among each other.
        random: decides.
    """
    run = Watched(graph.gm, real_inputs(graph))
    body = body_nodes(graph.gm.graph)
    waits = {node: [source for source in node.all_input_nodes if source in body] for node in body}
    for fixed in ([n for n in body if n.name in in_order], [n for n in body if _has_effect(run, n)]):
        for earlier, later in itertools.pairwise(fixed):
            waits[later].append(earlier)
    for place, node in enumerate(body):
        if is_switch(node):
            waits[node] += body[:place]
            for later in body[place + 1 :]:
                waits[later].append(node)
    done: dict[fx.Node, None] = {}
    while len(done) < len(body):
        ready = [n for n in body if n not in done and all(source in done for source in waits[n])]
        done[random.choice(ready)] = None
    values = dict(zip(graph.gm.graph.find_nodes(op="placeholder"), graph.example_values, strict=True))
    inputs = random.sample(list(values), len(values))
    held = [node for node in graph.gm.graph.nodes if node.op == "get_attr"]
    again = copied(graph, [*inputs, *held, *done, graph.gm.graph.output_node()], {}, {})
    # what DDP calls the first, second, … parameter is not a matter of the graph
    return again._replace(example_values=tuple(values[node] for node in inputs))


class Watched(fx.Interpreter):
    """A run of a graph, with what each node made, and the storages that were ever written to.

    A node writes where a tensor's version counter moves: nothing is read off names or schemas.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[object]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.written: set[int] = set()
        self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        given = tensors([self.env[node] for node in n.all_input_nodes])
        versions = [tensor._version for tensor in given]
        made = super().run_node(n)
        self.written |= {
            storage(tensor)
            for tensor, version in zip(given, versions, strict=True)
            if tensor._version != version
        }
        return made


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_effect(run: Watched, node: fx.Node) -> bool:
    touched = [run.env[each] for each in (node, *node.all_input_nodes)]
    storages = {storage(tensor) for tensor in tensors(touched)}
    return bool(storages & run.written) or "dropout" in node.name
