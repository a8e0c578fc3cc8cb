"""The most memory that a piece of code holds at once.

On the CPU torch's profiler tells every allocation; on a GPU the allocator itself keeps the peak.

Invariant: what was held before is not counted, so models with equal weights and buckets compare.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddpopt
from benchmarks.gpt import GptLike
from benchmarks.group import single_rank


def peak_of(changes: Iterable[int]) -> int:
    """The highest sum on the way, at least 0.

    Args:
        changes: bytes allocated (above 0) and freed (below 0), in the order of time.

    >>> peak_of([100, -40, 70, -130])
    130
    """
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that `run` holds at once, over what is held before.

    Args:
        run: called once.
        device: whose memory counts.

    Returns:
        Bytes of tensors; what a network library or a compiler holds is not among them.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return peak_of(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))


def _step_peak(mode: str, as_view: bool, layers: int, width: int) -> int:
    """The most that the fourth training step of a GPT holds at once, in bytes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GptLike(layers, width)
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=model.layer_bytes / 2**20, gradient_as_bucket_view=as_view
    )
    compilers: dict[str, Any] = {
        "eager": lambda module: module,
        "whole": torch.compile,
        "inline": ddpopt.compile,
    }
    call = compilers[mode](ddp)
    tokens = torch.randint(0, model.embedding.num_embeddings, (4, 64))

    def step() -> None:
        ddp.zero_grad()
        call(tokens).square().mean().backward()

    with torch._dynamo.config.patch(optimize_ddp=mode != "whole"):
        for _ in range(3):
            step()
        return peak_bytes(step, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Peak memory of a GPT's training step, as a ratio to eager DDP."
    )
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default: 4)")
    parser.add_argument("--width", type=int, default=128, help="width of the model (default: 128)")
    arguments = parser.parse_args()
    print(f"GPT of {arguments.layers} layers, width {arguments.width}, 4 x 64 tokens, CPU")
    with single_rank():
        for as_view in (False, True):
            peak = functools.partial(
                _step_peak, as_view=as_view, layers=arguments.layers, width=arguments.width
            )
            peaks = {mode: peak(mode) for mode in ("eager", "whole", "inline")}
            for mode, nbytes in peaks.items():
                row = f"{mode:8} gradient_as_bucket_view={as_view!s:5} {nbytes / 2**20:8.2f} MiB"
                print(f"{row} {nbytes / peaks['eager']:6.3f} of eager")


if __name__ == "__main__":
    main()
