"""The ways to run a training step that `benchmarks.step` compares, each with a model of its own.

Invariant: equal weights, inputs, optimizer and cap in all of them; only who compiles, and how, differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.step_workloads import MIB, Workload

EAGER, WHOLE, TORCH, SPLIT, INLINE = MODES = ("eager", "whole", "torch", "split", "inline")


class Mode:
    """One way to run a training step.

    Args:
        name: one of `MODES`.
        workload: what is trained.
        backend: name of a Dynamo backend.
        device: where it computes.

    Attributes:
        name: as given.
        ddp: the model.
        device: as given.
        counted: the backend that torch compiles with, which counts its graphs; of no use to other modes.
    """

    def __init__(self, name: str, workload: Workload, backend: str, device: torch.device) -> None:
        torch.manual_seed(0)
        model = workload.build().to(device)
        cap_bytes = workload.cap_bytes(model)
        cap_mb = None if cap_bytes is None else cap_bytes / MIB
        self.name = name
        self.device = device
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self.counted = Counted(backend)
        self._inputs = workload.inputs().to(device)
        self._call = self._compiled(backend)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        """Compute the loss, for `backward`."""
        with torch._dynamo.config.patch(optimize_ddp=self.name == TORCH):
            self._loss = self._call(self._inputs).square().mean()

    def backward(self) -> None:
        """The backward of the last forward."""
        loss, self._loss = self._loss, None
        assert loss is not None  # there was a forward
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def update(self) -> None:
        """Use the gradients, and drop them."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Forward, backward, update."""
        self.forward()
        self.backward()
        self.update()

    def _compiled(self, backend: str) -> Callable[[Tensor], Tensor]:
        if self.name == EAGER:
            return self.ddp
        if self.name in (WHOLE, TORCH):
            compiled: Callable[[Tensor], Tensor] = torch.compile(self.ddp, backend=self.counted)
            return compiled
        strategy: Literal["split", "inline"] = "split" if self.name == SPLIT else "inline"
        step: Callable[[Tensor], Tensor] = ddpopt.compile(self.ddp, backend=backend, strategy=strategy)
        return step


class Counted:
    """A backend that counts the graphs it is given.

    Each mode has its own, for Dynamo reuses what it compiled for an equal backend, and all modes run the same
    code.

    Args:
        backend: name of the Dynamo backend that compiles.

    Attributes:
        graphs: how many it was given; where torch's DDPOptimizer splits, each segment is one.
    """

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self._backend = backend

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        self.graphs += 1
        return torch._dynamo.lookup_backend(self._backend)(gm, list(example_inputs))
