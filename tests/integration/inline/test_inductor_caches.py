"""Inductor's caches on disk never give one process what was compiled for another way of training.

Each run is a process of its own, as on the day after. They share one folder of caches.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
import ddpopt
from ddpopt.ddp.ready_hooks import ReadyHooks

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

way, store = sys.argv[1:]
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
handed_over = []
hand_over = ReadyHooks.hand_over
ReadyHooks.hand_over = lambda self, place, *rest: (handed_over.append(place), hand_over(self, place, *rest))
ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.004)
torch._dynamo.config.optimize_ddp = False
step = torch.compile(ddp) if way == "whole" else ddpopt.compile(ddp, strategy=way)
step(torch.ones(4, 32)).sum().backward()
print(json.dumps({
    "handed over": handed_over,
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "gradients": [parameter.grad.double().sum().item() for parameter in ddp.parameters()],
}))
dist.destroy_process_group()
"""
ORDER = [5, 4, 3, 2, 1, 0]
"""Bias before weight, last layer first, as autograd completes them."""


def run(way: str, folder: Path) -> Any:
    store = folder / f"store-{len([*folder.iterdir()])}"
    return result_of(PROGRAM, way, store.as_uri(), caches=folder / "caches")


def result_of(program: str, *arguments: str, caches: Path) -> Any:
    """What a process of its own prints, as JSON."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_what_was_compiled_inline_is_found_again_and_never_mistaken_for_the_plain_graph(
    tmp_path: Path,
) -> None:
    first = run("inline", tmp_path)
    plain = run("whole", tmp_path)
    again = run("inline", tmp_path)

    assert [each["handed over"] for each in (first, plain, again)] == [ORDER, [], ORDER]
    assert [each["hits"] > 0 for each in (first, plain, again)] == [False, False, True]
    assert plain["gradients"] == first["gradients"] == again["gradients"]


VIEWS = """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddpopt

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    def forward(self, x):
        made = self.first(x)
        one, other = made.flatten(1), made.flatten(1)[:, 1:]
        return self.second(x).flatten(1) * one, other.sin()

def sums(step):
    torch.autograd.backward(sum(value.sum() for value in step(torch.ones(2, 3, 8))))
    found = [parameter.grad.double().sum().item() for parameter in net.parameters()]
    net.zero_grad()
    return found

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = Net()
found = [sums(net)]
for _ in range(2):
    torch._dynamo.reset()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    found.append(sums(ddpopt.compile(ddp, strategy="split")))
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_views_that_leave_a_segment_come_back_whole_from_the_caches(tmp_path: Path) -> None:
    # torch up to 2.13 writes garbage for their sizes, or crashes (pytorch#185630)
    eager, *starts = result_of(VIEWS, caches=tmp_path)
    assert starts == [pytest.approx(eager, rel=1e-5)] * 2
