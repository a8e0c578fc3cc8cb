"""Choose the buckets for a link without it: profile a step in this process, tune, and look at the step.

python -m examples.bucket_timeline --html step.html
python -m examples.bucket_timeline --link link.json    # as 'ddpopt link' measured it elsewhere
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ddpopt
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning import pictures, scale
from ddpopt.tuning.records import Gradient, Link, Profile, conditions
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import tune

GIGABIT = Link(0.001, 8.4e-9, 2.9e-9, 1.03, 0.05, "gloo", 2, {"device": "1 Gbit/s, assumed"})


def profiled(model: nn.Module, inputs: torch.Tensor, steps: int = 5) -> Profile:
    """Profile eager steps of one process; the medians of `steps`, after one that is not measured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    at: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    marks = []
    for name, parameter in model.named_parameters():
        hook: Any = parameter.register_post_accumulate_grad_hook
        hook(lambda _, name=name: at[name].append(time.perf_counter()))
    for _ in range(steps + 1):
        begin = time.perf_counter()
        loss = model(inputs).square().mean()
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        marks.append((begin, between, end, time.perf_counter()))
    gradients = []
    for name, parameter in model.named_parameters():
        ready = [when - mark[1] for when, mark in zip(at[name], marks, strict=True)][1:]
        spec = ParamSpec(name, parameter.nbytes, str(parameter.dtype).removeprefix("torch."), "cpu")
        gradients.append(Gradient(spec, median(ready)))
    forward_s, backward_s, update_s = (median(mark[i + 1] - mark[i] for mark in marks[1:]) for i in range(3))
    gradients.sort(key=lambda gradient: gradient.ready_s)
    return Profile(tuple(gradients), forward_s, backward_s, update_s, "eager", 2, conditions())


def main() -> None:
    """Compare DDP's default, a smaller cap and the tuned buckets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", type=Path, help="file with a link; by default one of 1 Gbit/s")
    parser.add_argument("--html", type=Path, help="page to write")
    options = parser.parse_args()
    link = Link.from_json(options.link.read_text()) if options.link else GIGABIT
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model, inputs = nn.TransformerEncoder(layer, 6), torch.randn(2, 64, 256)
    profile = profiled(model, inputs)
    plans = {"DDP's default": ddpopt.plan(model, inputs)}
    plans["bucket_cap_mb=3"] = ddpopt.plan(model, inputs, bucket_cap_mb=3)
    plans["tuned"] = tune(profile, link)
    steps = {name: simulate(plan, profile, link) for name, plan in plans.items()}
    steps |= scale.steps_of(profile, link, [8, 64])
    print(pictures.text(steps))
    if options.html:
        options.html.write_text(pictures.page("Buckets of a TransformerEncoder", steps), encoding="utf-8")


if __name__ == "__main__":
    main()
