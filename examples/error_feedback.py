"""Send gradients in half precision, and add what rounding lost to the next step's: a pass with tensors.

torchrun --nproc-per-node 2 -m examples.error_feedback
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

import ddpopt

aten: Any = torch.ops.aten


class ErrorFeedback(ddpopt.StatefulTransform):
    """Compresses each bucket of ``fusion="concat"``."""

    def __call__(self, graph_module: fx.GraphModule, state: Any) -> None:
        """Insert the compression before each all-reduce, and the opposite after its wait."""
        graph = graph_module.graph
        for sent in [each for each in graph.nodes if each.name.endswith("_all_reduce")]:
            bucket = sent.args[0]
            wide = {"dtype": bucket.meta["val"].dtype}
            residual = state.tensor(f"residual of {sent.name}", like=bucket, own=True)
            with graph.inserting_before(sent):
                wanted = graph.call_function(aten.add.Tensor, (bucket, residual))
                small = graph.call_function(aten._to_copy.default, (wanted,), {"dtype": torch.float16})
                back = graph.call_function(aten._to_copy.default, (small,), wide)
                lost = graph.call_function(aten.sub.Tensor, (wanted, back))
                graph.call_function(aten.copy_.default, (residual, lost))
            sent.replace_input_with(bucket, small)
            (wait,) = sent.users
            with graph.inserting_after(wait):
                received = graph.call_function(aten._to_copy.default, (wait,), wide)
            wait.replace_all_uses_with(received)
            received.args = (wait,)


def train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    """A step: learn the sum of the inputs."""
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    step = ddpopt.train_step(train, transform=ErrorFeedback(), parallel=ddpopt.Replicate())
    losses = [float(step(model, sgd, torch.randn(64, 32))) for _ in range(50)]
    lost = {name: float(tensor.norm()) for name, tensor in step.state_dict().items()}
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} to {losses[-1]:.3f}; norm of {lost}")
    dist.destroy_process_group()
