"""Train a small GPT on two ranks, with eager DDP and with ddpopt side by side, and compare the two.

    make demo
    python -m examples.train_gpt --backend aot_eager --steps 5
    torchrun --nproc-per-node 3 -m examples.train_gpt

Each rank holds two copies of one model under DDP: one runs eagerly, one through `ddpopt.compile`. The first
iterations compare the gradients of both from equal weights; then both train on their own. The text that they
learn is this file. Exits with 1 if gradients or buckets disagree.
"""

import argparse
import logging
import os
import shutil
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.testing.corpus.decoders import GPT
from examples.judging import Check, exact_gradients, follows_plan, must_be_bitwise, worst_gradient
from examples.showing import Display

BATCH, LENGTH = 4, 128
CHECKED = 3
"""Iterations to compare: DDP's first, the one before which it rebuilds its buckets, and one like the rest."""


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    backend: str
    steps: int
    ranks: int
    cap_mb: float


@dataclass(frozen=True)
class Race:
    """One copy of the model after training: its last loss, and how fast it got there."""

    loss: float
    steps_per_second: float


@dataclass(frozen=True)
class Outcome:
    """What one rank found."""

    plan: ddpopt.Plan
    compilations: int
    checks: list[Check]
    eager: Race
    ours: Race


def build_model() -> nn.Module:
    """Make the model, with equal weights at every call: 4.8 million parameters, the head tied."""
    torch.manual_seed(0)
    return GPT(vocabulary=256, length=LENGTH, dim=256, heads=8, layers=6)


def draw_batch(text: Tensor, step: int) -> Tensor:
    """Draw windows ``(BATCH, LENGTH + 1)`` of the text, others on each rank and at each step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def backward(model: Callable[[Tensor], Tensor], batch: Tensor) -> float:
    """Run forward and backward; the loss is the mean cross entropy of each next byte."""
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.autograd.backward(loss)
    return loss.item()


class Demo:
    """The two copies of the model on one rank, and what is done with both."""

    def __init__(self, settings: Settings, display: Display) -> None:
        self.settings, self.display = settings, display
        self.eager = DistributedDataParallel(build_model(), bucket_cap_mb=settings.cap_mb)
        self.ours = DistributedDataParallel(build_model(), bucket_cap_mb=settings.cap_mb)
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.compilations = 0

    def run(self) -> Outcome:
        """Plan, compile, compare and train."""
        phase, backend = self.display.phase, self.settings.backend
        with phase("plan the buckets"):
            plan = ddpopt.plan(self.ours, draw_batch(self.text, 0)[:, :-1])
        with phase(f"cut the graph, compile its segments with {backend}", len(plan.segments)) as advance:
            compiled = ddpopt.compile(self.ours, backend=self.counting_backend(advance))
            checks = [self.check(compiled, plan, 0)]  # a graph is captured when it first runs
        with phase("compare gradients and buckets", CHECKED - 1) as advance:
            for step in range(1, CHECKED):
                checks.append(self.check(compiled, plan, step))
                advance()
        eager = self.train("eager DDP", self.eager, self.eager)
        ours = self.train("ddpopt", self.ours, compiled)
        return Outcome(plan, self.compilations, checks, eager, ours)

    def counting_backend(self, advance: Callable[[], None]) -> Callable[..., Any]:
        """Make a backend that compiles with the chosen one, and counts."""
        compiler = lookup_backend(self.settings.backend)

        def compile_segment(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
            compiled = compiler(gm, example_inputs)
            self.compilations += 1
            advance()
            return compiled

        return compile_segment

    def check(self, compiled: Callable[[Tensor], Tensor], plan: ddpopt.Plan, step: int) -> Check:
        """Run one iteration of both copies from equal weights, and compare."""
        batch = draw_batch(self.text, step)
        self.eager.zero_grad()
        backward(self.eager, batch)
        self.ours.zero_grad()
        with ddpopt.observe(self.ours) as seen:
            backward(compiled, batch)
        exact = exact_gradients(self.eager.module, lambda model: backward(model, batch))
        difference, error = worst_gradient(self.ours.module, self.eager.module, exact)
        return Check(difference, error, follows_plan(seen, plan)).worst_over_ranks()

    def train(self, name: str, ddp: nn.Module, model: Callable[[Tensor], Tensor]) -> Race:
        """Train one copy."""
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        steps, loss = self.settings.steps, float("nan")
        with self.display.phase(f"train with {name}", steps) as advance:
            started = time.perf_counter()
            for step in range(steps):
                optimizer.zero_grad()
                loss = backward(model, draw_batch(self.text, step))
                optimizer.step()
                advance()
            seconds = time.perf_counter() - started
        return Race(loss, steps / seconds)


def report(settings: Settings, outcome: Outcome, display: Display) -> bool:
    """Show what came out; return whether gradients and buckets are right."""
    bitwise = must_be_bitwise(settings.backend)
    plan, checks, eager, ours = outcome.plan, outcome.checks, outcome.eager, outcome.ours
    gradients = all(check.gradients_right(bitwise=bitwise) for check in checks)
    reduced = sum(check.as_planned for check in checks)
    difference, error = max(check.difference for check in checks), max(check.error for check in checks)
    rows = [
        ("buckets planned", "", str(len(plan.buckets)), None),
        ("reduced exactly so", "", f"in {reduced} of {CHECKED} iterations", reduced == CHECKED),
        ("segments", "", f"{len(plan.segments)}, {outcome.compilations} compiled", None),
        ("gradients: largest difference", "", f"{difference:.1e}" if difference else "0, bitwise", gradients),
        ("gradients: error to float64", "1", f"{error:.2f}", None),
        (f"loss, step {settings.steps}", f"{eager.loss:.4f}", f"{ours.loss:.4f}", None),
        ("steps/s", f"{eager.steps_per_second:.2f}", f"{ours.steps_per_second:.2f}", None),
    ]
    display.table(f"{settings.ranks} ranks, gloo, {settings.backend}", rows)
    return gradients and reduced == CHECKED


def run_rank(settings: Settings) -> bool:
    """Run the demo on one rank; return whether all ranks found everything right."""
    # Dynamo notes on every compile of a DDP module that it drops the module's profiler ranges.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    try:
        display = Display(shown=dist.get_rank() == 0)
        with display.progress:
            outcome = Demo(settings, display).run()
        return report(settings, outcome, display)
    finally:
        dist.destroy_process_group()


def inductor_obstacle() -> str | None:
    """Say why Inductor cannot compile for the CPU here, or None if it can."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return "there is no C++ compiler (Debian: apt install g++)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers are missing (Debian: apt install python3-dev)"
    return None


def parse_settings() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backend", default="inductor", help="what compiles the segments (default: inductor)"
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps of each copy (default: 10)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start outside torchrun (default: 2)")
    parser.add_argument("--cap-mb", type=float, default=2.5, help="DDP's bucket_cap_mb (default: 2.5)")
    settings = Settings(**vars(parser.parse_args()))
    obstacle = inductor_obstacle() if settings.backend == "inductor" else None
    if obstacle is None:
        return settings
    print(f"Inductor cannot compile for the CPU here: {obstacle}. Going on with aot_eager.", file=sys.stderr)
    return replace(settings, backend="aot_eager")


def main() -> int:
    """Start the ranks, or be one of them where torchrun has started us."""
    settings = parse_settings()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0 if run_rank(replace(settings, ranks=int(os.environ["WORLD_SIZE"]))) else 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no name of it has to resolve
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.ranks,
        max_restarts=0,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
    )
    return 0 if all(elastic_launch(config, run_rank)(settings).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
