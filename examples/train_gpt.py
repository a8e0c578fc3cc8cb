"""Train a small GPT on two ranks, with eager DDP and with both strategies of ddpopt, and compare them.

    make demo
    python -m examples.train_gpt --backend aot_eager --steps 5
    torchrun --nproc-per-node 3 -m examples.train_gpt

Each rank holds three copies of one model under DDP: one runs eagerly, two through `ddpopt.compile`, as
segments and inline. The first iterations compare gradients from equal weights; then each copy trains on its
own. The training text is this file. Exits with 1 if gradients or buckets disagree.
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
from ddpopt.cases.corpus.decoders import GPT
from examples.judging import Check, exact_gradients, follows_plan, must_be_bitwise, worst_gradient
from examples.showing import Display, Row

BATCH, LENGTH = 4, 128
CHECKED = 3
"""Iterations to compare: DDP's first, the one before which it rebuilds its buckets, and one like the rest."""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

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
class Ours:
    """The results of one strategy: what was compiled, how it compares, and how it trains."""

    compiled: str
    checks: list[Check]
    race: Race

    @property
    def as_planned(self) -> int:
        """The number of iterations in which DDP reduced exactly the plan's buckets."""
        return sum(check.as_planned for check in self.checks)

    @property
    def difference(self) -> float:
        """The largest difference of two elements of a gradient."""
        return max(check.difference for check in self.checks)

    @property
    def error(self) -> float:
        """The distance to the float64 gradients, in units of eager's own."""
        return max(check.error for check in self.checks)


@dataclass(frozen=True)
class Outcome:
    """The results of one rank."""

    plan: ddpopt.Plan
    eager: Race
    split: Ours
    inline: Ours


def build_model() -> nn.Module:
    """Make the model, with equal weights at every call: 4.8 million parameters, the head tied."""
    torch.manual_seed(0)
    return GPT(vocabulary=256, length=LENGTH, dim=256, heads=8, layers=6)


def draw_batch(text: Tensor, step: int) -> Tensor:
    """Draw windows ``(BATCH, LENGTH + 1)`` of the text, different on each rank and at each step."""
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
    """The copies of the model on one rank, and what is done with them."""

    def __init__(self, settings: Settings, display: Display) -> None:
        self.settings, self.display = settings, display
        self.eager = self.wrapped()
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.compilations = 0

    def wrapped(self) -> DistributedDataParallel:
        """Make a copy of the model under DDP."""
        return DistributedDataParallel(build_model(), bucket_cap_mb=self.settings.cap_mb)

    def run(self) -> Outcome:
        """Plan, compile, compare and train."""
        with self.display.phase("plan the buckets"):
            plan = ddpopt.plan(self.eager, draw_batch(self.text, 0)[:, :-1])
        split = self.run_split(plan)
        inline = self.run_inline(plan)
        return Outcome(plan, self.train("eager DDP", self.eager, self.eager), split, inline)

    def run_split(self, plan: ddpopt.Plan) -> Ours:
        """Cut the graph at the buckets."""
        ddp, backend = self.wrapped(), self.settings.backend
        with self.display.phase(f"split: compile segments with {backend}", len(plan.segments)) as advance:
            compiled = ddpopt.compile(ddp, backend=self.counting_backend(advance), strategy="split")
            first = self.check(ddp, compiled, plan, 0)  # the graph is captured at its first run
        checks = [first, *self.compare("split", ddp, compiled, plan)]
        said = f"{self.compilations}, for {len(plan.segments)} segments"
        return Ours(said, checks, self.train("split", ddp, compiled))

    def run_inline(self, plan: ddpopt.Plan) -> Ours:
        """Hand gradients over from inside one graph."""
        ddp, backend = self.wrapped(), self.settings.backend
        with self.display.phase(f"inline: compile one graph with {backend}"):
            compiled = ddpopt.compile(ddp, backend=backend, strategy="inline")
            first = self.check(ddp, compiled, plan, 0)
        checks = [first, *self.compare("inline", ddp, compiled, plan)]
        return Ours("1", checks, self.train("inline", ddp, compiled))

    def compare(
        self, name: str, ddp: DistributedDataParallel, compiled: Callable[..., Tensor], plan: ddpopt.Plan
    ) -> list[Check]:
        """Run the remaining checked iterations."""
        checks = []
        with self.display.phase(f"{name}: compare gradients and buckets", CHECKED - 1) as advance:
            for step in range(1, CHECKED):
                checks.append(self.check(ddp, compiled, plan, step))
                advance()
        return checks

    def counting_backend(self, advance: Callable[[], None]) -> Callable[..., Any]:
        """Make a backend that compiles with the chosen one and counts graphs."""
        compiler = lookup_backend(self.settings.backend)

        def compile_segment(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
            compiled = compiler(gm, example_inputs)
            self.compilations += 1
            advance()
            return compiled

        return compile_segment

    def check(
        self, ddp: DistributedDataParallel, compiled: Callable[..., Tensor], plan: ddpopt.Plan, step: int
    ) -> Check:
        """Run one iteration of eager DDP and of a compiled copy from equal weights, and compare."""
        batch = draw_batch(self.text, step)
        self.eager.zero_grad()
        backward(self.eager, batch)
        ddp.zero_grad()
        with ddpopt.observe(ddp) as seen:
            backward(compiled, batch)
        exact = exact_gradients(self.eager.module, lambda model: backward(model, batch))
        difference, error = worst_gradient(ddp.module, self.eager.module, exact)
        return Check(difference, error, follows_plan(seen, plan)).worst_over_ranks()

    def train(self, name: str, ddp: nn.Module, model: Callable[[Tensor], Tensor]) -> Race:
        """Train one copy."""
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        steps, loss = self.settings.steps, float("nan")
        with self.display.phase(f"{name}: train", steps) as advance:
            started = time.perf_counter()
            for step in range(steps):
                optimizer.zero_grad()
                loss = backward(model, draw_batch(self.text, step))
                optimizer.step()
                advance()
            seconds = time.perf_counter() - started
        return Race(loss, steps / seconds)


def report(settings: Settings, outcome: Outcome, display: Display) -> bool:
    """Show the results; return whether gradients and buckets are right."""
    bitwise = must_be_bitwise(settings.backend)
    both = outcome.split, outcome.inline
    gradients = [all(check.gradients_right(bitwise=bitwise) for check in ours.checks) for ours in both]
    reduced = [ours.as_planned == CHECKED for ours in both]
    rows = [
        Row("compilations", "", [ours.compiled for ours in both]),
        Row("buckets planned", "", [str(len(outcome.plan.buckets))] * 2),
        Row("steps reduced as planned", "", [f"{ours.as_planned} of {CHECKED}" for ours in both], reduced),
        Row("gradients off by", "", [shown(ours.difference) for ours in both], gradients),
        Row("error to float64, eager = 1", "1", [f"{ours.error:.2f}" for ours in both]),
        Row(
            f"loss, step {settings.steps}", f"{outcome.eager.loss:.4f}", [f"{o.race.loss:.4f}" for o in both]
        ),
        Row("steps/s", speed(outcome.eager), [speed(ours.race) for ours in both]),
    ]
    display.table(f"{settings.ranks} ranks, gloo, {settings.backend}", rows)
    return all(gradients) and all(reduced)


def shown(difference: float) -> str:
    """Describe the distance between two gradients."""
    return f"{difference:.1e}" if difference else "0, bitwise"


def loss(race: Race) -> str:
    """Describe a copy's final loss."""
    return f"{race.loss:.4f}"


def speed(race: Race) -> str:
    """Describe a copy's training speed."""
    return f"{race.steps_per_second:.2f}"


def run_rank(settings: Settings) -> bool:
    """Run the demo on one rank; return whether all ranks found everything right."""
    # Dynamo warns at every compile of a DDP module that it drops the module's profiler ranges.
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
    """Return why Inductor cannot compile for the CPU here, or None if it can."""
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
    parser.add_argument("--backend", default="inductor", help="Dynamo backend (default: inductor)")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each copy (default: 10)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start outside torchrun (default: 2)")
    parser.add_argument("--cap-mb", type=float, default=2.5, help="DDP's bucket_cap_mb (default: 2.5)")
    settings = Settings(**vars(parser.parse_args()))
    obstacle = inductor_obstacle() if settings.backend == "inductor" else None
    if obstacle is None:
        return settings
    print(f"Inductor cannot compile for the CPU here: {obstacle}. Using aot_eager.", file=sys.stderr)
    return replace(settings, backend="aot_eager")


def main() -> int:
    """Start the ranks, or run as a rank if torchrun started this process."""
    settings = parse_settings()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0 if run_rank(replace(settings, ranks=int(os.environ["WORLD_SIZE"]))) else 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no host name has to resolve
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
