"""What Dynamo must know of FSDP, so that an engine that compiles block by block is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.fx import GraphModule

from ddpopt.cases.matrix import BATCH, WIDTH, Plain
from ddpopt.errors import UnsupportedError
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.engines.sharded import FullyShardedDataParallel1, mesh_of

BLOCKS, STEPS = 2, 3


class Recorder:
    """A backend that keeps its graphs, and the tensors of each call."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, gm: GraphModule, _: object) -> Callable[..., Any]:
        self.graphs.append(gm)

        def run(*args: Any) -> Any:
            self.calls.append(args)
            return gm.forward(*args)

        return run


def train(engine: Engine, backend: Any) -> None:
    """Train a model of two blocks for some steps."""
    group: Any = dist.group.WORLD
    with engine.running():
        run = engine.prepared(Plain(), group, backend, {})
        for _ in range(STEPS):
            run.backward(run.call(torch.ones(BATCH, WIDTH)).square().mean())
            run.step(0.05)
            run.zero_grad()


def marked(module: nn.Module) -> set[str]:
    """The submodules that Dynamo takes for FSDP's."""
    return {name for name, each in module.named_modules() if getattr(each, "_is_fsdp_managed_module", False)}


@pytest.mark.world_size(2)
def test_what_fsdp_manages_is_marked_for_dynamo_and_what_it_ignores_is_not() -> None:
    group: Any = dist.group.WORLD
    first, second, third = Plain(), Plain(), Plain()
    managed = {name for name, _ in first.named_modules()} - {"layers.0"}
    ignored, cpu = [first.layers[0]], torch.device("cpu")
    FullyShardedDataParallel(first, use_orig_params=True, device_id=cpu, ignored_modules=ignored)
    replicate(second.layers[0], process_group=group)
    fully_shard(second, mesh=mesh_of(second, group))
    mode("replicate-fsdp").prepared(third, group, None, {})
    assert marked(first) == managed
    assert marked(second) == managed
    assert marked(third) == set()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["fsdp1", "fully_shard-blocks"])
def test_each_block_is_one_graph_that_takes_the_views_of_each_forward_and_keeps_none(name: str) -> None:
    recorder = Recorder()
    train(mode(name), recorder)
    assert [len(call) for call in recorder.calls] == [3] * BLOCKS * STEPS  # weight, bias and input
    parameters = [tensor for call in recorder.calls for tensor in call if tensor.size(0) == WIDTH]
    if name == "fsdp1":  # FSDP2 has a parameter of its own for each forward to fill
        assert len(set(map(id, parameters))) == 2 * BLOCKS * STEPS
        assert all(tensor._is_view() for tensor in parameters)
    for graph in recorder.graphs:
        assert not [node for node in graph.graph.nodes if node.op in ("get_attr", "call_module")]


@pytest.mark.world_size(2)
def test_fsdp1_without_the_original_parameters_is_refused_with_what_to_do() -> None:
    engine = FullyShardedDataParallel1("flat", use_orig_params=False)
    with pytest.raises(UnsupportedError, match="Dynamo does not trace it, and parameters have no gradients"):
        train(engine, "eager")
