"""The ways to run a training step that `benchmarks.step` compares, each with its own model.

Invariant: weights, inputs, optimizer and cap are equal in all of them; only the compilation differs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.step_workloads import MIB, Workload

EAGER, WHOLE, TORCH, SPLIT, INLINE, STEP = MODES = ("eager", "whole", "torch", "split", "inline", "step")


class Mode:
    """One way to run a training step.

    Args:
        name: one of `MODES`.
        workload: the workload to train.
        backend: name of a Dynamo backend.
        device: the device to compute on.

    Attributes:
        name: as given.
        ddp: the model.
        device: as given.
        counted: torch's backend, which counts its graphs; unused in other modes.
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
        self._whole_step = self._one_graph(backend) if name == STEP else None

    def forward(self) -> None:
        """Compute the loss, for `backward`."""
        with torch._dynamo.config.patch(optimize_ddp=self.name == TORCH):
            self._loss = self._call(self._inputs).square().mean()

    def backward(self) -> None:
        """Run the backward of the last forward."""
        loss, self._loss = self._loss, None
        assert loss is not None  # there was a forward
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def update(self) -> None:
        """Apply the gradients, and drop them."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Run forward, backward and update."""
        if self._whole_step is not None:
            self._whole_step(self._inputs)
            return
        self.forward()
        self.backward()
        self.update()

    def _one_graph(self, backend: str) -> Callable[[Tensor], object]:
        ddp, optimizer = self.ddp, self._optimizer

        def step(inputs: Tensor) -> None:
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        whole: Callable[[Tensor], object] = ddpopt.train_step(step, backend=backend)
        return whole

    def _compiled(self, backend: str) -> Callable[[Tensor], Tensor]:
        if self.name in (EAGER, STEP):
            return self.ddp
        if self.name in (WHOLE, TORCH):
            compiled: Callable[[Tensor], Tensor] = torch.compile(self.ddp, backend=self.counted)
            return compiled
        strategy: Literal["split", "inline"] = "split" if self.name == SPLIT else "inline"
        step: Callable[[Tensor], Tensor] = ddpopt.compile(
            self.ddp, backend=backend, strategy=strategy, fallback=None
        )
        return step


class Counted:
    """A backend that counts the graphs it is given.

    Each mode has its own, because Dynamo reuses code compiled for an equal backend, and all modes run the
    same code.

    Args:
        backend: name of the Dynamo backend that compiles.

    Attributes:
        graphs: the number of graphs it was given; if torch's DDPOptimizer splits, each segment is one.
    """

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self._backend = backend

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        self.graphs += 1
        return torch._dynamo.lookup_backend(self._backend)(gm, list(example_inputs))
