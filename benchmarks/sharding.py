"""What does a rank hold, and how long is a step, if ranks divide it? ``python -m benchmarks.sharding``.

Two ranks of one thread each train a model with AdamW over an emulated link (`benchmarks.network`):

- ``ddp``: ``torch.compile`` around DDP, ``ddpopt.compile``;
- ``zero``: the same with ``ZeroRedundancyOptimizer``;
- ``fsdp2``: ``fully_shard`` around each layer, compiled layer by layer;
- ``replicate``: ``ddpopt.train_step`` of a plain module, with ``ddpopt.Replicate()``;
- ``shard``: the same with ``ddpopt.ShardOptimizer()``.

All take turns in one run. A rank *holds*, between two steps: parameters, the optimizer's state, gradients,
and DDP's buckets. The figures are those of the rank that holds more, and of the slower rank.

Exit code 1 if ``shard`` holds more than 0.55 of the optimizer's state of ``replicate``, or takes longer than
``zero``; 3 if a rank fails.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ddpopt
from benchmarks import report
from benchmarks.devices import CPU, device_of, elapsed_together, group_backend, larger_of_both
from benchmarks.network import two_hosts
from benchmarks.step import on_hosts
from benchmarks.step_workloads import MIB, WORKLOADS
from ddpopt.errors import DdpoptError
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.ranks.group import Ranks

DDP, ZERO, FSDP2, REPLICATE, SHARD = MODES = ("ddp", "zero", "fsdp2", "replicate", "shard")
RATE = 1e-4
PARTS = ("parameters", "optimizer", "gradients", "buckets")
STEPS_TO_COMPILE = 3


class Training:
    """A model in one mode, with its optimizer."""

    def __init__(self, mode: str, model: nn.Module, backend: str) -> None:
        self.model = model
        self.ddp: Any = None
        if mode == FSDP2:
            for layer in list(getattr(model, "layers", model.children())):
                fully_shard(layer)
                layer.compile(backend=backend)
            fully_shard(model)
        call: Callable[..., Any] = model
        if mode in (DDP, ZERO):
            self.ddp = DistributedDataParallel(model)
            call = ddpopt.compile(self.ddp, backend=backend)
        self.optimizer: Any = (
            ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=RATE)
            if mode == ZERO
            else AdamW(model.parameters(), RATE)
        )

        def step(inputs: Tensor) -> None:
            call(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        parallel = {REPLICATE: ddpopt.Replicate, SHARD: ddpopt.ShardOptimizer}.get(mode)
        self.step: Callable[[Tensor], object] = step
        if parallel is not None:
            optimizer = self.optimizer

            def plain(inputs: Tensor) -> None:
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            self.step = ddpopt.train_step(plain, backend=backend, parallel=parallel())

    def held(self) -> dict[str, int]:
        """The bytes of each of `PARTS` on this rank."""
        parameters = [*self.model.parameters()]
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # ZeRO's own is the one of this rank
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [each.grad for each in parameters if each.grad is not None]
        buckets = () if self.ddp is None else running_buckets(self.ddp)
        found = [_bytes_of(tensors) for tensors in (parameters, states, gradients)]
        return dict(zip(PARTS, [*found, sum(bucket.nbytes for bucket in buckets)], strict=True))


def _bytes_of(tensors: Sequence[Any]) -> int:
    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in own if isinstance(each, Tensor))


@dataclass(frozen=True)
class Cost:
    """What a mode costs.

    Attributes:
        held: bytes of each of `PARTS`.
        steps_s: the steps, in seconds.
    """

    held: Mapping[str, int]
    steps_s: Sequence[float]


def measure(ranks: Ranks, name: str, backend: str, rounds: int) -> dict[str, Cost]:
    """Train one of the workloads in each mode; a task for both ranks."""
    torch.set_num_threads(1)
    device = device_of(CPU, ranks.rank)
    workload = WORKLOADS[name]
    inputs = workload.inputs()
    modes = {}
    for mode in MODES:
        torch.manual_seed(0)
        modes[mode] = Training(mode, workload.build(), backend)
        for _ in range(STEPS_TO_COMPILE):
            modes[mode].step(inputs)
        ranks.emit(f"{name}: {mode} compiled")
    steps: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in (*MODES[number % len(MODES) :], *MODES[: number % len(MODES)]):
            modes[mode].step(inputs)  # the mode before left another model in the processor's caches
            steps[mode] += [elapsed_together(partial(modes[mode].step, inputs), device) for _ in range(2)]
    costs = {}
    for mode, training in modes.items():
        held = training.held()
        most = larger_of_both([float(held[part]) for part in PARTS], device)
        costs[mode] = Cost(dict(zip(PARTS, map(int, most), strict=True)), larger_of_both(steps[mode], device))
    return costs


def grid(name: str, costs: Mapping[str, Cost]) -> report.Grid:
    """A table with a row for each mode."""
    rows = tuple(
        (
            mode,
            *(f"{cost.held[part] / MIB:.1f}" for part in PARTS),
            f"{sum(cost.held.values()) / MIB:.1f}",
            f"{min(cost.steps_s) * 1000:.0f}",
        )
        for mode, cost in costs.items()
    )
    return report.Grid(f"{name}: MiB of a rank, and its fastest step", ("", *PARTS, "all", "ms"), rows)


def claims(name: str, costs: Mapping[str, Cost]) -> tuple[report.Claim, ...]:
    """What is asked of `shard`."""
    share = costs[SHARD].held["optimizer"] / costs[REPLICATE].held["optimizer"]
    fastest = {mode: min(cost.steps_s) for mode, cost in costs.items()}
    return (
        report.at_most(name, "shard to replicate, optimizer's state", share, 0.55),
        report.at_most(name, "shard to zero, step", fastest[SHARD] / fastest[ZERO], 1.0),
        report.at_most(name, "replicate to ddp, step", fastest[REPLICATE] / fastest[DDP], 1.02),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store."""
    parser = report.parser_of("benchmarks.sharding", __doc__)
    parser.add_argument("--models", type=partial(report.some_of, tuple(WORKLOADS)), default="linears,gpt")
    parser.add_argument("--backend", default="inductor", help="Dynamo backend (inductor)")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, as tc writes it (1gbit)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds (6)")
    asked = parser.parse_args(arguments)
    console = report.wide_console()
    facts = {**report.conditions("benchmarks.sharding"), "threads": "1 per rank, 2 ranks", "rate": asked.rate}
    report.state(console, facts)
    found: dict[str, dict[str, Cost]] = {}
    try:
        with two_hosts(asked.rate) as network:
            for name in asked.models:
                task = (measure, name, asked.backend, asked.rounds)
                found[name] = on_hosts(network, group_backend(CPU), console.print, *task)
                report.show_grid(console, grid(name, found[name]))
    except DdpoptError as error:
        console.print(str(error), style="red", markup=False)
        return error.exit_code
    grids = tuple(grid(name, costs) for name, costs in found.items())
    asks = tuple(claim for name, costs in found.items() for claim in claims(name, costs))
    section = report.Section("sharding", facts, asks, grids)
    timings = {
        f"{name}, {mode}": [cost.steps_s] for name, costs in found.items() for mode, cost in costs.items()
    }
    return report.finish(console, section, asked, None, timings)


if __name__ == "__main__":
    sys.exit(main())
